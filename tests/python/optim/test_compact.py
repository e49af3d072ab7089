"""Masters in 17 bits: the bits of f32 masters everywhere, in less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import forebay
from support.optim import SHAPES, clone, give_gradients, groups_of, make, snapshot, train
from support.overlap import Run, both, net
from support.tensors import assert_same, random, same_bits

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RULES: dict[str, tuple[type, dict[str, Any]]] = {
    "AdamW": (forebay.AdamW, {"weight_decay": 0.1}),
    "AdamW, amsgrad and maximize": (forebay.AdamW, {"amsgrad": True, "maximize": True}),
    "Adam": (forebay.Adam, {"weight_decay": 0.1}),
    "SGD": (forebay.SGD, {"weight_decay": 0.1}),
    "SGD with momentum": (forebay.SGD, {"momentum": 0.9, "nesterov": True}),
    "Lion": (forebay.Lion, {"weight_decay": 0.1}),
}
CHUNK = 7 * 64 * 4
"""The smallest chunk for two moments, their largest, halves and carries, with parameter and gradient on the host."""


def parameters_of(device: torch.device, dtype: torch.dtype | list[torch.dtype] = BF16) -> list[torch.nn.Parameter]:
    """Return parameters of every shape, and two whose memory is in another order or has gaps."""
    first = dtype if isinstance(dtype, torch.dtype) else dtype[0]
    return [
        *make(SHAPES, device=device, dtype=dtype),
        torch.nn.Parameter(random((30, 41), 3).to(device, first).t()),
        torch.nn.Parameter(random((30, 40), 3).to(device, first)[::2, ::3]),
    ]


def pair(
    device: torch.device, cls: type = forebay.AdamW, dtype: torch.dtype | list[torch.dtype] = BF16, **options: Any
) -> list[tuple[Any, list[torch.nn.Parameter]]]:
    """Return two runs that are to be equal: with f32 masters and with compact ones."""
    found = []
    for master_weights in (True, "compact"):
        parameters = parameters_of(device, dtype)
        found.append((cls(parameters, **{"lr": 1e-2, "master_weights": master_weights, **options}), parameters))
    return found


def assert_equal(runs: list[tuple[Any, list[torch.nn.Parameter]]]) -> None:
    """Assert that parameters and state are the same, bit for bit."""
    assert_same(*(snapshot(optimizer, parameters) for optimizer, parameters in runs))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("options", [{}, {"chunk_bytes": CHUNK, "slots": 2}, {"max_grad_norm": 0.5}], ids=str)
def test_bits_are_those_of_f32_masters(
    device: torch.device, placement: str, name: str, options: dict[str, Any]
) -> None:
    cls, settings = RULES[name]
    runs = pair(device, cls, [BF16, F16, BF16, F32], placement=placement, **settings, **options)
    for optimizer, parameters in runs:
        train(optimizer, parameters, 6)
        # Some without a gradient for a while.
        for step in range(6, 10):
            give_gradients(parameters, step)
            for parameter in parameters[step % 2 :: 3]:
                parameter.grad = None
            optimizer.step()
    assert_equal(runs)
    # The lower halves are in use, so that there was something to get wrong.
    master = runs[1][0].state[runs[1][1][0]]["master_param"]
    assert (master.view(torch.int32) & 0xFFFF != 0).float().mean() > 0.5


def test_groups_have_the_bits_too(device: torch.device, placement: str) -> None:
    runs = []
    for master_weights in (True, "compact"):
        parameters = parameters_of(device)
        optimizer = forebay.AdamW(groups_of(parameters), placement=placement, master_weights=master_weights)
        train(optimizer, parameters, 7)
        extra = torch.nn.Parameter(random((77,), 5).to(device, BF16))
        optimizer.add_param_group({"params": [extra], "lr": 1e-3})
        train(optimizer, [*parameters, extra], range(7, 10))
        runs.append((optimizer, [*parameters, extra]))
    assert_equal(runs)


@pytest.mark.parametrize("share", [{"resident_fraction": 0.5}, {"resident_bytes": 3000}], ids=str)
def test_a_part_that_stays_on_the_device_has_the_bits_too(device: torch.device, share: dict[str, Any]) -> None:
    runs = pair(device, chunk_bytes=CHUNK, **share)
    for optimizer, parameters in runs:
        train(optimizer, parameters, 6)
    assert_equal(runs)
    kept = [room for room in runs[1][0].state.rooms.values() if room.is_resident]
    elements = [room.parameter.numel() for room in kept]
    assert 0 < len(kept) < len(runs[1][1])
    assert sum(room.bytes for room in kept) == sum(10 * n + -(-n // 8) for n in elements)
    if "resident_bytes" in share:
        assert sum(room.bytes for room in kept) <= 3000


def test_last_backward_has_the_bits_too(device: torch.device) -> None:
    found = []
    for master_weights in (True, "compact"):
        model = net(device, BF16)
        optimizer = forebay.AdamW(model.parameters(), lr=1e-2, placement="host", master_weights=master_weights)
        for _ in range(4):
            with optimizer.last_backward():
                model(torch.ones(4, 24, device=device, dtype=BF16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(snapshot(optimizer, list(model.parameters())))
    assert_same(*found)


@pytest.mark.parametrize("placed", ["stream", "resident", "host"])
@pytest.mark.parametrize("clip", [None, 0.05], ids=["plain", "clipped"])
def test_overlapped_steps_have_the_bits_too(device: torch.device, placed: str, clip: float | None) -> None:
    def body(run: Run) -> None:
        run.train(5)

    for late in (False, True):
        both(
            body,
            device,
            model=lambda device: net(device, BF16),
            late=late,
            placement=placed,
            max_grad_norm=clip,
            master_weights="compact",
        )


def test_statistics_count_masters_and_bytes(device: torch.device) -> None:
    (full, of_full), (compact, of_compact) = pair(device, dtype=[BF16, F16, BF16, F32])
    for optimizer, parameters in ((full, of_full), (compact, of_compact)):
        train(optimizer, parameters, 1)
    counts = {dtype: sum(p.dtype == dtype for p in of_compact) for dtype in (BF16, F16)}
    before, after = full.stats(), compact.stats()
    assert (before["f32_masters"], before["compact_masters"]) == (counts[BF16] + counts[F16], 0)
    assert (after["f32_masters"], after["compact_masters"]) == (counts[F16], counts[BF16])
    saved = sum(2 * p.numel() - -(-p.numel() // 8) for p in of_compact if p.dtype == BF16)
    assert before["fetch_bytes"] - after["fetch_bytes"] == saved
    assert before["store_bytes"] - after["store_bytes"] == saved


def test_ten_bytes_and_a_bit_for_each_element(device: torch.device) -> None:
    parameter = torch.nn.Parameter(random((1 << 20,), 1).to(device, BF16))
    optimizer = forebay.AdamW([parameter], master_weights="compact")
    train(optimizer, [parameter], 1)
    stats = optimizer.stats()
    assert stats["fetch_bytes"] == stats["store_bytes"] == (10 << 20) + (1 << 17)
    assert stats["pinned_bytes"] - (1 << 12) <= stats["fetch_bytes"] < stats["pinned_bytes"]


def test_a_master_is_an_f32_copy(device: torch.device, placement: str) -> None:
    parameters = parameters_of(device)
    optimizer = forebay.AdamW(parameters, lr=1e-2, placement=placement, master_weights="compact")
    train(optimizer, parameters, 3)
    for parameter in parameters:
        state = optimizer.state[parameter]
        assert list(state) == ["step", "exp_avg", "exp_avg_sq", "master_param"]
        master = state["master_param"]
        assert (master.dtype, master.shape) == (F32, parameter.shape)
        assert same_bits(master.to(device).bfloat16(), parameter.detach())
        before = master.clone()
        master.fill_(7.0)
        for way in (state["master_param"], state.get("master_param"), dict(state)["master_param"]):
            assert same_bits(way, before)
        ways = ({**state}, state.copy(), dict(state.items()), dict(zip(state, state.values(), strict=True)))
        assert all(same_bits(way["master_param"], before) for way in ways)
        assert state.get("nothing", 5) == 5


def test_a_fresh_master_is_the_weight(device: torch.device, placement: str) -> None:
    parameters = parameters_of(device)
    optimizer = forebay.AdamW(parameters, placement=placement, master_weights="compact")
    optimizer.prepare()
    for parameter in parameters:
        assert same_bits(optimizer.state[parameter]["master_param"].cpu(), parameter.detach().float().cpu())


def test_assigned_masters_count(device: torch.device, placement: str) -> None:
    runs = pair(device, placement=placement)
    for optimizer, parameters in runs:
        train(optimizer, parameters, 2)
        for i, parameter in enumerate(parameters):
            exact = parameter.detach().float() * (1 + random(parameter.shape, 50 + i).to(device).clamp(-1, 1) * 1e-3)
            exact = torch.where(exact.to(BF16) == parameter.detach(), exact, parameter.detach().float())
            if i % 2:
                optimizer.state[parameter]["master_param"] = exact
            else:
                optimizer.state[parameter] = {**optimizer.state[parameter], "master_param": exact}
            assert same_bits(optimizer.state[parameter]["master_param"].to(device), exact)
        train(optimizer, parameters, range(2, 5))
    assert_equal(runs)


def test_values_that_do_not_round_to_the_weight_are_refused_by_name(device: torch.device) -> None:
    parameters = make([(8,), (9,)], device=device, dtype=BF16)
    optimizer = forebay.AdamW([("first", parameters[0]), ("second", parameters[1])], master_weights="compact")
    train(optimizer, parameters, 2)
    before = snapshot(optimizer, parameters)
    wrong = parameters[1].detach().float()
    wrong[4] *= 1.5
    state = optimizer.state[parameters[1]]
    with pytest.raises(forebay.OptionError, match="master_param of second does not round to the parameter"):
        state["master_param"] = wrong
    with pytest.raises(forebay.OptionError, match="master_param of second does not round to the parameter"):
        optimizer.state[parameters[1]] = {"exp_avg": torch.zeros(9), "master_param": wrong}
    assert_same(snapshot(optimizer, parameters), before)


# New weight, what is kept of the old one, and the master that they make: where there is none, the weight itself.
REPLACED = {
    "the lower half fits": (1.5, 0x3F80_1234, 0x3FC0_1234),
    "rounding goes up": (1.5, 0x3F80_9234, 0x3FBF_9234),
    "zero": (0.0, 0x3F80_9234, 0x0000_0000),
    "minus zero": (-0.0, 0x3F80_9234, 0x8000_0000 - (1 << 32)),
    "infinity": (float("inf"), 0x3F80_1234, 0x7F80_0000),
    "an odd weight at a tie": (1.0078125, 0x4000_8000, 0x3F81_0000),
    "an even weight at a tie": (1.015625, 0x4000_8000, 0x3F82_8000),
}


@pytest.mark.parametrize("case", REPLACED)
def test_a_replaced_weight_keeps_a_lower_half_that_fits(device: torch.device, placement: str, case: str) -> None:
    new, old_bits, expected = REPLACED[case]
    old = torch.full((9,), old_bits, dtype=torch.int32).view(F32).to(device)
    parameter = torch.nn.Parameter(old.to(BF16))
    optimizer = forebay.AdamW([parameter], placement=placement, master_weights="compact")
    optimizer.prepare()
    optimizer.state[parameter]["master_param"] = old
    with torch.no_grad():
        parameter[3:] = new
    found = optimizer.state[parameter]["master_param"].cpu().view(torch.int32)
    assert found.tolist() == [old_bits] * 3 + [expected] * 6
    if not found.view(F32).isfinite().all():
        return
    # A step starts from the same masters.
    single = torch.nn.Parameter(found.view(F32).to(device))
    reference = forebay.AdamW([single], placement=placement)
    parameter.grad, single.grad = torch.ones_like(parameter), torch.ones_like(single)
    optimizer.step()
    reference.step()
    assert same_bits(optimizer.state[parameter]["master_param"].cpu(), single.detach().cpu())


def test_refreshing_makes_masters_equal_their_weights(device: torch.device, placement: str) -> None:
    parameters = make(device=device, dtype=[BF16, F16])
    optimizer = forebay.AdamW(parameters, lr=1e-2, placement=placement, master_weights="compact")
    train(optimizer, parameters, 3)
    halves = {p: optimizer.state[p]["master_param"].clone() for p in parameters if p.dtype == F16}
    optimizer.refresh_master_weights()
    for parameter in parameters:
        expected = halves.get(parameter, parameter.detach().float())
        assert same_bits(optimizer.state[parameter]["master_param"].cpu(), expected.cpu())


@pytest.mark.parametrize("kinds", [("compact", True), (True, "compact"), ("compact", "compact")], ids=str)
@pytest.mark.parametrize("order", ["weights first", "state first"])
def test_state_dicts_load_into_either_format(
    device: torch.device, placement: str, kinds: tuple[Any, Any], order: str
) -> None:
    parameters = parameters_of(device)
    optimizer = forebay.AdamW(parameters, lr=1e-2, placement=placement, master_weights=kinds[0])
    train(optimizer, parameters, 3)
    saved = optimizer.state_dict()
    assert all(value.dtype == F32 for of in saved["state"].values() for value in of.values())
    resumed = [torch.nn.Parameter(torch.zeros_like(p.detach())) for p in parameters]
    fresh = forebay.AdamW(resumed, lr=7.0, placement=placement, master_weights=kinds[1])
    if order == "state first":
        fresh.load_state_dict(saved)
    with torch.no_grad():
        for new, old in zip(resumed, parameters, strict=True):
            new.copy_(old)
    if order == "weights first":
        fresh.load_state_dict(saved)
    runs = [(optimizer, parameters), (fresh, resumed)]
    assert_equal(runs)
    for one, of_one in runs:
        train(one, of_one, range(3, 6))
    assert_equal(runs)


def test_a_state_dict_without_masters_starts_them_from_the_weights(device: torch.device, placement: str) -> None:
    parameters = parameters_of(device)
    optimizer = forebay.AdamW(parameters, placement=placement, master_weights=False)
    train(optimizer, parameters, 2)
    others = clone(parameters)
    fresh = forebay.AdamW(others, lr=1e-2, placement=placement, master_weights="compact")
    train(fresh, others, 2)
    fresh.load_state_dict(optimizer.state_dict())
    for parameter in others:
        assert same_bits(fresh.state[parameter]["master_param"].cpu(), parameter.detach().float().cpu())


def test_removed_state_keeps_its_values_and_starts_anew(device: torch.device, placement: str) -> None:
    runs = pair(device, placement=placement)
    for optimizer, parameters in runs:
        train(optimizer, parameters, 3)
        before = optimizer.state[parameters[0]]["master_param"].clone()
        removed = optimizer.state.pop(parameters[0])
        optimizer.state[parameters[2]].clear()
        train(optimizer, parameters, range(3, 5))
        assert same_bits(removed["master_param"], before)
    assert_equal(runs)


def test_masters_are_there_after_close(device: torch.device, placement: str) -> None:
    parameters = parameters_of(device)
    optimizer = forebay.AdamW(parameters, lr=1e-2, placement=placement, master_weights="compact")
    train(optimizer, parameters, 2)
    before = snapshot(optimizer, parameters)
    optimizer.close()
    assert_same(snapshot(optimizer, parameters), before)


def test_a_nan_stays_some_nan(device: torch.device, placement: str) -> None:
    runs = pair(device, placement=placement)
    for optimizer, parameters in runs:
        train(optimizer, parameters, 2)
        with torch.no_grad():
            parameters[0][3] = float("nan")
        train(optimizer, parameters, range(2, 5))
    (full, of_full), (compact, of_compact) = runs
    assert_same(snapshot(full, of_full[1:]), snapshot(compact, of_compact[1:]))
    ends = [one.state[of_one[0]]["master_param"] for one, of_one in ((full, of_full), (compact, of_compact))]
    assert all(end[3].isnan().all() for end in ends)
    torch.testing.assert_close(*ends, rtol=0, atol=0, equal_nan=True)


def test_offload_and_restore(device: torch.device) -> None:
    found = []
    for master_weights in (True, "compact"):
        parameters = parameters_of(device)
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        train(optimizer, parameters, 2)
        forebay.offload(optimizer, master_weights=master_weights)
        train(optimizer, parameters, range(2, 5))
        found.append(snapshot(optimizer, parameters))
        forebay.restore(optimizer)
        train(optimizer, parameters, range(5, 7))
        found.append(snapshot(optimizer, parameters))
    assert_same(found[0], found[2])
    assert_same(found[1], found[3])


def test_a_step_makes_no_resources(device: torch.device, placement: str) -> None:
    parameters = parameters_of(device)
    optimizer = forebay.AdamW(parameters, placement=placement, master_weights="compact", chunk_bytes=CHUNK)
    train(optimizer, parameters, 2)
    made = optimizer._engine.resources_made()
    train(optimizer, parameters, range(2, 5))
    assert optimizer._engine.resources_made() == made


@pytest.mark.parametrize("value", ["f32", "fp8", 17, "Compact"])
def test_other_formats_are_refused_by_name(value: Any) -> None:
    with pytest.raises(forebay.OptionError, match=r"invalid master_weights: .*; use True, False, 'compact' or None"):
        forebay.AdamW(make(dtype=BF16), master_weights=value)


def test_without_a_bf16_parameter_compact_masters_are_refused(device: torch.device, placement: str) -> None:
    for dtype, known in ((F32, "torch.float32"), ([F16, F32], "torch.float16, torch.float32")):
        parameters = make([(3,), (4,)], device=device, dtype=dtype)
        optimizer = forebay.AdamW(
            [("one", parameters[0]), ("two", parameters[1])], placement=placement, master_weights="compact"
        )
        give_gradients(parameters, 0)
        before = [parameter.detach().clone() for parameter in parameters]
        for call in (optimizer.prepare, optimizer.step):
            with pytest.raises(
                forebay.OptionError, match=f"for bf16 parameters, and one and all others are {known}; use"
            ):
                call()
        assert_same(before, [parameter.detach() for parameter in parameters])
    # Cast before the first step, as some frameworks do.
    module = torch.nn.Linear(3, 4, device=device)
    optimizer = forebay.AdamW(module.parameters(), placement=placement, master_weights="compact")
    module.to(BF16)
    train(optimizer, list(module.parameters()), 1)
    assert optimizer.stats()["compact_masters"] == 2


def test_a_parameter_that_was_cast_is_refused_before_anything_changes(device: torch.device, placement: str) -> None:
    parameters = make([(3,), (400,)], device=device, dtype=BF16)
    optimizer = forebay.AdamW(
        [("one", parameters[0]), ("two", parameters[1])], placement=placement, master_weights="compact"
    )
    train(optimizer, parameters, 2)
    parameters[1].data = parameters[1].data.float()
    before = parameters[0].detach().clone()
    give_gradients(parameters, 2)
    with pytest.raises(forebay.OptionError, match=r"two.*its master is compact, which is for bf16"):
        optimizer.step()
    assert same_bits(parameters[0].detach(), before)
    parameters[1].data = parameters[1].data.bfloat16()
    train(optimizer, parameters, range(2, 3))


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_state_sleeps_and_wakes_with_the_bits(device: torch.device, placement: str, lazy: bool) -> None:
    found = []
    for sleeps in (False, True):
        model = net(device, BF16)
        parameters = list(model.parameters())
        optimizer = forebay.AdamW(parameters, lr=1e-2, placement=placement, master_weights="compact")
        sleeper = forebay.Sleeper(model, optimizer) if sleeps else None
        for step in range(4):
            train(optimizer, parameters, range(step, step + 1))
            optimizer.zero_grad()
            if sleeper is not None:
                sleeper.sleep()
                kept = [
                    room.packed["master_param"]["master_low"].untyped_storage()
                    for room in optimizer.state.rooms.values()
                ]
                assert all((storage.nbytes() == 0) == (placement == "resident") for storage in kept)
                with pytest.raises(forebay.OptionError, match="a parameter with a compact master has an empty storage"):
                    optimizer.state[parameters[0]]["master_param"]
                sleeper.wake(lazy=lazy)
        if sleeper is not None:
            sleeper.stats()  # State that is read directly is valid after a lazy wake has ended, and this waits for it.
        found.append(snapshot(optimizer, parameters))
    assert_same(*found)
