"""Passes that are not one call of each layer in turn, all alike: the budget holds for them, and figures are theirs."""

import gc
import weakref

import pytest
import torch
from torch import nn

import forebay
from forebay.activations.budget.controller import MEASURING, PATIENCE
from support.budget import budgeted, peak_of, peak_outside
from support.offload import WIDTH, Block, Stack, assert_nothing_left, data, gradients, stack, train
from support.tensors import assert_same

LARGE = 1 << 29


def blocks(count: int, kind: type[Block] = Block) -> list[Block]:
    torch.manual_seed(0)
    return [kind() for _ in range(count)]


class Adapted(Stack):
    """Frozen layers, all alike; something that is trained comes in from the third on."""

    def __init__(self, *layers: Block) -> None:
        super().__init__(*layers)
        self.requires_grad_(False)
        self.vector = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add it there."""
        for number, layer in enumerate(self.layers):
            x = layer(x + self.vector if number == 2 else x)
        return x


class Dropping(Stack):
    """Leaves layers out in a few passes."""

    passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Leave out the first one, and then the last one."""
        left_out = {1: 0, 3: 7}.get(self.passes)
        self.passes += 1
        for number, layer in enumerate(self.layers):
            x = x if number == left_out else layer(x)
        return x


class Paired(Block):
    """Takes and gives a tuple."""

    def forward(self, pair: tuple[torch.Tensor, None]) -> tuple[torch.Tensor, None]:
        """Work on the first of it."""
        return super().forward(pair[0]), pair[1]


class Pairs(Stack):
    """Layers that hand a tuple on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run them."""
        return super().forward((x, None))[0]


class Rounds(Stack):
    """Goes through its layers several times."""

    def __init__(self, *layers: Block, rounds: int = 4) -> None:
        super().__init__(*layers)
        self.rounds = rounds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Go round."""
        for _ in range(self.rounds):
            x = super().forward(x)
        return x


class Inward(Block):
    """Takes a gradient in its forward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Go a little downhill."""
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(self.up(at)).square().sum(), at)
        return super().forward(x) - 0.01 * slope


def freeze(model: Stack, number: int, until: int) -> None:
    """Have the first layers frozen in passes before some."""
    for layer in model.layers[:5]:
        layer.requires_grad_(number >= until)


CASES = {
    "a trained vector among frozen layers": (lambda: Adapted(*blocks(8)), {}),
    "layers left out while measured": (lambda: Dropping(*blocks(8)), {}),
    "frozen after the call": (
        lambda: Stack(*blocks(8)),
        {"before": lambda model, i: freeze(model, i, 99), "call": lambda model: freeze(model, 0, 0), "place": 0.6},
    ),
    "unfrozen later": (lambda: Stack(*blocks(8)), {"before": lambda model, i: freeze(model, i, 5), "later": 5}),
    "autocast switched off later": (lambda: Stack(*blocks(8)), {"cast": lambda i: i < 5, "later": 5}),
    "tuples of two lengths": (lambda: Pairs(*blocks(8, Paired)), {"rows": lambda i: 64 if i < 5 else 256, "later": 5}),
    "two layers, four times": (lambda: Rounds(*blocks(2)), {}),
    "one layer, eight times": (lambda: Rounds(*blocks(1), rounds=8), {}),
    "one layer, listed eight times": (lambda: Stack(*blocks(1) * 8), {}),
    "four layers, each listed twice in a row": (lambda: Stack(*[b for b in blocks(4) for _ in range(2)]), {}),
    "a gradient inside of layers": (lambda: Stack(*blocks(8, Inward)), {}),
}


@pytest.mark.filterwarnings("ignore:layer .* are not recomputed")
@pytest.mark.parametrize("case", CASES)
def test_the_budget_holds(case: str, meter, device: torch.device) -> None:
    build, about = CASES[case]
    rows, cast = about.get("rows", lambda _: 256), about.get("cast", lambda _: False)
    before, last = about.get("before", lambda *_: None), about.get("later", 0) + MEASURING + 6
    model, x = build().to(device), data(device, rows=256)

    def run(i: int) -> list[torch.Tensor]:
        before(model, i)
        with torch.autocast(device.type, torch.bfloat16, enabled=cast(i)):
            loss = model(x[: rows(i)]).square().mean()
        loss.backward()
        return gradients(model)

    expected = run(last)
    whole = peak_of(meter, lambda: run(last))
    budget = int(about.get("place", 0.5) * whole)
    about.get("call", lambda _: None)(model)
    model.passes = 0
    with budgeted(model, budget) as handle:
        for i in range(last):
            run(i)
        # On a busy machine the times of passes vary: a pass may follow a new plan, and one that took more than others
        # makes later predictions larger than they need be.
        for _ in range(12):
            peak = peak_outside(meter, lambda: run(last))
            shown = handle.table()[-1]
            assert max(peak, shown["peak_bytes"]) <= budget, f"of {whole}"
            # The figures are of the pass alone; from outside, what is around it counts too: less than its input.
            as_seen = not peak or shown["peak_bytes"] == pytest.approx(peak, rel=0.02, abs=x.nbytes)
            if as_seen and -0.15 < shown["peak_error"] < 0.5:
                break
        else:
            pytest.fail(f"{shown['peak_bytes']} bytes are shown, {peak} were seen; {shown['peak_error']:.0%} off")
        assert_same(expected, run(last))
        assert_nothing_left(handle)


def test_layers_that_come_to_save_more_are_measured_again(device: torch.device) -> None:
    class Growing(Block):
        def __init__(self) -> None:
            super().__init__()
            self.waves = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            for _ in range(self.waves):
                x = x + torch.sin(x)
            return x

    model, x = Stack(*blocks(4, Growing)).to(device), data(device)
    with budgeted(model, LARGE) as handle:
        for _ in range(MEASURING + 1):
            train(model, x)
        (workload,) = handle._budget.workloads.values()
        first = workload.cost.layers[0].saved_bytes
        for layer in model.layers:
            layer.waves = 4
        for _ in range(MEASURING + 2):
            train(model, x)
        handle.table()
        assert (len(handle._budget.workloads), workload.renewals) == (1, 1)
        assert workload.cost.layers[0].saved_bytes > first


def test_calls_are_rows_of_the_table(meter, device: torch.device) -> None:
    model, x = Rounds(*blocks(2)).to(device), data(device)
    with budgeted(model, LARGE) as handle:
        for _ in range(MEASURING + 3):
            train(model, x)
        *rows, _ = handle.table()
        assert [row["layer"] for row in rows] == list(range(8))
        assert all(row["choice"] == "keep" and row["kept"] and row["forward_s"] > 0 for row in rows)
        assert all(row["planned_kept_bytes"] == rows[0]["planned_kept_bytes"] > 0 for row in rows)


def test_layers_called_by_hand_are_not_counted_as_rounds(device: torch.device) -> None:
    model, x = stack(device), data(device)
    with budgeted(model, LARGE) as handle:
        train(model, x)
        for _ in range(5):
            model.layers[1](model.layers[0](model.layers[0](x)))
        assert len(handle._budget.places) == 4
        assert len(handle.table()) == 4


def test_what_saves_more_than_it_did_is_measured_again(meter, device: torch.device) -> None:
    """Nothing that layers are given at first tells that from some pass on gradients go through most of them."""
    model, x = Adapted(*blocks(8)).to(device), data(device, rows=256)
    head = nn.Parameter(torch.ones(WIDTH, device=device))

    def run() -> list[torch.Tensor]:
        (model(x) * head).square().mean().backward()
        found, head.grad = [head.grad, *gradients(model)], None
        return found

    expected = run()
    budget = peak_of(meter, run) // 2
    model.vector.requires_grad_(False)
    with budgeted(model, budget) as handle:
        for _ in range(MEASURING + 3):
            run()
        model.vector.requires_grad_(True)
        for _ in range(MEASURING + 8):
            peak = peak_outside(meter, run)
        assert peak <= budget
        assert handle.table()[-1]["peak_bytes"] <= budget
        assert_same(expected, run())


def one_ahead(model: nn.Module, x: torch.Tensor, drain: int) -> list[torch.Tensor]:
    """Have two passes under way, as a stage of a pipeline has; with or without none in between."""
    found, ahead = [], []
    for i in range(12):
        ahead.append(model(x * (1 + i % 3)).square().mean())
        if len(ahead) == 3:
            ahead.pop(0).backward()
        while i % drain == drain - 1 and ahead:
            ahead.pop(0).backward()
        found += gradients(model)
    for loss in ahead:
        loss.backward()
    return found + gradients(model)


@pytest.mark.parametrize("drain", [4, 99])
def test_passes_under_way_at_once_are_learnt_from(drain: int, meter, device: torch.device) -> None:
    model, x = stack(device), data(device)
    expected = one_ahead(model, x, drain)
    with budgeted(model, LARGE) as handle:
        for _ in range(2):
            assert_same(expected, one_ahead(model, x, drain))
        assert handle.plan() is not None
        assert "passes overlap" in handle.explain()
        assert_nothing_left(handle)


def test_many_passes_under_way_are_not_taken_for_lost(device: torch.device) -> None:
    model, x = stack(device), data(device)
    with budgeted(model, LARGE) as handle:
        for _ in range(MEASURING + 1):
            for loss in [model(x).square().mean() for _ in range(PATIENCE + 4)]:
                loss.backward()
            gradients(model)
        assert handle.plan() is not None


def test_a_budget_that_plain_torch_meets_is_not_refused(meter, device: torch.device) -> None:
    """Where gradients are nearly all of it, predictions that are off by little are off by more than can be gained."""
    if device.type != "cpu":
        pytest.skip("the sizes are for memory that is counted to the byte")
    torch.manual_seed(0)
    model, x = Stack(*(Block(256) for _ in range(8))), torch.randn(64, 256)

    def run() -> list[torch.Tensor]:
        model(x).square().mean().backward()
        return gradients(model)

    expected = run()
    whole = peak_of(meter, run)
    with budgeted(model, LARGE) as handle:
        for _ in range(MEASURING + 1):
            run()
        least = handle.plan()["least_bytes"]
    assert whole < least, "the test shows nothing"
    with budgeted(model, (whole + least) // 2) as handle:
        for _ in range(MEASURING + 4):
            assert_same(expected, run())
        assert handle.table()[-1]["peak_bytes"] <= (whole + least) // 2
    with budgeted(model, whole - least // 50):
        for _ in range(MEASURING):
            run()
        with pytest.raises(forebay.OptionError, match="raise the budget"):
            run()


class Normed(Block):
    """Has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use them, or change them."""
        return self.batch(super().forward(x))


@pytest.mark.filterwarnings("ignore:layer .* are not recomputed")
def test_a_part_that_goes_from_evaluation_to_training_is_looked_at_again(device: torch.device) -> None:
    model, x = Stack(*blocks(3, Normed)).to(device), data(device)
    with budgeted(model, LARGE, min_bytes=1) as handle:
        budget = handle._budget

        def recompute(ways):
            for way, kind in zip(ways, budget.kinds, strict=True):
                way.recompute, way.wanted = kind.vetted and kind.reason is None, {}
            return ways

        budget.forced = recompute
        for number in range(8):
            for layer in model.layers:
                layer.batch.train(number >= 4)
            train(model, x)
    assert [int(layer.batch.num_batches_tracked) for layer in model.layers] == [4, 4, 4]


def test_figures_are_those_of_the_length_that_is_shown(meter, device: torch.device) -> None:
    model, x = stack(device, depth=8), data(device, rows=290)

    def run(rows: int) -> None:
        model(x[:rows]).square().mean().backward()
        gradients(model)

    run(290)
    with budgeted(model, int(0.6 * peak_of(meter, lambda: run(290)))) as handle:
        for _ in range(MEASURING + 4):
            run(290)
        handle.table()
        (workload,) = handle._budget.workloads.values()
        workload.done = True
        for _ in range(3):
            peak = peak_outside(meter, lambda: run(256))
        assert len(handle._budget.workloads) == 1, "the test shows nothing"
        shown = handle.table()[-1]
        if peak:
            assert shown["peak_bytes"] == pytest.approx(peak, rel=0.005)
        assert shown["peak_error"] == shown["predicted_peak_bytes"] / shown["peak_bytes"] - 1


def test_what_is_not_there_is_not_explained(device: torch.device) -> None:
    model = stack(device)
    with pytest.warns(UserWarning, match="nothing is offloaded or recomputed"):
        handle = forebay.offload_activations(model, budget_bytes=1 << 60)
    assert f"budget_bytes is {1 << 60}" in handle.explain()
    assert "nothing is offloaded or recomputed" in handle.explain()
    with forebay.offload_activations(model) as handle:
        assert handle.explain() == "no budget; nothing has run yet"
    assert forebay.offload_activations(model, fraction=0.0).explain() == "no budget; 0% of the bytes leave"


def test_a_handle_does_not_keep_the_model(device: torch.device) -> None:
    model, x = stack(device), data(device)
    handle = budgeted(model, LARGE)
    for _ in range(MEASURING + 2):
        train(model, x)
    layer = weakref.ref(model.layers[0])
    handle.remove()
    assert handle.plan() is not None
    del model
    gc.collect()
    assert layer() is None
