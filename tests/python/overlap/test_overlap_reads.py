"""Between ``step()`` and its update, every way to read a parameter gives the new value, or raises an error.

The engine of these tests is told of a step only when somebody waits for it. Who reads without waiting reads old values.
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch

import forebay
from forebay.optim.overlap.pending import Pending
from support.overlap import LateEngine, Run, adamw, batch, both, net
from support.tensors import assert_same

if TYPE_CHECKING:
    pass

Way = "Callable[[Run], list[torch.Tensor]]"


def weight(run: Run) -> torch.nn.Parameter:
    return run.model[2].weight  # type: ignore[index,return-value]


def evaluated(run: Run) -> list[torch.Tensor]:
    run.model.eval()
    with torch.no_grad():
        found = run.model(batch(1, run.model))
    run.model.train()
    return [found]


def in_inference_mode(run: Run) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [run.model(batch(1, run.model))]


def second_optimizer(run: Run) -> list[torch.Tensor]:
    other = torch.optim.SGD(run.model.parameters(), lr=0.1)
    for parameter in run.model.parameters():
        parameter.grad = torch.full_like(parameter.detach(), 0.5)
    other.step()
    run.optimizer.zero_grad()
    return list(run.model.parameters())


def averaged(run: Run) -> list[torch.Tensor]:
    average = torch.optim.swa_utils.AveragedModel(run.model, avg_fn=lambda a, b, n: a + (b - a) / (n + 1))
    average.update_parameters(run.model)
    return list(average.module.parameters())


def saved(run: Run) -> list[torch.Tensor]:
    file = io.BytesIO()
    torch.save(run.model.state_dict(), file)
    file.seek(0)
    return list(torch.load(file).values())


def pickled(run: Run) -> list[torch.Tensor]:
    file = io.BytesIO()
    torch.save(run.model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    return [*again.parameters(), again(batch(1, again))]


def copied(run: Run) -> list[torch.Tensor]:
    again = copy.deepcopy(run.model)
    assert not any(isinstance(parameter, Pending) for parameter in again.parameters())
    return [*again.parameters(), again(batch(1, again))]


def loaded(run: Run) -> list[torch.Tensor]:
    run.model.load_state_dict({name: value * 0.5 for name, value in run.model.state_dict().items()})
    return list(run.model.parameters())


def overwritten(run: Run) -> list[torch.Tensor]:
    with torch.no_grad():
        weight(run).fill_(0.25)
    return list(run.model.parameters())


def data_replaced(run: Run) -> list[torch.Tensor]:
    weight(run).data = torch.full_like(weight(run).data, 0.25)
    return list(run.model.parameters())


def moved(run: Run) -> list[torch.Tensor]:
    # A gradient that was taken cannot be moved.
    run.optimizer.zero_grad()
    return list(run.model.to(torch.float64).to(torch.float32).parameters())


def from_numpy(run: Run) -> list[torch.Tensor]:
    return [torch.from_numpy(weight(run).detach().cpu().numpy().copy())]


def through_dlpack(run: Run) -> list[torch.Tensor]:
    return [torch.from_dlpack(weight(run).detach().__dlpack__())]


def at_its_address(run: Run) -> list[torch.Tensor]:
    if run.device.type != "cpu":
        return [weight(run)]
    import ctypes

    parameter = weight(run)
    room = (ctypes.c_char * parameter.nbytes).from_address(parameter.data_ptr())
    return [torch.frombuffer(bytearray(room), dtype=parameter.dtype)]


def of_the_storage(run: Run) -> list[torch.Tensor]:
    storage = weight(run).untyped_storage()
    return [torch.empty(0, dtype=torch.float32, device=storage.device).set_(storage)]


def clipped_weights(run: Run) -> list[torch.Tensor]:
    with torch.no_grad():
        torch._foreach_clamp_max_(list(run.model.parameters()), 0.1)
    return list(run.model.parameters())


def functional(run: Run) -> list[torch.Tensor]:
    values = dict(run.model.named_parameters())
    return [torch.func.functional_call(run.model, values, (batch(1, run.model),))]


def stacked(run: Run) -> list[torch.Tensor]:
    return list(torch.func.stack_module_state([run.model, run.model])[0].values())


def as_a_vector(run: Run) -> list[torch.Tensor]:
    return [torch.nn.utils.parameters_to_vector(run.model.parameters())]


def initialised(run: Run) -> list[torch.Tensor]:
    torch.manual_seed(1)
    torch.nn.init.kaiming_uniform_(weight(run))
    return list(run.model.parameters())


def printed(run: Run) -> list[torch.Tensor]:
    text = repr(weight(run)) + f"{run.model[2].bias[0]:.8f}"  # type: ignore[index]
    return [torch.tensor(list(text.encode()))]


def in_a_custom_function(run: Run) -> list[torch.Tensor]:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return x @ w.t() * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            x, w = ctx.saved_tensors
            return grad @ w * 2, grad.t() @ x * 2

    x = batch(1, run.model, 40).requires_grad_()
    out = Double.apply(x, weight(run))
    return [out, *torch.autograd.grad(out.sum(), [x, weight(run)])]


def one_after_the_other(run: Run) -> list[torch.Tensor]:
    return [parameter * 1 for parameter in run.model.parameters()]


def state(run: Run) -> list[torch.Tensor]:
    return [value for values in run.optimizer.state.values() for value in values.values()]


def state_of_one(run: Run) -> list[torch.Tensor]:
    return list(run.optimizer.state[weight(run)].values())


def state_dict(run: Run) -> list[torch.Tensor]:
    packed = copy.deepcopy(run.optimizer.state_dict())
    return [value for values in packed["state"].values() for value in values.values()]


def optimizer_loaded(run: Run) -> list[torch.Tensor]:
    packed = copy.deepcopy(run.optimizer.state_dict())
    for values in packed["state"].values():
        values["exp_avg"] *= 0.5
    run.optimizer.load_state_dict(packed)
    return state(run)


def optimizer_pickled(run: Run) -> list[torch.Tensor]:
    again = pickle.loads(pickle.dumps(run.optimizer))
    return [value for values in again.state.values() for value in values.values()]


def masters(run: Run) -> list[torch.Tensor]:
    run.optimizer.refresh_master_weights()
    return state(run)


WAYS = [
    evaluated,
    in_inference_mode,
    second_optimizer,
    averaged,
    saved,
    pickled,
    copied,
    loaded,
    overwritten,
    data_replaced,
    moved,
    from_numpy,
    through_dlpack,
    at_its_address,
    of_the_storage,
    clipped_weights,
    functional,
    stacked,
    as_a_vector,
    initialised,
    printed,
    in_a_custom_function,
    one_after_the_other,
    state,
    state_of_one,
    state_dict,
    optimizer_loaded,
    optimizer_pickled,
    masters,
]


@pytest.mark.parametrize("clip", [None, 0.05], ids=["plain", "clipped"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_reading_gives_the_new_value(device: torch.device, way: Any, clip: float | None) -> None:
    def body(run: Run) -> None:
        run.train(2)
        with run.last():
            run.loss(77).backward()
        run.optimizer.step()
        if run.overlaps:
            assert all(isinstance(parameter, Pending) for parameter in run.model.parameters())
        run.see(*way(run))
        run.optimizer.zero_grad()
        run.train(range(3, 5))

    both(body, device, late=True, max_grad_norm=clip)


def test_what_reads_no_memory_does_not_wait(device: torch.device) -> None:
    model = net(device)
    optimizer = adamw(model)
    handle = forebay.overlap_step(model, optimizer, accumulation_steps=1)
    for step in range(2):
        model(batch(step, model)).sum().backward()
        optimizer.step()
        if step == 0:
            optimizer.zero_grad()
    parameter = model[2].weight
    assert parameter.shape == (40, 40)
    assert parameter.dtype == torch.float32
    assert parameter.device == device
    assert parameter.is_leaf
    assert parameter.requires_grad
    assert parameter.grad_fn is None
    assert (parameter.ndim, parameter.numel(), parameter.stride()) == (2, 1600, (40, 1))
    assert parameter.grad is not None
    parameter.grad = None
    parameter.requires_grad_()
    assert isinstance(parameter, torch.nn.Parameter)
    assert [name for name, _ in model.named_parameters()] == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
        "4.weight",
        "4.bias",
    ]
    assert isinstance(parameter, Pending)
    assert not isinstance(parameter + 1, Pending)
    assert not isinstance(parameter, Pending)
    assert isinstance(model[0].weight, Pending)
    handle.remove()
    assert not isinstance(model[0].weight, Pending)


def test_a_layer_waits_for_its_own_parameters_only(device: torch.device) -> None:
    model = net(device)
    optimizer = adamw(model, max_grad_norm=1.0)
    forebay.overlap_step(model, optimizer)
    pending: list[list[bool]] = []
    for step in range(3):
        model(batch(step, model)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def look(*_: Any) -> None:
        pending.append([isinstance(model[i].weight, Pending) for i in (0, 2, 4)])

    for i in (0, 2, 4):
        model[i].register_forward_pre_hook(look)
    model(batch(3, model))
    assert pending == [[False, True, True], [False, False, True], [False, False, False]]


def test_reading_between_backward_and_step_is_refused(device: torch.device) -> None:
    model = net(device)
    optimizer = adamw(model)
    handle = forebay.overlap_step(model, optimizer, accumulation_steps=1)
    for step in range(2):
        model(batch(step, model)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    packed = copy.deepcopy(optimizer.state_dict())
    model(batch(2, model)).sum().backward()
    for read in (
        lambda: model[2].weight + 1,
        lambda: model(batch(1, model)),
        lambda: model.state_dict(),
        lambda: copy.deepcopy(model),
        lambda: optimizer.state_dict(),
        lambda: optimizer.state[model[2].weight],
        lambda: optimizer.load_state_dict(packed),
        lambda: optimizer.refresh_master_weights(),
        lambda: handle.remove(),
        lambda: optimizer.synchronize(),
        lambda: model[2].weight.copy_(model[2].weight),
    ):
        with pytest.raises(forebay.OptionError, match=r"step\(\)"):
            read()
    optimizer.step()
    model(batch(1, model))


def test_a_saved_weight_that_is_used_later_is_torchs_error(device: torch.device) -> None:
    class Late(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(24, 24), torch.nn.Linear(24, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # The first operation needs the last layer's weight in its backward, when that one's gradient was taken.
            return self.last(self.first(x) @ self.last.weight.detach())

    model = Late().to(device)
    optimizer = adamw(model)
    forebay.overlap_step(model, optimizer, accumulation_steps=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(batch(1, model)).sum().backward()


def test_a_model_that_is_gone_leaves_nothing(device: torch.device) -> None:
    import gc
    import weakref

    from forebay.optim.overlap import pending

    model = net(device)
    optimizer = adamw(model)
    forebay.overlap_step(model, optimizer, accumulation_steps=1)
    for step in range(2):
        model(batch(step, model)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    references = [weakref.ref(one) for one in (model, optimizer, model[0].weight, optimizer._overlap)]
    known = len(pending._waits)
    del model, optimizer
    # The first ends what the optimizer has left under way.
    gc.collect()
    gc.collect()
    assert [reference() for reference in references] == [None] * 4
    assert len(pending._waits) <= known


def test_an_optimizer_that_is_gone_leaves_a_model_that_can_be_read(device: torch.device) -> None:
    import gc

    model = net(device)
    optimizer = adamw(model)
    forebay.overlap_step(model, optimizer, accumulation_steps=1)
    twin = net(device)
    other = adamw(twin)
    for step in range(3):
        for one, own in ((model, optimizer), (twin, other)):
            one(batch(step, one)).sum().backward()
            own.step()
            own.zero_grad()
    del optimizer
    gc.collect()
    assert_same(list(model.parameters()), list(twin.parameters()))
    model(batch(1, model)).sum().backward()


def test_a_closed_optimizer_leaves_a_model_that_can_be_read(device: torch.device) -> None:
    def body(run: Run) -> None:
        run.train(3)
        values = list(run.model.parameters())
        run.optimizer.close()
        run.see(*values)

    found = []
    for overlaps in (True, False):
        model = net(device)
        run = Run(model, adamw(model))
        if overlaps:
            run.handle = forebay.overlap_step(model, run.optimizer)
        body(run)
        found.append(run.seen)
    assert_same(*found)


def test_the_late_engine_is_late(device: torch.device) -> None:
    """The tests above can fail: who does not wait reads the old value."""
    model = net(device)
    optimizer = adamw(model, max_grad_norm=1.0)
    forebay.overlap_step(model, optimizer)
    model(batch(1, model)).sum().backward()
    optimizer.prepare()
    optimizer._engine = LateEngine(optimizer._engine)
    before = model[2].weight.detach().clone()
    model(batch(1, model))
    optimizer.step()
    with torch._C.DisableTorchFunctionSubclass():
        now = model[2].weight.detach().clone()
    assert torch.equal(now, before)
    assert not torch.equal(model[2].weight, before)
