"""Wrong input: a clear error at once, and nothing changed."""

from __future__ import annotations

from typing import Any, Self

import pytest
import torch

import forebay
from support.optim import TINY, give_gradients, make, run, snapshot, train
from support.tensors import assert_same, needs_cuda, same_bits

OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"lr": -1.0}, "learning rate"),
    ({"lr": float("nan")}, "learning rate"),
    ({"lr": torch.tensor([1.0, 2.0])}, "lr"),
    ({"betas": (1.0, 0.9)}, "beta"),
    ({"betas": (0.9, -0.1)}, "beta"),
    ({"betas": (float("nan"), 0.9)}, "beta"),
    ({"eps": -1e-8}, "epsilon"),
    ({"weight_decay": -0.1}, "weight_decay"),
    ({"placement": "hybrid", "host_fraction": -0.1}, "host_fraction: -0.1"),
    ({"placement": "hybrid", "host_fraction": 1.1}, "host_fraction: 1.1"),
    ({"placement": "hybrid", "host_fraction": float("nan")}, "host_fraction: nan"),
    ({"placement": "hybrid", "host_fraction": "most"}, "host_fraction: 'most'"),
    ({"placement": "hybrid", "host_fraction": True}, "host_fraction: True"),
    ({"placement": "host", "host_fraction": 0.5}, "host_fraction=0.5 contradicts placement 'host'"),
    ({"host_fraction": "auto"}, "host_fraction='auto' contradicts placement 'stream'"),
    ({"placement": "host", "host_threads": 0}, "host_threads: 0"),
    ({"placement": "host", "host_threads": -1}, "host_threads: -1; give a whole number of at least 1"),
    ({"placement": "host", "host_threads": 2**70}, f"host_threads: {2**70}; this process may use"),
    ({"placement": "hybrid", "host_threads": 1.0}, "host_threads: 1.0"),
    ({"placement": "host", "host_threads": 100_000}, "host_threads: 100000; this process may use"),
    ({"host_threads": 1}, "host_threads=1 contradicts placement 'stream'"),
    ({"placement": "host", "host_kernel": 3}, "host_kernel: 3; use 'portable', 'avx2' or 'avx512'"),
    ({"placement": "host", "host_kernel": "mmx"}, "host_kernel: mmx; there is no such kernel"),
    ({"placement": "resident", "host_kernel": "avx2"}, "host_kernel='avx2' contradicts placement 'resident'"),
    ({"placement": "gpu"}, "placement: 'gpu'"),
    ({"placement": None}, "placement: None"),
    ({"chunk_bytes": 0}, "chunk_bytes: 0"),
    ({"chunk_bytes": TINY - 1}, f"chunk_bytes: {TINY - 1}"),
    ({"chunk_bytes": -1}, "chunk_bytes: -1"),
    ({"chunk_bytes": 1e6}, "chunk_bytes: 1000000.0"),
    ({"chunk_bytes": True}, "chunk_bytes: True"),
    ({"slots": 1}, "slots: 1"),
    ({"slots": 0}, "slots: 0"),
    ({"slots": 2.0}, "slots: 2.0"),
    ({"master_weights": "yes"}, "master_weights: 'yes'"),
    ({"master_weights": 2}, "master_weights: 2"),
    ({"state_dtype": torch.float16}, "state_dtype: torch.float16"),
    ({"max_grad_norm": 0.0}, "max_grad_norm: 0.0"),
    ({"max_grad_norm": -1.0}, "max_grad_norm: -1.0"),
    ({"max_grad_norm": float("nan")}, "max_grad_norm: nan"),
    ({"max_grad_norm": "1"}, "max_grad_norm: '1'"),
    ({"skip_nonfinite": True}, "skip_nonfinite needs max_grad_norm"),
    ({"pinned_budget_bytes": -1}, "pinned_budget_bytes: -1"),
    ({"pinned_budget_bytes": 1.5}, "pinned_budget_bytes: 1.5"),
    ({"pinned_budget_bytes": 1 << 20, "placement": "resident"}, "contradicts placement 'resident'"),
    ({"device": "meta"}, "device: 'meta'"),
    ({"device": "tpu"}, "device: 'tpu'"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=[str(options) for options, _ in OPTIONS])
def test_options_are_checked_in_the_constructor(device: torch.device, options: dict[str, Any], message: str) -> None:
    with pytest.raises(forebay.OptionError, match=message) as caught:
        forebay.AdamW(make([(3,)], device=device), **options)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"decoupled_weight_decay": True}])
def test_unknown_options_are_refused(device: torch.device, options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(options))):
        forebay.AdamW(make([(3,)], device=device), **options)


@pytest.mark.parametrize("option", ["capturable", "differentiable"])
def test_what_the_engine_cannot_do_is_refused_with_the_reason(device: torch.device, option: str) -> None:
    with pytest.raises(forebay.OptionError, match=f"{option}=True is not supported: the step runs on the engine's own"):
        forebay.AdamW(make([(3,)], device=device), **{option: True})  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"fused": False, "capturable": False}])
def test_how_torch_would_compute_is_recorded(device: torch.device, options: dict[str, Any]) -> None:
    parameters = make([(3,)], device=device)
    mine, theirs = forebay.AdamW(parameters, **options), torch.optim.AdamW(parameters, **options)
    assert mine.defaults == theirs.defaults
    assert {key: mine.param_groups[0][key] for key in options} == options
    with pytest.raises(RuntimeError, match="cannot be `True` together"):
        forebay.AdamW(parameters, fused=True, foreach=True)


def test_options_of_forebays_own_are_keyword_only(device: torch.device) -> None:
    with pytest.raises(TypeError, match="positional"):
        forebay.AdamW(make([(3,)], device=device), 1e-3, (0.9, 0.999), 1e-8, 0.0, False, True)


GROUPS: list[tuple[dict[str, Any], str]] = [
    ({"lr": -1.0}, "learning rate"),
    ({"betas": (0.9, 1.5)}, "beta"),
    ({"eps": -1.0}, "epsilon"),
    ({"weight_decay": -1.0}, "weight_decay"),
    ({"capturable": True}, "capturable"),
    ({"differentiable": True}, "differentiable"),
]


@pytest.mark.parametrize(("numbers", "message"), GROUPS, ids=[str(numbers) for numbers, _ in GROUPS])
def test_numbers_of_a_group_are_checked_too(device: torch.device, numbers: dict[str, Any], message: str) -> None:
    good, bad = make([(3,)], device=device), make([(4,)], device=device)
    with pytest.raises(forebay.OptionError, match=message):
        forebay.AdamW([{"params": good}, {"params": bad, **numbers}])
    optimizer = forebay.AdamW(good)
    with pytest.raises(forebay.OptionError, match=message):
        optimizer.add_param_group({"params": bad, **numbers})
    assert len(optimizer.param_groups) == 1
    train(optimizer, good, 1)
    optimizer.add_param_group({"params": bad})
    train(optimizer, bad, 1)


PARAMETERS: list[tuple[Any, str]] = [
    (lambda d: torch.zeros(3, dtype=torch.float64, device=d), "float64"),
    (lambda d: torch.zeros(3, dtype=torch.complex64, device=d), "complex64"),
    (lambda _: torch.zeros(3, device="meta"), "meta"),
    (lambda d: torch.zeros(3, 1, device=d).expand(3, 4), "share memory"),
]


@pytest.mark.parametrize(("data", "message"), PARAMETERS, ids=[message for _, message in PARAMETERS])
def test_parameters_that_cannot_work_are_refused_by_name(device: torch.device, data: Any, message: str) -> None:
    good, bad = make([(5,)], device=device)[0], torch.nn.Parameter(data(device))
    with pytest.raises(forebay.OptionError, match=f"culprit.*{message}"):
        forebay.AdamW([("good", good), ("culprit", bad)])
    with pytest.raises(forebay.OptionError, match=f"parameter 1 of group 0.*{message}"):
        forebay.AdamW([good, bad])
    optimizer = forebay.AdamW([good])
    train(optimizer, [good], 1)
    with pytest.raises(forebay.OptionError, match=message):
        optimizer.add_param_group({"params": [bad]})
    assert len(optimizer.param_groups) == 1
    train(optimizer, [good], 1)


def check_refused_step(
    optimizer: forebay.AdamW, parameters: list[torch.nn.Parameter], others: list[torch.nn.Parameter], message: str
) -> None:
    """Assert that a step is refused and leaves parameters, state, counters and versions alone."""
    before = snapshot(optimizer, others)
    versions = [parameter._version for parameter in parameters]
    with pytest.raises(forebay.OptionError, match=message):
        optimizer.step()
    assert_same(before, snapshot(optimizer, others))
    assert [parameter._version for parameter in parameters] == versions


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_sparse_gradient_is_refused(device: torch.device, placement: str, clip: float | None, steps: int) -> None:
    embedding = torch.nn.Embedding(10, 4, sparse=True).to(device)
    parameters = [*make([(50,)], device=device), embedding.weight]
    optimizer = forebay.AdamW(
        [{"params": parameters[:1]}, {"params": parameters[1:]}], placement=placement, max_grad_norm=clip
    )
    train(optimizer, parameters, steps)
    give_gradients(parameters[:1], 9)
    embedding.weight.grad = None
    embedding(torch.tensor([1, 2], device=device)).sum().backward()
    check_refused_step(optimizer, parameters, parameters, "parameter 0 of group 1.*sparse")
    # A good gradient afterwards, and all is as if the bad one had never been there.
    reference = [*make([(50,)], device=device), torch.nn.Parameter(embedding.weight.detach().clone())]
    assert same_bits(reference[1], parameters[1])
    give_gradients(parameters, 9)
    optimizer.step()
    assert [int(values["step"]) for values in snapshot(optimizer, parameters)] == [steps + 1] * 2


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="this torch ties a gradient's type to its parameter"
)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64])
def test_a_gradient_of_a_foreign_type_is_refused(device: torch.device, placement: str, dtype: torch.dtype) -> None:
    parameters = make([(50,), (6,)], device=device)
    optimizer = forebay.AdamW(parameters, placement=placement)
    train(optimizer, parameters, 2)
    parameters[1].grad = None
    parameters[1].grad_dtype = None
    parameters[1].grad = torch.ones(6, dtype=dtype, device=device)
    check_refused_step(optimizer, parameters, parameters, f"parameter 1 of group 0.*{str(dtype).split('.')[1]}")
    give_gradients(parameters, 2)
    optimizer.step()


def test_a_type_that_changed_after_construction_is_refused(device: torch.device, placement: str) -> None:
    parameters = make([(50,), (6,)], device=device)
    optimizer = forebay.AdamW(parameters, placement=placement)
    train(optimizer, parameters, 2)
    kept = parameters[1].data
    parameters[1].data = kept.double()
    give_gradients(parameters, 2)
    check_refused_step(optimizer, parameters, parameters[:1], "parameter 1 of group 0.*float64")
    parameters[1].data = kept
    give_gradients(parameters, 2)
    optimizer.step()
    assert_same(snapshot(optimizer, parameters), run([(50,), (6,)], device=device, steps=3, lr=1e-3))


@pytest.mark.parametrize("shape", [(8,), (4,), (2, 3), (3, 2), (6, 1)])
def test_a_shape_that_changed_after_the_state_was_made_is_refused(
    device: torch.device, placement: str, shape: tuple[int, ...]
) -> None:
    parameters = make([(50,), (6,)], device=device)
    optimizer = forebay.AdamW(parameters, placement=placement)
    train(optimizer, parameters, 2)
    kept = parameters[1].data
    parameters[1].data = torch.ones(shape, device=device)
    give_gradients(parameters, 2)
    check_refused_step(optimizer, parameters, parameters[:1], r"parameter 1 of group 0.*\(6,\)")
    parameters[1].data = kept
    give_gradients(parameters, 2)
    optimizer.step()
    assert_same(snapshot(optimizer, parameters), run([(50,), (6,)], device=device, steps=3, lr=1e-3))


def test_a_gradient_of_a_stale_shape_is_refused(device: torch.device, placement: str) -> None:
    parameters = make([(50,), (6,)], device=device)
    optimizer = forebay.AdamW(parameters, placement=placement)
    train(optimizer, parameters, 1)
    kept = parameters[1].data
    parameters[1].data = kept[:2].clone()
    give_gradients(parameters, 1)
    parameters[1].data = kept
    check_refused_step(optimizer, parameters, parameters[:1], r"parameter 1 of group 0.*gradient.*\(2,\)")


def test_a_parameter_expanded_after_construction_is_refused(device: torch.device, placement: str) -> None:
    parameters = make([(50,), (6,)], device=device)
    optimizer = forebay.AdamW(parameters, placement=placement)
    train(optimizer, parameters, 2)
    kept = parameters[1].data
    parameters[1].data = torch.ones(1, device=device).expand(6)
    for parameter in parameters:
        parameter.grad = torch.ones(parameter.shape, device=device)
    check_refused_step(optimizer, parameters, parameters[:1], "share memory")
    parameters[1].data = kept
    train(optimizer, parameters, range(2, 3))
    assert_same(snapshot(optimizer, parameters), run([(50,), (6,)], device=device, steps=3, lr=1e-3))


class Wrapped(torch.Tensor):
    """A tensor that keeps its numbers in another way: it has a shape, and no memory."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> Self:
        """Return one that looks like another tensor."""
        return torch.Tensor._make_wrapper_subclass(cls, like.size(), dtype=like.dtype, device=like.device)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function} of a Wrapped")


def test_a_gradient_of_a_kind_without_memory_is_named(device: torch.device, placement: str) -> None:
    parameters = make([(50,)], device=device)
    optimizer = forebay.AdamW(parameters, placement=placement)
    parameters[0].grad = Wrapped(parameters[0].detach())
    with pytest.raises(forebay.OptionError, match="the gradient of parameter 0 of group 0 is a Wrapped"):
        optimizer.step()


def test_parameters_without_memory_are_refused(device: torch.device, placement: str) -> None:
    parameters = make([(50,), (6,)], device=device)
    optimizer = forebay.AdamW(parameters, placement=placement)
    train(optimizer, parameters, 1)
    give_gradients(parameters, 1)
    values = parameters[1].detach().clone()
    before = snapshot(optimizer, parameters[:1])
    parameters[1].untyped_storage().resize_(0)
    with pytest.raises(forebay.OptionError, match=r"empty storage"):
        optimizer.step()
    assert_same(before, snapshot(optimizer, parameters[:1]))
    parameters[1].untyped_storage().resize_(24)
    with torch.no_grad():
        parameters[1].copy_(values)
    optimizer.step()
    assert_same(snapshot(optimizer, parameters), run([(50,), (6,)], device=device, steps=2, lr=1e-3))


@needs_cuda
@pytest.mark.parametrize("start", ["cpu", "cuda"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_model_moved_after_its_state_was_made_is_refused(placement: str, start: str, steps: int) -> None:
    end = "cuda" if start == "cpu" else "cpu"
    parameters = make([(50,), (6,)], device=start)
    optimizer = forebay.AdamW(parameters, placement=placement)
    train(optimizer, parameters, steps)
    if steps == 0:
        optimizer.prepare()
    for parameter in parameters:
        parameter.grad = None
        parameter.data = parameter.data.to(end)
    give_gradients(parameters, 2)
    check_refused_step(optimizer, parameters, parameters, f"{end}.*{start}")
    for parameter in parameters:
        parameter.grad = None
        parameter.data = parameter.data.to(start)
    train(optimizer, parameters, range(steps, 3))
    assert_same(snapshot(optimizer, parameters), run([(50,), (6,)], device=start, steps=3, lr=1e-3))


@needs_cuda
def test_moving_before_state_exists_is_fine(placement: str) -> None:
    parameters = make([(50,), (6,)])
    optimizer = forebay.AdamW(parameters, placement=placement)
    for parameter in parameters:
        parameter.data = parameter.data.cuda()
    train(optimizer, parameters, 2)
    assert_same(snapshot(optimizer, parameters), run([(50,), (6,)], device="cuda", steps=2, lr=1e-3))


@needs_cuda
def test_contradictions_of_device_and_parameters_are_refused() -> None:
    with pytest.raises(forebay.OptionError, match="device=cpu contradicts parameters on cuda:0"):
        forebay.AdamW(make([(5,)], device="cuda"), device="cpu")
    parameters = make([(5,)])
    optimizer = forebay.AdamW(parameters, placement="resident", device="cuda")
    give_gradients(parameters, 0)
    with pytest.raises(forebay.OptionError, match="resident"):
        optimizer.step()


@needs_cuda
def test_a_gradient_on_another_device_cannot_slip_through() -> None:
    parameters = make([(5,)], device="cuda")
    optimizer = forebay.AdamW(parameters)
    train(optimizer, parameters, 1)
    parameters[0].data = parameters[0].data.cpu()
    with pytest.raises(forebay.OptionError, match="gradient on cuda"):
        optimizer.step()


@needs_cuda
def test_a_rate_on_the_gpu_is_refused() -> None:
    with pytest.raises(forebay.OptionError, match="lr is a tensor on cuda"):
        forebay.AdamW(make([(5,)], device="cuda"), lr=torch.tensor(0.1, device="cuda"))


@needs_cuda
def test_a_step_inside_a_graph_capture_is_refused() -> None:
    parameters = make([(5,)], device="cuda")
    optimizer = forebay.AdamW(parameters)
    train(optimizer, parameters, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # torch warns of a graph with nothing in it.
        torch.ones(1, device="cuda")
        with pytest.raises(forebay.DeviceError, match="captured"):
            optimizer.step()
    train(optimizer, parameters, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_named() -> None:
    parameters = make([(5,)])
    before = parameters[0].detach().clone()
    optimizer = forebay.AdamW(parameters, device="cuda:0")
    give_gradients(parameters, 0)
    with pytest.raises(forebay.DeviceError, match="cuda"):
        optimizer.step()
    assert torch.equal(parameters[0], before)


@pytest.mark.parametrize("start", [False, True])
def test_amsgrad_cannot_be_switched_once_state_exists(device: torch.device, placement: str, start: bool) -> None:
    parameters = make([(50,), (6,)], device=device)
    optimizer = forebay.AdamW(
        [{"params": parameters[:1]}, {"params": parameters[1:]}], placement=placement, amsgrad=start
    )
    train(optimizer, parameters, 2)
    optimizer.param_groups[1]["amsgrad"] = not start
    give_gradients(parameters, 2)
    check_refused_step(optimizer, parameters, parameters, "amsgrad was switched.*group 1")
    optimizer.param_groups[1]["amsgrad"] = start
    optimizer.step()
    assert [int(values["step"]) for values in snapshot(optimizer, parameters)] == [3, 3]


def test_a_refused_creation_leaves_nothing_half_made(device: torch.device, placement: str) -> None:
    # The new group comes with the same step as a switched amsgrad: neither state may exist afterwards.
    parameters = make([(50,), (6,), (7,)], device=device)
    optimizer = forebay.AdamW(parameters[1:2], placement=placement)
    train(optimizer, parameters[1:2], 1)
    optimizer.param_groups.insert(0, {**optimizer.param_groups[0], "params": parameters[:1]})
    optimizer.add_param_group({"params": parameters[2:]})
    optimizer.param_groups[1]["amsgrad"] = True
    give_gradients(parameters, 1)
    with pytest.raises(forebay.OptionError, match="amsgrad"):
        optimizer.step()
    optimizer.param_groups[1]["amsgrad"] = False
    optimizer.step()
    assert [int(values["step"]) for values in snapshot(optimizer, parameters)] == [1, 2, 1]


def test_a_parameter_listed_twice_with_amsgrad_is_no_switch(device: torch.device, placement: str) -> None:
    parameters = make([(50,), (6,)], device=device)
    optimizer = forebay.AdamW(parameters, placement=placement, amsgrad=True)
    optimizer.param_groups[0]["params"].append(parameters[0])
    train(optimizer, parameters, 2)
    assert_same(snapshot(optimizer, parameters), run([(50,), (6,)], device=device, steps=2, lr=1e-3, amsgrad=True))


# The pinned budget.


def test_a_budget_that_is_too_small_is_refused_with_the_numbers(device: torch.device) -> None:
    parameters = make([(100_000,)], device=device)
    before = parameters[0].detach().clone()
    optimizer = forebay.AdamW(parameters, pinned_budget_bytes=500_000)
    give_gradients(parameters, 0)
    for act in (optimizer.prepare, optimizer.step):
        with pytest.raises(forebay.OutOfMemoryError) as caught:
            act()
        error = caught.value
        assert isinstance(error, MemoryError)
        assert 800_000 <= error.requested_bytes <= 810_000
        assert error.limit_bytes == error.available_bytes == 500_000
        assert str(error.requested_bytes) in str(error)
        assert "500000" in str(error)
    assert optimizer.stats()["pinned_bytes"] == 0
    assert torch.equal(parameters[0], before)
    assert not optimizer.state_dict()["state"]
    needed = error.requested_bytes
    enough = forebay.AdamW(parameters, pinned_budget_bytes=needed)
    enough.step()
    assert enough.stats()["pinned_bytes"] == needed
    with pytest.raises(forebay.OutOfMemoryError):
        forebay.AdamW(parameters, pinned_budget_bytes=needed - 1).step()


def test_a_budget_counts_what_groups_added_later_need(device: torch.device) -> None:
    parameters = make([(100_000,), (100_000,), (10,)], device=device)
    optimizer = forebay.AdamW(parameters[:1], pinned_budget_bytes=900_000)
    train(optimizer, parameters[:1], 1)
    optimizer.add_param_group({"params": parameters[1:2]})
    before = snapshot(optimizer, parameters[:1])
    give_gradients(parameters, 1)
    with pytest.raises(forebay.OutOfMemoryError) as caught:
        optimizer.step()
    assert caught.value.available_bytes < 100_000
    assert_same(before, snapshot(optimizer, parameters[:1]))
    # Without the group that does not fit, training goes on.
    optimizer.param_groups.pop()
    optimizer.add_param_group({"params": parameters[2:]})
    optimizer.step()
    assert optimizer.state[parameters[0]]["step"].item() == 2
    assert optimizer.state[parameters[2]]["step"].item() == 1
    assert optimizer.stats()["pinned_bytes"] <= 900_000


@pytest.mark.parametrize("placement", ["stream", "host", "resident"])
@pytest.mark.parametrize("shape", [(64, 96), (512, 8)])
def test_a_parameter_that_was_transposed_in_place(placement: str, shape: tuple[int, int]) -> None:
    parameter = torch.nn.Parameter(torch.randn(shape))
    optimizer = forebay.AdamW([parameter], placement=placement)
    parameter.grad = torch.randn(shape)
    optimizer.step()
    parameter.grad = None
    parameter.data = parameter.data.t()
    before = parameter.detach().clone()
    parameter.grad = torch.randn(shape[::-1])
    with pytest.raises(forebay.OptionError, match=r"has shape .* its state"):
        optimizer.step()
    assert torch.equal(parameter, before)
