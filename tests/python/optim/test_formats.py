"""State in fewer bits: bf16, and 8 bits in blocks with a scale."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

import forebay
from forebay import _core
from support.formats import BF16, BLOCKS, SIGNED, UNSIGNED, Twin, kept, rounded
from support.optim import clone, give_gradients, groups_of, make, snapshot, train
from support.overlap import Run, both, net
from support.tensors import assert_same, random, same_bits

F16, F32 = torch.float16, torch.float32
SHAPES = ((33, 7), (5,), (257,), (), (64, 40), (0, 3), (1000,), (256,))
"""With and without a whole block, and with a last one that is short."""
RULES: dict[str, tuple[type, dict[str, Any]]] = {
    "AdamW": (forebay.AdamW, {"weight_decay": 0.1}),
    "AdamW, amsgrad and maximize": (forebay.AdamW, {"amsgrad": True, "maximize": True}),
    "Adam": (forebay.Adam, {"weight_decay": 0.1}),
    "SGD": (forebay.SGD, {"weight_decay": 0.1}),
    "SGD with momentum": (forebay.SGD, {"momentum": 0.9, "nesterov": True}),
    "Lion": (forebay.Lion, {"weight_decay": 0.1}),
}
FORMATS: dict[str, Any] = {"bf16": BF16, "8bit": BLOCKS}
CHUNK = 6 << 10
"""A small chunk for blocks of three moments with a master, and with parameter and gradient on the host."""
RANDOM = {"stochastic_rounding": True, "rounding_seed": 5}


def parameters_of(device: torch.device, dtype: torch.dtype | list[torch.dtype] = F32) -> list[torch.nn.Parameter]:
    """Return parameters of every shape, and two whose memory is in another order or has gaps."""
    first = dtype if isinstance(dtype, torch.dtype) else dtype[0]
    return [
        *make(SHAPES, device=device, dtype=dtype),
        torch.nn.Parameter(random((30, 41), 3).to(device, first).t()),
        torch.nn.Parameter(random((40, 40), 3).to(device, first)[::2, ::3]),
    ]


def formats_of(optimizer: Any, kept_as: Any) -> dict[str, Any]:
    """Return the format of each column of an optimizer's rule."""
    return {name: kept_as.get(name, F32) if isinstance(kept_as, dict) else kept_as for name in optimizer._rule.columns}


def run(
    device: torch.device, cls: type = forebay.AdamW, dtype: Any = F32, steps: int = 5, **options: Any
) -> tuple[Any, list[torch.nn.Parameter]]:
    """Train parameters of every shape, some of them without a gradient for a while."""
    parameters = parameters_of(device, dtype)
    optimizer = cls(parameters, **{"lr": 1e-2, "chunk_bytes": CHUNK, **options})
    take(optimizer, parameters, steps)
    return optimizer, parameters


def take(optimizer: Any, parameters: list[torch.nn.Parameter], steps: int | range) -> None:
    for step in range(steps) if isinstance(steps, int) else steps:
        give_gradients(parameters, step)
        for parameter in parameters[step % 3 :: 4] if step % 2 else ():
            parameter.grad = None
        optimizer.step()


def assert_equal(runs: list[tuple[Any, list[torch.nn.Parameter]]]) -> None:
    """Assert that parameters and state are the same, bit for bit."""
    first, *others = [snapshot(optimizer, parameters) for optimizer, parameters in runs]
    for other in others:
        assert_same(first, other)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("kept_as", FORMATS)
@pytest.mark.parametrize("options", [{}, RANDOM], ids=["nearest", "random"])
def test_bits_are_those_of_a_step_and_a_rounding(
    device: torch.device, placement: str, name: str, kept_as: str, options: dict[str, Any]
) -> None:
    cls, settings = RULES[name]
    dtype = [F32, BF16, F16]
    given = {**settings, **options, "state_dtype": FORMATS[kept_as]}
    optimizer, parameters = run(device, cls, dtype, placement=placement, **given)
    others = parameters_of(device, dtype)
    plain = cls(others, lr=1e-2, placement=placement, **settings)
    twin = Twin(plain, formats_of(plain, FORMATS[kept_as]), options.get("rounding_seed"))
    take(twin, others, 5)
    assert_equal([(optimizer, parameters), (plain, others)])


@pytest.mark.parametrize("kept_as", [BF16, BLOCKS, {"exp_avg": BLOCKS, "exp_avg_sq": BF16}], ids=str)
def test_nothing_else_changes_a_bit(device: torch.device, kept_as: Any) -> None:
    for more in ({}, RANDOM):
        of = {"state_dtype": kept_as, "amsgrad": True, "dtype": [BF16, F32], "max_grad_norm": 0.5, **more}
        runs = [run(device, placement=placed, **of) for placed in ("stream", "resident", "host", "hybrid")]
        runs += [run(device, chunk_bytes=size, slots=slots, **of) for size, slots in ((8999, 2), (1 << 20, 7))]
        runs += [run(device, placement="host", host_threads=1, **of)]
        runs += [run(device, placement="hybrid", host_fraction=share, **of) for share in (0.3, 0.7)]
        runs += [run(device, **share, **of) for share in ({"resident_fraction": 0.5}, {"resident_bytes": 9000})]
        runs += [run(device, master_weights="compact", **of)]
        assert_equal(runs)
        assert any(room.is_resident for room in runs[9][0].state.rooms.values())
        assert not all(room.is_resident for room in runs[9][0].state.rooms.values())


def test_groups_that_come_later_have_the_same_bits(device: torch.device, placement: str) -> None:
    runs = []
    for later in (False, True):
        parameters = parameters_of(device)
        groups = groups_of(parameters)
        given = {"placement": placement, "state_dtype": BLOCKS, **RANDOM}
        optimizer = forebay.AdamW(groups[:2] if later else groups, **given)
        first = [*groups[0]["params"], *groups[1]["params"]]
        for step in range(2):
            give_gradients(first, step)
            optimizer.step()
        if later:
            optimizer.add_param_group(groups[2])
        everything = [*first, *groups[2]["params"]]
        train(optimizer, everything, range(2, 5))
        runs.append((optimizer, everything))
    assert_equal(runs)


@pytest.mark.parametrize("kept_as", FORMATS)
def test_random_numbers_depend_on_the_seed_and_the_parameter_s_place(device: torch.device, kept_as: str) -> None:
    def state(seed: int, *, before: int = 0) -> dict[str, torch.Tensor]:
        parameters = [torch.nn.Parameter(torch.zeros(4096, device=device)) for _ in range(before + 1)]
        given = {"state_dtype": FORMATS[kept_as], "stochastic_rounding": True, "rounding_seed": seed}
        optimizer = forebay.AdamW(parameters, **given)
        for parameter in parameters:
            parameter.grad = random((4096,), 1).to(device)
        optimizer.step()
        return dict(optimizer.state[parameters[-1]])

    first = state(1)
    assert_same(first, state(1))
    for other in (state(2), state(1, before=1)):
        assert all(not torch.equal(first[name], other[name]) for name in ("exp_avg", "exp_avg_sq"))
    # The state may be created in any order.
    late = [torch.nn.Parameter(torch.zeros(4096, device=device), requires_grad=False) for _ in range(2)]
    optimizer = forebay.AdamW(late, state_dtype=FORMATS[kept_as], stochastic_rounding=True, rounding_seed=1)
    for parameter in reversed(late):
        parameter.requires_grad_()
        parameter.grad = random((4096,), 1).to(device)
        optimizer.step()
        parameter.grad = None
    assert_same(dict(optimizer.state[late[1]]), state(1, before=1))


@pytest.mark.parametrize("kept_as", FORMATS)
def test_random_rounding_has_no_bias(device: torch.device, kept_as: str) -> None:
    exact = torch.rand(1 << 16, generator=torch.Generator().manual_seed(2)).to(device) * 0.9 + 0.1
    exact[::256] = 1.0
    total = torch.zeros_like(exact)
    for seed in range(64):
        parameter = torch.nn.Parameter(torch.zeros_like(exact))
        # Lion's average after one step is (1 - 0.5) times the gradient.
        given = {"state_dtype": FORMATS[kept_as], "stochastic_rounding": True, "rounding_seed": seed}
        optimizer = forebay.Lion([parameter], betas=(0.5, 0.5), **given)
        parameter.grad = 2 * exact
        optimizer.step()
        total += optimizer.state[parameter]["exp_avg"]
    error = (total / 64 / exact - 1).mean().item()
    widest = 2.0**-8 if kept_as == "bf16" else 2.0**-3
    assert abs(error) < widest / 500, error
    nearest = rounded(exact.cpu(), FORMATS[kept_as], signed=True)
    assert (total.cpu() / 64 - exact.cpu()).abs().mean() < (nearest - exact.cpu()).abs().mean() / 2


@pytest.mark.parametrize("kept_as", FORMATS)
@pytest.mark.parametrize("placed", ["stream", "resident"])
@pytest.mark.parametrize("clip", [None, 0.05], ids=["plain", "clipped"])
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_overlapped_steps_have_the_same_bits(
    device: torch.device, kept_as: str, placed: str, clip: float | None, late: bool
) -> None:
    def body(one: Run) -> None:
        one.train(4)

    given = {"placement": placed, "max_grad_norm": clip, "state_dtype": FORMATS[kept_as], "chunk_bytes": CHUNK}
    both(body, device, model=lambda device: net(device, BF16), late=late, **given, **RANDOM)


@pytest.mark.parametrize("kept_as", FORMATS)
@pytest.mark.parametrize("limit", [1e6, 1e-3], ids=["right", "wrong"])
def test_guesses_have_the_same_bits(
    device: torch.device, kept_as: str, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.optim.overlap.guess.Chances.allow", lambda self: True)

    def body(one: Run) -> None:
        for step in range(4):
            one.train(range(step, step + 1))
            # The state is read from the copy that is the state now.
            one.see(*(one.optimizer.state[parameter]["exp_avg"] for parameter in one.model.parameters()))
        one.optimizer.synchronize()

    given = {"max_grad_norm": limit, "state_dtype": FORMATS[kept_as], "chunk_bytes": CHUNK, **RANDOM}
    stats = both(body, device, model=lambda device: net(device, BF16), overlap={"speculate": True}, **given)
    assert stats["speculated"] > 0


@pytest.mark.parametrize("kept_as", FORMATS)
def test_last_backward_has_the_same_bits(device: torch.device, kept_as: str) -> None:
    found = []
    for early in (False, True):
        model = net(device)
        given = {"placement": "host", "state_dtype": FORMATS[kept_as], **RANDOM}
        optimizer = forebay.AdamW(model.parameters(), lr=1e-2, **given)
        for _ in range(3):
            loss = model(torch.ones(4, 24, device=device)).square().mean()
            if early:
                with optimizer.last_backward():
                    loss.backward()
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(snapshot(optimizer, list(model.parameters())))
    assert_same(*found)


@pytest.mark.parametrize("kept_as", FORMATS)
def test_a_column_is_an_f32_copy(device: torch.device, placement: str, kept_as: str) -> None:
    optimizer, parameters = run(device, placement=placement, state_dtype=FORMATS[kept_as])
    for parameter in parameters:
        state = optimizer.state[parameter]
        assert list(state) == ["step", "exp_avg", "exp_avg_sq"]
        found = state["exp_avg"]
        assert (found.dtype, found.shape) == (F32, parameter.shape)
        assert found.device == (device if placement == "resident" else torch.device("cpu"))
        before = found.clone()
        if parameter.numel() >= 256 or kept_as == "bf16":
            found.fill_(7.0)
        ways = (state["exp_avg"], state.get("exp_avg"), {**state}["exp_avg"], dict(state.items())["exp_avg"])
        assert all(same_bits(way, before) for way in ways)


@pytest.mark.parametrize("kept_as", FORMATS)
def test_assigned_values_are_rounded_to_nearest(device: torch.device, placement: str, kept_as: str) -> None:
    optimizer, parameters = run(device, placement=placement, state_dtype=FORMATS[kept_as], **RANDOM)
    for i, parameter in enumerate(parameters):
        value = random(parameter.shape, 60 + i).to(device)
        if i % 2:
            optimizer.state[parameter]["exp_avg"] = value
        else:
            optimizer.state[parameter] = {**optimizer.state[parameter], "exp_avg": value}
        of = FORMATS[kept_as] if kept_as == "bf16" or parameter.numel() >= 256 else F32
        found = optimizer.state[parameter]["exp_avg"]
        assert_same(found.cpu(), kept(parameter, value, of, signed=True).cpu())
        # What was read may be assigned: another rounding changes nothing.
        optimizer.state[parameter]["exp_avg"] = found
        assert_same(optimizer.state[parameter]["exp_avg"], found)
    before = snapshot(optimizer, parameters)
    with pytest.raises(forebay.OptionError, match="exp_avg as assigned"):
        optimizer.state[parameters[0]]["exp_avg"] = torch.zeros(3)
    assert_same(snapshot(optimizer, parameters), before)


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_codes_stand_for_the_written_shares(signed: bool) -> None:
    shares = SIGNED if signed else UNSIGNED
    assert len(shares) == (128 if signed else 256)
    parameter = torch.nn.Parameter(torch.zeros(512))
    optimizer = forebay.AdamW([parameter], state_dtype=BLOCKS)
    optimizer.prepare()
    name = "exp_avg" if signed else "exp_avg_sq"
    # One block of every code, beside one of zeros.
    value = torch.zeros(512)
    value[: len(shares)] = 3.0 * shares
    value[128:256] *= -1.0 if signed else 1.0
    if signed:
        value[128:256] = -value[:128]
    optimizer.state[parameter][name] = value
    assert_same(optimizer.state[parameter][name], value)
    # A number above zero stays above zero where there is no sign.
    value[1] = 1e-30
    optimizer.state[parameter][name] = value
    assert (optimizer.state[parameter][name][1] > 0).item() != signed


def test_formats_by_column(device: torch.device, placement: str) -> None:
    mapping = {"exp_avg": BF16, "exp_avg_sq": BLOCKS}
    optimizer, parameters = run(device, placement=placement, state_dtype=mapping)
    others = parameters_of(device)
    plain = forebay.AdamW(others, lr=1e-2, placement=placement)
    take(Twin(plain, {**mapping, "max_exp_avg_sq": F32}), others, 5)
    assert_equal([(optimizer, parameters), (plain, others)])
    stats = optimizer.stats()
    large = [p for p in parameters if p.numel() >= 256]
    assert stats["state_formats"] == {"bf16+8bit": len(large), "bf16+f32": len(parameters) - len(large)}
    assert len(stats["f32_state"]) == len(parameters) - len(large)


@pytest.mark.parametrize(
    ("kept_as", "expected"),
    [
        (BLOCKS, ["8bit", "8bit", "8bit"]),
        ({"exp_avg": BF16}, ["bf16", "f32", "f32"]),
        ({"exp_avg_sq": BLOCKS}, ["f32", "8bit", "8bit"]),
        ({"exp_avg_sq": BLOCKS, "max_exp_avg_sq": F32}, ["f32", "8bit", "f32"]),
        ({"max_exp_avg_sq": BF16}, ["f32", "f32", "bf16"]),
        ({}, ["f32", "f32", "f32"]),
    ],
    ids=str,
)
def test_the_largest_square_follows_the_square(kept_as: Any, expected: list[str]) -> None:
    parameter = torch.nn.Parameter(torch.zeros(300))
    optimizer = forebay.AdamW([parameter], amsgrad=True, state_dtype=kept_as)
    train(optimizer, [parameter], 1)
    room = optimizer.state.rooms[id(parameter)]
    found = [room.packed[name].format if name in room.packed else "f32" for name in room.columns]
    assert found == expected


def test_statistics_name_small_parameters_and_count_bytes(device: torch.device) -> None:
    assert _core.STATE_BLOCK == 256
    sizes = (255, 256, 3, 1 << 20, 0)
    parameters = make([(size,) for size in sizes], device=device, dtype=BF16)
    named = [(f"layer.{size}", parameter) for size, parameter in zip(sizes, parameters, strict=True)]
    optimizer = forebay.AdamW(named, state_dtype=BLOCKS, master_weights="compact")
    train(optimizer, parameters, 1)
    stats = optimizer.stats()
    assert stats["state_formats"] == {"8bit": 2, "f32": 3}
    assert stats["f32_state"] == ["layer.255", "layer.3", "layer.0"]

    def size(n: int) -> int:
        moments = 8 * n if n < 256 else 2 * (n + 4 * -(-n // 256))
        return moments + 2 * n + -(-n // 8)

    assert stats["fetch_bytes"] == stats["store_bytes"] == sum(map(size, sizes))
    assert [room.bytes for room in optimizer.state.rooms.values()] == list(map(size, sizes))
    for kept_as, each in ((BF16, 4), (F32, 8), (BLOCKS, 2 + 2 / 64)):
        parameter = torch.nn.Parameter(torch.zeros(1 << 20, device=device))
        one = forebay.AdamW([parameter], state_dtype=kept_as)
        train(one, [parameter], 1)
        assert one.stats()["fetch_bytes"] == each * (1 << 20)
        assert one.stats()["pinned_bytes"] < each * (1 << 20) + (1 << 13)
        assert one.stats()["f32_state"] == []


def test_without_columns_there_is_nothing_to_keep(device: torch.device, placement: str) -> None:
    parameters = parameters_of(device)
    optimizer = forebay.SGD(parameters, lr=1e-2, placement=placement, state_dtype=BLOCKS)
    train(optimizer, parameters, 2)
    others = parameters_of(device)
    plain = forebay.SGD(others, lr=1e-2, placement=placement)
    train(plain, others, 2)
    assert_equal([(optimizer, parameters), (plain, others)])
    assert optimizer.stats()["state_formats"] == {}
    assert optimizer.stats()["f32_state"] == []


@pytest.mark.parametrize("kept_as", FORMATS)
def test_state_that_appears_late(device: torch.device, placement: str, kept_as: str) -> None:
    parameters = parameters_of(device)
    given = {"lr": 1e-2, "momentum": 0.9, "placement": placement, "state_dtype": FORMATS[kept_as]}
    optimizer = forebay.SGD(parameters, **given)
    optimizer.prepare()
    assert len(optimizer.state) == 0
    train(optimizer, parameters[:4], 1)
    assert [list(optimizer.state.get(p, {})) for p in parameters] == [["momentum_buffer"]] * 4 + [[]] * 6
    value = random(parameters[4].shape, 9).to(device)
    optimizer.state[parameters[4]]["momentum_buffer"] = value
    found = optimizer.state[parameters[4]]["momentum_buffer"]
    assert_same(found.cpu(), kept(parameters[4], value, FORMATS[kept_as], signed=True).cpu())
    optimizer.state[parameters[4]]["momentum_buffer"] = None
    parameters[4].grad = torch.ones_like(parameters[4])
    optimizer.step()
    # The first update takes the gradient as it is.
    assert torch.equal(optimizer.state[parameters[4]]["momentum_buffer"].cpu(), torch.ones(parameters[4].shape))


def test_without_momentum_for_a_while_the_buffer_stays(device: torch.device) -> None:
    value = random((1 << 20,), 3).to(device)
    for seed in range(12):
        parameter = torch.nn.Parameter(torch.zeros_like(value))
        given = {"state_dtype": BLOCKS, "stochastic_rounding": True, "rounding_seed": seed}
        optimizer = forebay.SGD([parameter], lr=1e-2, momentum=0.9, **given)
        optimizer.prepare()
        optimizer.state[parameter]["momentum_buffer"] = value
        before = optimizer.state[parameter]["momentum_buffer"]
        optimizer.param_groups[0]["momentum"] = 0.0
        parameter.grad = value
        # A decoded share may be a bit beside its code: of these, random numbers would move some.
        optimizer.step()
        assert_same(optimizer.state[parameter]["momentum_buffer"], before)


@pytest.mark.parametrize("saves", [BF16, BLOCKS, F32, {"exp_avg": BLOCKS}], ids=str)
@pytest.mark.parametrize("loads", [BF16, BLOCKS, F32], ids=str)
def test_state_dicts_load_into_any_format(device: torch.device, placement: str, saves: Any, loads: Any) -> None:
    optimizer, parameters = run(device, placement=placement, state_dtype=saves)
    saved = optimizer.state_dict()
    assert all(value.dtype == F32 for of in saved["state"].values() for value in of.values())
    resumed = clone(parameters)
    fresh = forebay.AdamW(resumed, lr=7.0, placement=placement, chunk_bytes=CHUNK, state_dtype=loads)
    fresh.load_state_dict(saved)
    for new, old in zip(resumed, parameters, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            of = loads if loads != BLOCKS or new.numel() >= 256 else F32
            expected = kept(old, optimizer.state[old][name], of, signed=name == "exp_avg")
            assert_same(fresh.state[new][name].cpu(), expected.cpu())
    if saves == loads:
        # To continue is as if nothing had been: what was rounded once is not rounded again.
        take(optimizer, parameters, range(5, 7))
        take(fresh, resumed, range(5, 7))
        assert_equal([(optimizer, parameters), (fresh, resumed)])


@pytest.mark.parametrize("kept_as", FORMATS)
def test_torch_loads_them_and_the_other_way_round(device: torch.device, kept_as: str) -> None:
    optimizer, parameters = run(device, state_dtype=FORMATS[kept_as])
    theirs = clone(parameters)
    torchs = torch.optim.AdamW(theirs, lr=1e-2)
    torchs.load_state_dict(optimizer.state_dict())
    for mine, other in zip(parameters, theirs, strict=True):
        assert_same(torchs.state[other]["exp_avg"].cpu(), optimizer.state[mine]["exp_avg"].cpu())
    train(torchs, theirs, 1)
    back = forebay.AdamW(clone(theirs), state_dtype=FORMATS[kept_as])
    back.load_state_dict(torchs.state_dict())
    for group, other in zip(back.param_groups[0]["params"], theirs, strict=True):
        of = FORMATS[kept_as] if kept_as == "bf16" or other.numel() >= 256 else F32
        expected = kept(other, torchs.state[other]["exp_avg"], of, signed=True)
        assert_same(back.state[group]["exp_avg"].cpu(), expected.cpu())


@pytest.mark.parametrize("kept_as", FORMATS)
def test_copies_have_f32(device: torch.device, placement: str, kept_as: str) -> None:
    optimizer, parameters = run(device, placement=placement, state_dtype=FORMATS[kept_as])
    before = snapshot(optimizer, parameters)
    for state in (copy.deepcopy(optimizer.state), pickle.loads(pickle.dumps(optimizer.state))):
        for values, expected in zip(state.values(), before, strict=True):
            assert type(values) is dict
            assert_same({name: value.cpu() for name, value in values.items()}, {n: expected[n] for n in values})
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(), stream)
    stream.seek(0)
    assert_same(torch.load(stream)["state"], optimizer.state_dict()["state"])
    again = copy.deepcopy(optimizer)
    take(optimizer, parameters, range(5, 7))
    others = again.param_groups[0]["params"]
    take(again, others, range(5, 7))
    assert_equal([(optimizer, parameters), (again, others)])
    assert again.stats()["state_formats"] == optimizer.stats()["state_formats"]


@pytest.mark.parametrize("kept_as", FORMATS)
def test_removed_state_keeps_its_values_and_starts_anew(device: torch.device, placement: str, kept_as: str) -> None:
    optimizer, parameters = run(device, placement=placement, state_dtype=FORMATS[kept_as])
    before = {name: value.clone() for name, value in optimizer.state[parameters[4]].items()}
    removed = optimizer.state.pop(parameters[4])
    optimizer.state[parameters[6]].clear()
    give_gradients(parameters, 9)
    optimizer.step()
    assert_same(dict(removed), before)
    fresh = clone(parameters)
    other = forebay.AdamW(fresh, placement=placement, state_dtype=FORMATS[kept_as])
    give_gradients(fresh, 9)
    other.step()
    for place in (4, 6):
        assert_same(dict(optimizer.state[parameters[place]])["exp_avg"], other.state[fresh[place]]["exp_avg"])


@pytest.mark.parametrize("kept_as", FORMATS)
def test_state_is_there_after_close(device: torch.device, placement: str, kept_as: str) -> None:
    optimizer, parameters = run(device, placement=placement, state_dtype=FORMATS[kept_as])
    before = snapshot(optimizer, parameters)
    optimizer.refresh_master_weights()
    assert_same(snapshot(optimizer, parameters), before)
    optimizer.close()
    assert_same(snapshot(optimizer, parameters), before)


@pytest.mark.parametrize("kept_as", FORMATS)
def test_offload_and_restore(device: torch.device, kept_as: str) -> None:
    parameters = parameters_of(device)
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    take(optimizer, parameters, 2)
    before = {p: optimizer.state[p]["exp_avg"].clone() for p in parameters}
    forebay.offload(optimizer, state_dtype=FORMATS[kept_as], **RANDOM)
    for parameter in parameters:
        of = FORMATS[kept_as] if kept_as == "bf16" or parameter.numel() >= 256 else F32
        assert_same(optimizer.state[parameter]["exp_avg"].cpu(), kept(parameter, before[parameter], of, signed=True))
    take(optimizer, parameters, range(2, 4))
    middle = snapshot(optimizer, parameters)
    forebay.restore(optimizer)
    assert_same(snapshot(optimizer, parameters), middle)
    assert optimizer.state[parameters[0]]["exp_avg"].device == parameters[0].device


@pytest.mark.parametrize("kept_as", FORMATS)
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_state_sleeps_and_wakes_with_the_bits(device: torch.device, placement: str, kept_as: str, lazy: bool) -> None:
    found = []
    for sleeps in (False, True):
        model = net(device)
        parameters = list(model.parameters())
        given = {"placement": placement, "state_dtype": FORMATS[kept_as], **RANDOM}
        optimizer = forebay.AdamW(parameters, lr=1e-2, **given)
        sleeper = forebay.Sleeper(model, optimizer) if sleeps else None
        for step in range(3):
            train(optimizer, parameters, range(step, step + 1))
            optimizer.zero_grad()
            if sleeper is not None:
                sleeper.sleep()
                parts = [part for room in optimizer.state.rooms.values() for of in room.packed.values() for part in of]
                storages = [
                    of[part].untyped_storage()
                    for room in optimizer.state.rooms.values()
                    for of in room.packed.values()
                    for part in of
                ]
                assert parts
                assert all((storage.nbytes() == 0) == (placement == "resident") for storage in storages)
                if placement == "resident":
                    with pytest.raises(forebay.OptionError, match=r"exp_avg of a parameter, .*, has an empty storage"):
                        optimizer.state[parameters[0]]["exp_avg"]
                sleeper.wake(lazy=lazy)
        if sleeper is not None and lazy:
            model(torch.ones(2, 24, device=device))
        found.append(snapshot(optimizer, parameters))
    assert_same(*found)


def test_a_step_makes_no_resources(device: torch.device, placement: str) -> None:
    optimizer, parameters = run(device, placement=placement, state_dtype=BLOCKS, steps=2, **RANDOM)
    made = optimizer._engine.resources_made()
    take(optimizer, parameters, range(2, 5))
    assert optimizer._engine.resources_made() == made


def test_a_failed_step_is_said_and_a_load_repairs_it(device: torch.device) -> None:
    optimizer, parameters = run(device, placement="host", state_dtype=BLOCKS, **RANDOM)
    saved, weights = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in parameters]
    give_gradients(parameters, 5)
    optimizer._engine._fail_on_host_for_test()
    with pytest.raises(forebay.Error):
        optimizer.step()
    with pytest.raises(forebay.CheckpointError, match="cannot be stepped"):
        optimizer.step()
    with torch.no_grad():
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.copy_(weight)
    optimizer.load_state_dict(saved)
    take(optimizer, parameters, range(5, 7))
    again, others = run(device, placement="host", state_dtype=BLOCKS, steps=7, **RANDOM)
    assert_equal([(optimizer, parameters), (again, others)])


REFUSALS: list[tuple[dict[str, Any], str]] = [
    (
        {"state_dtype": F16},
        r"invalid state_dtype: torch.float16; use torch.float32, torch.bfloat16 or '8bit', or a dict",
    ),
    ({"state_dtype": "bf16"}, r"invalid state_dtype: 'bf16'; use torch.float32, torch.bfloat16 or '8bit', or a dict"),
    ({"state_dtype": None}, r"invalid state_dtype: None; use torch.float32"),
    ({"state_dtype": {"exp_avg": "4bit"}}, r"invalid state_dtype: '4bit'; use .* or '8bit' for exp_avg"),
    (
        {"state_dtype": {"momentum_buffer": BF16}},
        r"invalid state_dtype: AdamW has no column 'momentum_buffer'; it has exp_avg, exp_avg_sq, max_exp_avg_sq",
    ),
    ({"state_dtype": {"master_param": BF16}}, r"AdamW has no column 'master_param'"),
    ({"state_dtype": {1: BF16}}, r"invalid state_dtype: column 1; give names of columns"),
    ({"stochastic_rounding": True}, r"stochastic_rounding=True needs state in fewer bits, and all of it is f32"),
    ({"stochastic_rounding": True, "state_dtype": {"exp_avg": F32}}, r"stochastic_rounding=True needs state in fewer"),
    ({"stochastic_rounding": "yes", "state_dtype": BF16}, r"invalid stochastic_rounding: 'yes'; use True or False"),
    ({"rounding_seed": -1}, r"invalid rounding_seed: -1; give a whole number of at least 0"),
    ({"rounding_seed": 1.5}, r"invalid rounding_seed: 1.5; give a whole number of at least 0"),
    ({"rounding_seed": True}, r"invalid rounding_seed: True; give a whole number of at least 0"),
    ({"rounding_seed": 1 << 63}, r"invalid rounding_seed: 9223372036854775808; give a whole number below 2\*\*63"),
]


@pytest.mark.parametrize(("options", "words"), REFUSALS, ids=[str(options) for options, _ in REFUSALS])
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(forebay.OptionError, match=words):
        forebay.AdamW(make(), **options)
    optimizer = torch.optim.AdamW(make())
    with pytest.raises(forebay.OptionError, match=words):
        forebay.offload(optimizer, **options)
    assert type(optimizer) is torch.optim.AdamW


@pytest.mark.parametrize(
    "options", [{"state_dtype": BF16}, {"stochastic_rounding": True}, {"rounding_seed": 3}], ids=str
)
def test_optimizers_without_a_rule_decide_for_themselves(options: dict[str, Any]) -> None:
    optimizer = torch.optim.Adagrad(make())
    with pytest.raises(forebay.OptionError, match="its step decides the type of its state"):
        forebay.offload(optimizer, **options)


def test_the_largest_seed_is_taken() -> None:
    parameters = make()
    optimizer = forebay.AdamW(parameters, state_dtype=BF16, stochastic_rounding=True, rounding_seed=(1 << 63) - 1)
    train(optimizer, parameters, 1)
