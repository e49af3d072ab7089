"""Wrong input and failures of optimizers that run in units: a clear error, and the step before stands."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch

import forebay
from forebay.optim.units import memory
from support.optim import clone, give_gradients, make, train
from support.tensors import needs_cuda
from support.units import SHAPES, Momentum, Twins, assert_equal, contents


class Fragile(Momentum):
    """Raises at a parameter of a certain size, if it is told to."""

    fail_at: int | None = None
    error: type[BaseException] = ArithmeticError

    def update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Update one parameter."""
        super().update(group, parameter, state)
        if type(self).fail_at is not None and parameter.numel() == type(self).fail_at:
            raise self.error("broken")


@pytest.fixture(autouse=True)
def whole() -> Any:
    """Let no test leave the class broken."""
    yield
    Fragile.fail_at = None


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
@pytest.mark.parametrize("place", [0, 2])
def test_a_step_that_breaks_off_is_not_taken_for_a_whole_one(device: torch.device, place: int, error: Any) -> None:
    twins = Twins(Fragile, make(SHAPES, device=device))
    twins.step(2)
    saved = {"optimizer": clone_state(twins.optimizer), "parameters": clone(twins.parameters)}
    before = contents(twins.optimizer, twins.parameters)
    Fragile.fail_at, Fragile.error = twins.parameters[place].numel(), error
    give_gradients(twins.parameters, 2)
    with pytest.raises(error, match="broken"):
        twins.optimizer.step()
    Fragile.fail_at = None
    # State on the host is complete: of units before the failure as after it, of others as before it.
    after = contents(twins.optimizer, twins.parameters)
    assert after["state"][place:] == before["state"][place:]
    assert [after["state"][i] != before["state"][i] for i in range(place)] == [True] * place
    for _ in range(2):
        with pytest.raises(
            forebay.CheckpointError, match=rf"broke off with {error.__name__}: broken; {place} of 6 units"
        ):
            twins.optimizer.step()
    with pytest.raises(forebay.CheckpointError, match="cannot be restored"):
        forebay.restore(twins.optimizer)
    with torch.no_grad():
        for parameter, kept in zip(twins.parameters, saved["parameters"], strict=True):
            parameter.copy_(kept)
    twins.optimizer.load_state_dict(saved["optimizer"])
    twins.step(range(2, 4))
    twins.check()


def clone_state(optimizer: torch.optim.Optimizer) -> Any:
    import copy

    return copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("place", [0, 3])
def test_a_sparse_gradient_is_treated_as_the_class_treats_it(device: torch.device, place: int) -> None:
    twins = Twins(torch.optim.Adamax, make([(6, 4), (5, 3), (2, 2), (7, 2)], device=device))
    twins.step(2)
    before = contents(twins.optimizer, twins.parameters)
    for parameters in (twins.plain_parameters, twins.parameters):
        give_gradients(parameters, 2)
        parameters[place].grad = parameters[place].grad.to_sparse()
    with pytest.raises(RuntimeError) as plain:
        twins.plain.step()
    with pytest.raises(RuntimeError) as mine:
        twins.optimizer.step()
    assert str(mine.value) == str(plain.value)
    # Nothing has changed, so the next step is a step.
    assert_equal(contents(twins.optimizer, twins.parameters), before)
    twins.step(range(2, 4))
    twins.check()


def step_with_a_sparse_gradient(optimizer: Any, parameters: Any, number: int) -> None:
    give_gradients(parameters, number)
    parameters[1].grad = parameters[1].grad.to_sparse(1)
    optimizer.step()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_sparse_gradients_that_the_class_takes(device: torch.device) -> None:
    def build(parameters: Any) -> Any:
        return torch.optim.Adagrad(parameters, foreach=False)

    twins = Twins(build, make([(6, 4), (5, 3), (2, 2)], device=device))
    for number in range(3):
        step_with_a_sparse_gradient(twins.plain, twins.plain_parameters, number)
        step_with_a_sparse_gradient(twins.optimizer, twins.parameters, number)
    twins.check()


@needs_cuda
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_torchs_choice_by_all_gradients_is_refused_with_its_remedy() -> None:
    # On a GPU, Adagrad computes dense gradients in another way if there are sparse ones among them.
    twins = Twins(torch.optim.Adagrad, make([(6, 4), (5, 3), (2, 2)], device="cuda"))
    before = contents(twins.optimizer, twins.parameters)
    with pytest.raises(forebay.OptionError, match="set foreach=False in its groups"):
        step_with_a_sparse_gradient(twins.optimizer, twins.parameters, 0)
    assert_equal(contents(twins.optimizer, twins.parameters), before)
    for optimizer, parameters in ((twins.plain, twins.plain_parameters), (twins.optimizer, twins.parameters)):
        optimizer.param_groups[0]["foreach"] = False
        for number in range(3):
            step_with_a_sparse_gradient(optimizer, parameters, number)
    twins.check()


def test_a_step_that_cannot_have_its_memory_changes_nothing(device: torch.device) -> None:
    twins = Twins(Momentum, make(SHAPES, device=device), 3000)
    twins.step(2)
    before = contents(twins.optimizer, twins.parameters)
    give_gradients(twins.parameters, 2)
    needed = int(twins.optimizer.stats()["device_bytes"])
    with (
        mock.patch.object(memory, "free_bytes", return_value=needed - 1),
        pytest.raises(forebay.OutOfMemoryError) as error,
    ):
        twins.optimizer.step()
    assert (error.value.requested_bytes, error.value.available_bytes) == (needed, needed - 1)
    assert "use a smaller unit_bytes" in str(error.value)
    assert_equal(contents(twins.optimizer, twins.parameters), before)
    twins.step(range(2, 4))
    twins.check()


def test_a_budget_that_is_too_small_changes_nothing(device: torch.device) -> None:
    parameters = make(SHAPES, device=device)
    optimizer = Momentum(parameters)
    train(optimizer, parameters, 1)
    before = contents(optimizer, parameters)
    pinned = forebay.offload(Momentum(clone(parameters))).stats()["pinned_bytes"]
    with pytest.raises(forebay.OutOfMemoryError, match="pinned_budget_bytes allows") as error:
        forebay.offload(optimizer, pinned_budget_bytes=pinned - 1)
    assert (error.value.requested_bytes, error.value.limit_bytes) == (pinned, pinned - 1)
    assert type(optimizer) is Momentum
    assert_equal(contents(optimizer, parameters), before)
    forebay.offload(optimizer, pinned_budget_bytes=pinned)
    train(optimizer, parameters, 1)


def test_a_conversion_that_fails_half_way_changes_nothing(device: torch.device) -> None:
    parameters = make(SHAPES, device=device)
    optimizer = Momentum(parameters)
    train(optimizer, parameters, 2)
    before, attributes = contents(optimizer, parameters), dict(vars(optimizer))
    calls: list[int] = []

    def fail(nbytes: int, *_: Any) -> Any:
        calls.append(nbytes)
        if len(calls) == 3:
            raise forebay.StorageError("no memory")
        return pin(nbytes, *_)

    pin = memory._pin
    with mock.patch.object(memory, "_pin", fail), pytest.raises(forebay.StorageError, match="no memory"):
        forebay.offload(optimizer, unit_bytes=1)
    assert len(calls) == 3
    assert type(optimizer) is Momentum
    assert {name: id(value) for name, value in vars(optimizer).items()} == {n: id(v) for n, v in attributes.items()}
    assert_equal(contents(optimizer, parameters), before)
    twins = Twins(lambda p: torch.optim.NAdam(p), parameters)
    twins.step(1)


def test_parameters_on_several_devices_are_refused(device: torch.device) -> None:
    parameters = [*make([(3,), (4,)], device=device), torch.nn.Parameter(torch.empty(5, device="meta"))]
    with pytest.raises(forebay.OptionError, match="parameter 2 of group 0 is on meta; forebay takes parameters on"):
        forebay.offload(Momentum(parameters))
    optimizer = forebay.offload(Momentum(parameters[:2]))
    train(optimizer, parameters[:2], 1)
    optimizer.add_param_group({"params": parameters[2:]})
    with pytest.raises(forebay.OptionError, match="parameter 0 of group 1 is on meta"):
        optimizer.step()


def test_parameters_that_share_memory_are_refused(device: torch.device) -> None:
    memory = torch.zeros(8, device=device)
    parameters = [torch.nn.Parameter(memory[:5]), torch.nn.Parameter(memory[4:])]
    with pytest.raises(forebay.OptionError, match="parameter 0 of group 0 and parameter 1 of group 0 share memory"):
        forebay.offload(Momentum(parameters))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("placement", "host", r"placement='host' does not apply: its own step runs on the parameters' device"),
        ("placement", "resident", "placement='resident' does not apply"),
        ("chunk_bytes", 1 << 20, "chunk_bytes=1048576 does not apply: use unit_bytes"),
        ("slots", 4, "slots=4 does not apply"),
        ("master_weights", True, "master_weights=True does not apply: its step knows no masters"),
        ("state_dtype", torch.float32, "state_dtype=torch.float32 does not apply"),
        ("max_grad_norm", 1.0, "max_grad_norm=1.0 does not apply: clip with torch.nn.utils.clip_grad_norm_"),
        ("skip_nonfinite", True, "skip_nonfinite=True does not apply"),
        ("grad_source", "main_grad", "grad_source='main_grad' does not apply"),
        ("device", "cpu", "device='cpu' does not apply"),
        ("host_threads", 2, "host_threads=2 does not apply"),
        ("unit_bytes", 0, "invalid unit_bytes: 0; give a whole number of at least 1"),
        ("unit_bytes", "1 MiB", "invalid unit_bytes: '1 MiB'"),
        ("pinned_budget_bytes", -1, "invalid pinned_budget_bytes: -1"),
    ],
)
def test_options_that_do_not_apply_are_refused_by_name(
    device: torch.device, option: str, value: Any, message: str
) -> None:
    optimizer = torch.optim.NAdam(make(device=device))
    with pytest.raises(forebay.OptionError, match=message):
        forebay.offload(optimizer, **{option: value})
    assert type(optimizer) is torch.optim.NAdam


def test_options_that_ask_for_nothing_are_taken(device: torch.device) -> None:
    options: Any = {"placement": "stream", "master_weights": False, "grad_source": "grad", "unit_bytes": None}
    optimizer = torch.optim.NAdam(make(device=device))
    assert forebay.offload(optimizer, **options) is optimizer
    assert forebay.offload(optimizer) is optimizer
    with pytest.raises(forebay.OptionError, match="offloaded already"):
        forebay.offload(optimizer, unit_bytes=5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'unit_byte'; did you mean 'unit_bytes'"):
        forebay.offload(torch.optim.NAdam(make(device=device)), unit_byte=5)  # type: ignore[call-arg]
    with pytest.raises(forebay.OptionError, match="differentiable=True of group 0 is not supported"):
        forebay.offload(torch.optim.NAdam(make(device=device), differentiable=True))


def test_a_state_that_is_part_of_a_graph_is_refused(device: torch.device) -> None:
    parameters = make(SHAPES, device=device)
    optimizer = forebay.offload(Momentum(parameters))
    train(optimizer, parameters, 1)
    optimizer.state[parameters[0]]["mean"] = parameters[0] * 2
    give_gradients(parameters, 1)
    values = [parameter.detach().clone() for parameter in parameters]
    with pytest.raises(forebay.OptionError, match=r"state\['mean'\] of a parameter of shape \(33, 7\) is part of an"):
        optimizer.step()
    assert all(torch.equal(now, before) for now, before in zip(parameters, values, strict=True))
    optimizer.state[parameters[0]]["mean"] = parameters[0].detach() * 2
    optimizer.step()


def test_a_forked_child_is_told_that_it_has_no_state(device: torch.device) -> None:
    parameters = make(SHAPES, device="cpu")
    optimizer = forebay.offload(Momentum(parameters))
    train(optimizer, parameters, 1)
    give_gradients(parameters, 1)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        found = []
        for use in (optimizer.step, lambda: optimizer.state[parameters[0]], optimizer.state_dict):
            try:
                use()
            except forebay.DeviceError as error:
                found.append("used before fork()" in str(error))
        os.write(write, str(found).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"[True, True, True]"
    for end in (read, write):
        os.close(end)
    optimizer.step()
