"""Which parameters a step touches, and in what memory they may lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import forebay
from forebay import _tensors as _torch
from support.optim import TINY, clone, give_gradients, make, run, snapshot, train
from support.tensors import assert_same, bits, random, same_bits

if TYPE_CHECKING:
    from collections.abc import Callable


def test_without_a_gradient_nothing_of_a_parameter_changes(device: torch.device, placement: str) -> None:
    # All of them share one chunk.
    parameters = make([(40,)] * 5, device=device)
    optimizer = forebay.AdamW(parameters, lr=0.1, weight_decay=0.5, placement=placement)
    train(optimizer, parameters, 2)
    before = snapshot(optimizer, parameters)
    optimizer.zero_grad(set_to_none=True)
    for i in (0, 2, 4):
        parameters[i].grad = torch.ones_like(parameters[i])
    optimizer.step()
    after = snapshot(optimizer, parameters)
    assert_same([before[1], before[3]], [after[1], after[3]])
    for i in (0, 2, 4):
        assert int(after[i]["step"]) == 3
        assert not torch.equal(before[i]["param"], after[i]["param"])
        assert not torch.equal(before[i]["exp_avg"], after[i]["exp_avg"])


def test_a_gradient_that_went_away_is_not_used_again(device: torch.device, placement: str) -> None:
    ends = []
    for stale in (False, True):
        parameters = make([(40,), (50,)], device=device)
        optimizer = forebay.AdamW(parameters, lr=0.1, placement=placement)
        if stale:
            train(optimizer, parameters, 1)
            parameters[1].grad = None
            parameters[0].grad.zero_()
        else:
            train(optimizer, parameters, 1)
            optimizer.zero_grad()
            parameters[0].grad = torch.zeros_like(parameters[0])
        optimizer.step()
        ends.append(snapshot(optimizer, parameters))
    assert_same(*ends)
    assert [int(values["step"]) for values in ends[0]] == [2, 1]


def test_a_step_without_any_gradient_changes_nothing(device: torch.device, placement: str) -> None:
    parameters = make(device=device)
    optimizer = forebay.AdamW(parameters, lr=0.1, placement=placement)
    before = snapshot(optimizer, parameters)
    optimizer.step()
    assert_same(before, snapshot(optimizer, parameters))


def test_step_counters_are_per_parameter_and_on_the_host(device: torch.device, placement: str) -> None:
    parameters = make([(400,)] * 3, device=device)
    optimizer = forebay.AdamW(parameters, placement=placement, chunk_bytes=TINY)
    for step in range(5):
        train(optimizer, parameters[: 1 + step % 3], range(step, step + 1))
        optimizer.zero_grad()
    for parameter, expected in zip(parameters, (5, 3, 1), strict=True):
        counter = optimizer.state[parameter]["step"]
        assert counter.item() == expected
        assert counter.device.type == "cpu"
        assert counter.dtype == torch.float32
        assert counter.shape == ()


def test_zero_gradients_are_gradients(device: torch.device) -> None:
    parameters = make([(10,)], device=device)
    optimizer = forebay.AdamW(parameters, lr=0.1, weight_decay=0.5)
    before = parameters[0].detach().clone()
    parameters[0].grad = torch.zeros_like(parameters[0])
    optimizer.step()
    torch.testing.assert_close(parameters[0].detach(), before * 0.95)
    assert optimizer.state[parameters[0]]["step"].item() == 1


def test_frozen_parameters_have_no_state_and_do_not_change(device: torch.device, placement: str) -> None:
    parameters = make([(10,), (20,), (30,)], device=device)
    parameters[1].requires_grad_(False)
    frozen = parameters[1].detach().clone()
    optimizer = forebay.AdamW(parameters, placement=placement, weight_decay=0.5)
    optimizer.prepare()
    train(optimizer, [parameters[0], parameters[2]], 3)
    assert same_bits(parameters[1], frozen)
    assert parameters[1] not in optimizer.state
    assert set(optimizer.state_dict()["state"]) == {0, 2}


def test_a_parameter_thawed_later_starts_then(device: torch.device, placement: str) -> None:
    parameters = make([(10,), (20,)], device=device)
    parameters[0].requires_grad_(False)
    optimizer = forebay.AdamW(parameters, placement=placement)
    train(optimizer, parameters[1:], 2)
    kept = optimizer.state[parameters[1]]["exp_avg"]
    parameters[0].requires_grad_(True)
    train(optimizer, parameters, range(2, 4))
    assert optimizer.state[parameters[0]]["step"].item() == 2
    assert optimizer.state[parameters[1]]["step"].item() == 4
    assert optimizer.state[parameters[1]]["exp_avg"].data_ptr() == kept.data_ptr()


@pytest.mark.parametrize("shapes", [[(0,)], [(0,), (3, 0)], [(0,), (5,), (2, 0, 3)]])
def test_empty_parameters_count_their_steps(
    device: torch.device, placement: str, shapes: list[tuple[int, ...]]
) -> None:
    parameters = make(shapes, device=device, dtype=[torch.float32, torch.bfloat16])
    optimizer = forebay.AdamW(parameters, placement=placement)
    train(optimizer, parameters, 3)
    for parameter in parameters:
        state = optimizer.state[parameter]
        assert state["step"].item() == 3
        assert state["exp_avg"].shape == parameter.shape
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[parameters[0]]["step"].item() == 3


def test_an_optimizer_of_frozen_parameters_alone_does_nothing(device: torch.device, placement: str) -> None:
    parameters = [parameter.requires_grad_(False) for parameter in make([(3,)], device=device)]
    optimizer = forebay.AdamW(parameters, placement=placement)
    optimizer.prepare()
    optimizer.step()
    assert optimizer.stats()["pinned_bytes"] == 0


def test_tied_weights_are_updated_once(device: torch.device, placement: str) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(6, 6, bias=False)
            self.b = torch.nn.Linear(6, 6, bias=False)
            self.b.weight = self.a.weight

    model = Tied().to(device)
    weight = model.a.weight
    with torch.no_grad():
        weight.copy_(random((6, 6), 3))
    optimizer = forebay.AdamW(model.parameters(), lr=0.1, placement=placement)
    train(optimizer, [weight], 3)
    alone = [torch.nn.Parameter(random((6, 6), 3).to(device))]
    reference = forebay.AdamW(alone, lr=0.1, placement=placement)
    train(reference, alone, 3)
    assert_same(snapshot(optimizer, [weight]), snapshot(reference, alone))


def test_a_parameter_listed_twice_is_updated_once(device: torch.device, placement: str) -> None:
    # Tying weights after the optimizer was made leaves such lists behind.
    parameters = make([(30,), (30,), (7,)], device=device)
    optimizer = forebay.AdamW(parameters, lr=0.1, placement=placement)
    optimizer.param_groups[0]["params"][1] = parameters[0]
    train(optimizer, [parameters[0], parameters[2]], 3)
    alone = clone(make([(30,), (30,), (7,)], device=device))
    reference = forebay.AdamW([alone[0], alone[2]], lr=0.1, placement=placement)
    train(reference, [alone[0], alone[2]], 3)
    assert_same(snapshot(optimizer, [parameters[0], parameters[2]]), snapshot(reference, [alone[0], alone[2]]))


def test_parameters_of_others_are_never_touched(device: torch.device, placement: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to(device)
    foreign = [parameter.detach().clone() for parameter in model[1].parameters()]
    optimizer = forebay.AdamW(model[0].parameters(), lr=0.1, weight_decay=0.5, placement=placement, max_grad_norm=0.1)
    for step in range(3):
        give_gradients(list(model.parameters()), step)
        optimizer.step()
    assert all(same_bits(p, kept) for p, kept in zip(model[1].parameters(), foreign, strict=True))
    assert not any(parameter in optimizer.state for parameter in model[1].parameters())


def test_groups_added_between_steps_are_updated(device: torch.device, placement: str) -> None:
    parameters = make([(300,), (50,), (400,), (20,)], device=device)
    optimizer = forebay.AdamW(parameters[:2], lr=0.1, placement=placement, chunk_bytes=TINY)
    train(optimizer, parameters[:2], 3)
    views = {kind: optimizer.state[parameters[0]][kind] for kind in ("exp_avg", "exp_avg_sq", "step")}
    values = snapshot(optimizer, parameters[:2])
    optimizer.add_param_group({"params": parameters[2:], "lr": 0.01, "weight_decay": 0.0})
    assert_same(values, snapshot(optimizer, parameters[:2]))
    optimizer.zero_grad()
    train(optimizer, parameters, range(3, 6))
    for kind, view in views.items():
        # The view from before the growth still is the state.
        assert optimizer.state[parameters[0]][kind].data_ptr() == view.data_ptr()
        assert same_bits(optimizer.state[parameters[0]][kind], view)
    assert [int(optimizer.state[parameter]["step"]) for parameter in parameters] == [6, 6, 3, 3]

    mine = make([(300,), (50,), (400,), (20,)], device=device)
    early = forebay.AdamW(mine[:2], lr=0.1)
    late = forebay.AdamW(mine[2:], lr=0.01, weight_decay=0.0)
    train(early, mine[:2], 3)
    for step in range(3, 6):
        give_gradients(mine, step)
        early.step()
        late.step()
    expected = snapshot(early, mine[:2]) + snapshot(late, mine[2:])
    assert_same(snapshot(optimizer, parameters), expected)


def test_several_groups_may_be_added_one_by_one(device: torch.device) -> None:
    parameters = make([(50,)] * 5, device=device, dtype=[torch.float32, torch.bfloat16])
    optimizer = forebay.AdamW(parameters[:1], lr=0.1)
    for count in range(1, 5):
        train(optimizer, parameters[:count], range(count, count + 1))
        optimizer.add_param_group({"params": [parameters[count]], "lr": 0.1 * count})
    train(optimizer, parameters, range(5, 6))
    assert [int(optimizer.state[parameter]["step"]) for parameter in parameters] == [5, 4, 3, 2, 1]
    expected = 8 * 50 * 3 + 12 * 50 * 2
    assert optimizer.stats()["fetch_bytes"] == expected


def replace_entries(optimizer: torch.optim.Optimizer, replacement: list[torch.nn.Parameter]) -> None:
    """Replace the parameters of the first group in place, as accelerate does for FSDP2."""
    optimizer.param_groups[0]["params"][:] = replacement


@pytest.mark.parametrize("prepared", [False, True])
def test_entries_replaced_before_the_first_step_are_followed(
    device: torch.device, placement: str, prepared: bool
) -> None:
    old = make([(30,), (40,)], device="cpu", seed=9)
    new = make([(30,), (40,)], device=device)
    kept = [parameter.detach().clone() for parameter in old]
    optimizer = forebay.AdamW(old, lr=0.1, placement=placement)
    replace_entries(optimizer, new)
    if prepared:
        optimizer.prepare()
    train(optimizer, new, 3)
    assert_same(snapshot(optimizer, new), run([(30,), (40,)], device=device, steps=3, lr=0.1))
    assert all(same_bits(a, b) for a, b in zip(old, kept, strict=True))
    assert set(optimizer.state_dict()["state"]) == {0, 1}


def test_entries_replaced_after_steps_start_anew(device: torch.device, placement: str) -> None:
    old = make([(30,), (40,)], device=device, seed=9)
    new = make([(30,), (40,)], device=device)
    optimizer = forebay.AdamW(old, lr=0.1, placement=placement)
    train(optimizer, old, 2)
    kept = snapshot(optimizer, old)
    replace_entries(optimizer, new)
    train(optimizer, new, 3)
    assert_same(snapshot(optimizer, new), run([(30,), (40,)], device=device, steps=3, lr=0.1))
    assert_same(snapshot(optimizer, old), kept)


def test_prepare_sees_entries_replaced_after_steps(device: torch.device) -> None:
    parameters = make([(30,), (40,)], device=device)
    optimizer = forebay.AdamW(parameters[:1])
    train(optimizer, parameters[:1], 1)
    optimizer.param_groups[0]["params"].append(parameters[1])
    optimizer.prepare()
    assert "exp_avg" in optimizer.state[parameters[1]]


# Memory that is not one contiguous stretch.


def transposed(device: torch.device) -> torch.Tensor:
    return random((48, 20), 5).to(device).t()


def channels_last(device: torch.device) -> torch.Tensor:
    return random((4, 6, 5, 3), 5).to(device).to(memory_format=torch.channels_last)


def sliced(device: torch.device) -> torch.Tensor:
    return random((40, 40), 5).to(device)[3:33, 5:36:2]


def offset(device: torch.device) -> torch.Tensor:
    return random((700,), 5).to(device)[11:500]


LAYOUTS = {"transposed": transposed, "channels_last": channels_last, "sliced": sliced, "offset": offset}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Callable[[torch.device], torch.Tensor]:
    """Return what makes a tensor whose memory is out of the ordinary."""
    return LAYOUTS[request.param]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("like_parameter", [True, False], ids=["same order", "contiguous gradient"])
def test_memory_order_changes_no_bit(
    device: torch.device,
    placement: str,
    layout: Callable[[torch.device], torch.Tensor],
    dtype: torch.dtype,
    like_parameter: bool,
) -> None:
    whole = layout(device)
    data = torch.empty_like(whole, dtype=dtype).copy_(whole) if dtype != torch.float32 else whole
    odd = torch.nn.Parameter(data)
    plain = torch.nn.Parameter(odd.detach().contiguous().clone())
    ends = []
    for parameter in (odd, plain):
        optimizer = forebay.AdamW([parameter], lr=0.1, placement=placement, chunk_bytes=TINY)
        for step in range(4):
            gradient = random(parameter.shape, step).to(parameter)
            parameter.grad = torch.empty_like(parameter).copy_(gradient) if like_parameter else gradient.contiguous()
            optimizer.step()
        ends.append(snapshot(optimizer, [parameter]))
    assert_same(*ends)
    assert odd.stride() == data.stride()
    assert odd.data_ptr() == data.data_ptr()


def test_what_lies_between_the_elements_of_a_slice_is_untouched(device: torch.device, placement: str) -> None:
    whole = random((40, 40), 5).to(device)
    before = whole.clone()
    parameter = torch.nn.Parameter(whole[3:33, 5:36:2])
    optimizer = forebay.AdamW([parameter], lr=0.1, placement=placement)
    train(optimizer, [parameter], 2)
    changed = (bits(whole) != bits(before)).reshape(40, 40)
    inside = torch.zeros(40, 40, dtype=torch.bool)
    inside[3:33, 5:36:2] = True
    assert torch.equal(changed, inside)


def test_a_gradient_may_be_ordered_otherwise_than_its_parameter(device: torch.device, placement: str) -> None:
    ends = []
    for order in ("same", "transposed", "expanded", "sliced"):
        parameter = torch.nn.Parameter(random((30, 20), 1).to(device))
        optimizer = forebay.AdamW([parameter], lr=0.1, placement=placement)
        gradient = random((30, 1), 2).to(device).expand(30, 20)
        if order == "same":
            gradient = gradient.contiguous()
        elif order == "transposed":
            gradient = gradient.t().contiguous().t()
        elif order == "sliced":
            gradient = torch.cat([gradient, gradient], 1)[:, :20]
        parameter.grad = gradient
        optimizer.step()
        ends.append(snapshot(optimizer, [parameter]))
    for end in ends[1:]:
        assert_same(ends[0], end)


def test_a_parameter_that_changes_its_memory_order_keeps_its_state(device: torch.device, placement: str) -> None:
    # model.to(memory_format=torch.channels_last) between two steps does this.
    ends = []
    for change in (False, True):
        parameter = torch.nn.Parameter(random((4, 6, 5, 3), 5).to(device))
        optimizer = forebay.AdamW([parameter], lr=0.1, placement=placement)
        for step in range(4):
            if change and step == 2:
                parameter.data = parameter.data.to(memory_format=torch.channels_last)
            give_gradients([parameter], step)
            optimizer.step()
        ends.append(snapshot(optimizer, [parameter]))
    assert_same(*ends)


def test_memory_may_be_read_in_another_order_from_one_step_to_the_next(device: torch.device, placement: str) -> None:
    # Same address, same shape, other strides: the parameter is its own transpose from the third step on.
    ends = []
    for in_place in (True, False):
        parameter = torch.nn.Parameter(random((16, 16), 5).to(device))
        optimizer = forebay.AdamW([parameter], lr=0.1, placement=placement)
        for step in range(4):
            if step == 2:
                turned = parameter.data.t()
                parameter.data = turned if in_place else turned.contiguous()
            parameter.grad = random((16, 16), step).to(device)
            optimizer.step()
        ends.append(snapshot(optimizer, [parameter]))
    assert_same(*ends)


def test_memory_may_hold_another_type_from_one_step_to_the_next(device: torch.device, placement: str) -> None:
    # Moving a model away, casting it and moving it back may well give every parameter its old address.
    ends = []
    for in_place in (True, False):
        parameter = torch.nn.Parameter(random((300,), 5).to(device, torch.bfloat16))
        optimizer = forebay.AdamW([parameter], lr=0.1, placement=placement)
        train(optimizer, [parameter], 2)
        cast = parameter.detach().half()
        if in_place:
            memory = parameter.data.view(torch.float16)
            parameter.grad, parameter.data = None, memory.copy_(cast)
        else:
            parameter.grad, parameter.data = None, cast
        train(optimizer, [parameter], range(2, 4))
        ends.append(snapshot(optimizer, [parameter]))
    assert_same(*ends)


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="this torch ties a gradient's type to its parameter"
)
@pytest.mark.parametrize("parameter_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gradient_may_have_another_type(
    device: torch.device, placement: str, parameter_dtype: torch.dtype, gradient_dtype: torch.dtype
) -> None:
    # A value that all types hold: the result must not depend on the type that carries it.
    gradient = random((300,), 3).to(torch.float16).to(torch.bfloat16).to(device)
    ends = []
    for dtype in (parameter_dtype, gradient_dtype):
        parameter = torch.nn.Parameter(random((300,), 1).to(device, parameter_dtype))
        parameter.grad_dtype = None
        parameter.grad = gradient.to(dtype)
        optimizer = forebay.AdamW([parameter], lr=0.1, placement=placement, chunk_bytes=TINY)
        optimizer.step()
        ends.append(snapshot(optimizer, [parameter]))
    assert_same(*ends)


@pytest.mark.parametrize("elements", [1, 300])
def test_a_gradient_that_torch_negates_lazily_keeps_its_sign(
    device: torch.device, placement: str, elements: int
) -> None:
    ends = []
    for lazy in (True, False):
        parameter = torch.nn.Parameter(torch.ones(elements, device=device))
        values = torch.randn(elements, generator=torch.Generator().manual_seed(3)).to(device)
        gradient = torch.complex(torch.zeros_like(values), values).conj().imag
        assert gradient.is_neg()
        parameter.grad = gradient if lazy else gradient.resolve_neg().clone()
        optimizer = forebay.AdamW([parameter], lr=0.1, placement=placement)
        optimizer.step()
        ends.append(parameter.detach().clone())
    assert torch.equal(*ends)


@pytest.mark.skipif(not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="torch has no table of C functions")
def test_the_table_of_c_functions_and_python_see_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [
        torch.randn(4, 5),
        torch.randn(6, 3).t(),
        torch.randn(7).bfloat16()[2:],
        torch.randn(5).half(),
        torch.tensor(2.0),
        torch.zeros(0, 3),
        torch.nn.Parameter(torch.randn(1, 8, 1)),
    ]
    table = [_torch.look([tensor]) for tensor in tensors]
    monkeypatch.setattr(_torch, "_TABLE", None)
    for one, tensor in zip(table, tensors, strict=True):
        other = _torch.look([tensor])
        for name in ("addresses", "dtypes", "devices", "elements", "contiguous"):
            assert getattr(one, name) == getattr(other, name), name
    with pytest.raises(KeyError):
        _torch.look([torch.zeros(3, dtype=torch.int32)])
