"""How a layer is called: whatever it is given, and whoever calls it, a recomputed call is the same call."""

import dataclasses
import types

import pytest
import torch
from torch import nn

import forebay
from support.budget import HOWS, PASSES, budgeted, recomputed
from support.offload import (
    ACTIVATION_BYTES,
    WIDTH,
    Block,
    Stack,
    assert_nothing_left,
    data,
    gradients,
    offloaded,
    stack,
    train,
)
from support.tensors import assert_same

LARGE = 1 << 29


@dataclasses.dataclass
class Record:
    """An input with something beside it."""

    hidden: torch.Tensor
    step: int = 0


class Opaque:
    """Nothing that torch can look into."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


FORMS = {
    "positional": lambda layer, x: layer(x),
    "keyword": lambda layer, x: layer(given=x),
    "tuple": lambda layer, x: layer((x, 3)),
    "dict": lambda layer, x: layer(given={"state": [x]}),
    "record": lambda layer, x: layer(Record(x)),
    "opaque": lambda layer, x: layer(Opaque(x)),
}


def tensor_in(given) -> torch.Tensor:
    if isinstance(given, torch.Tensor):
        return given
    if isinstance(given, tuple):
        return given[0]
    return given["state"][0] if isinstance(given, dict) else given.hidden


class Takes(nn.Module):
    """A layer that takes its input in any form."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.block, self.rate = Block(), rate

    def forward(self, given) -> torch.Tensor:
        """Find the input and run."""
        return self.block(nn.functional.dropout(tensor_in(given) * 1.5, self.rate))


class Gives(Stack):
    """Gives layers their input in one form, and may change it afterwards, which without forebay is right."""

    def __init__(self, form: str, *blocks: nn.Module, changes: bool = False) -> None:
        super().__init__(*blocks)
        self.form, self.changes = FORMS[form], changes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers."""
        x = x * 1.0
        for layer in self.layers:
            y = self.form(layer, x)
            x = x.add_(y) if self.changes else y
        return x


def gives(form: str, device: torch.device, *, rate: float = 0.0, changes: bool = False) -> Gives:
    torch.manual_seed(0)
    return Gives(form, *(Takes(rate) for _ in range(3)), changes=changes).to(device)


def assert_unchanged(model: nn.Module, x: torch.Tensor, how: str) -> None:
    """Assert that gradients do not depend on recomputation, in no pass."""
    expected = train(model, x)
    with recomputed(model, how):
        for _ in range(PASSES):
            assert_same(expected, train(model, x))


def seeded(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(7)
    return train(model, x)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("form", FORMS)
def test_random_numbers_are_the_same_again(form: str, how: str, device: torch.device) -> None:
    model, x = gives(form, device, rate=0.3), data(device)
    expected = seeded(model, x)
    with recomputed(model, how) as handle:
        for _ in range(PASSES):
            assert_same(expected, seeded(model, x))
        assert_nothing_left(handle)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "opaque"])
def test_inputs_leave_wherever_they_are(form: str, device: torch.device) -> None:
    model = gives(form, device)
    with recomputed(model, "option") as handle:
        seeded(model, data(device))
        assert handle.stats()["stored_bytes"] == 3 * ACTIVATION_BYTES


def test_an_input_of_all_layers_is_counted_once(device: torch.device) -> None:
    class Masked(Block):
        def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * mask

    class Calls(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.ones_like(x)
            for layer in self.layers:
                x = layer(x, mask=mask)
            return x

    model = Calls(Masked(), Masked(), Masked()).to(device)
    with recomputed(model, "budget") as handle:
        for _ in range(PASSES):
            seeded(model, data(device))
        handle.table()
        assert [workload.renewals for workload in handle._budget.workloads.values()] == [0], (
            "they are not taken for growth"
        )
        kinds = {kind.input_bytes for workload in handle._budget.workloads.values() for kind in workload.kinds.values()}
        assert kinds - {0} == {ACTIVATION_BYTES}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("form", [form for form in FORMS if form != "opaque"])
def test_an_input_that_is_changed_in_place_is_named(form: str, how: str, device: torch.device) -> None:
    model = gives(form, device, changes=True)
    with recomputed(model, how):
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            seeded(model, data(device))
        if how == "budget":
            (note,) = caught.value.__notes__
            assert "an input of layer 2" in note
            assert "recompute=False" in note


class Named(Block):
    """A layer whose arguments have names that torch's checkpoint has too."""

    def forward(self, function, **options: float) -> torch.Tensor:
        """Run, and scale by the options."""
        return super().forward(function) * (1 + sum(options.values()))


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    "name", ["debug", "early_stop", "determinism_check", "context_fn", "use_reentrant", "preserve_rng_state"]
)
def test_names_of_arguments_are_the_layers_own(name: str, how: str, device: torch.device) -> None:
    class Calls(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(function=x, **{name: 0.25})
            return x

    torch.manual_seed(0)
    model, x = Calls(Named(), Named(), Named()).to(device), data(device)
    assert_unchanged(model, x, how)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", ["dict", "list", "record"])
def test_arguments_that_a_layer_changes(kind: str, how: str, device: torch.device) -> None:
    """The caller sees the change, as without forebay; the recomputed layer sees what there was before."""

    class Changes(Block):
        def forward(self, state) -> None:
            if kind == "dict":
                state["hidden"] = super().forward(state["hidden"])
            elif kind == "list":
                state.append(super().forward(state.pop()))
            else:
                state.hidden, state.step = super().forward(state.hidden) + state.step, state.step + 1

    class Calls(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = {"dict": {"hidden": x}, "list": [x], "record": Record(x)}[kind]
            for layer in self.layers:
                layer(state)
            return {"dict": lambda: state["hidden"], "list": lambda: state[0], "record": lambda: state.hidden}[kind]()

    torch.manual_seed(0)
    model, x = Calls(Changes(), Changes(), Changes()).to(device), data(device)
    assert_unchanged(model, x, how)


def gated(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.tanh(a + b) * torch.sigmoid(a)


class Scripted(nn.Module):
    """A layer that ends inside a script, where the exception that ends a recomputation early is turned into another."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))
        self.gated = torch.jit.script(gated)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run, with the script last."""
        return self.gated(self.up(x).tanh(), self.bias)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:layer .* are not recomputed")  # scripts for GPUs fill memory that they were given
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", ["function", "module"])
def test_scripts(kind: str, how: str, device: torch.device) -> None:
    torch.manual_seed(0)
    blocks = [Scripted() for _ in range(3)]
    model = Stack(*(torch.jit.script(block) if kind == "module" else block for block in blocks)).to(device)
    x = data(device)
    for _ in range(4):  # until the script is specialised, its results may change by themselves
        train(model, x)
    assert_unchanged(model, x, how)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_errors_of_scripts_are_raised(device: torch.device) -> None:
    """In the recomputation, and before it is over."""

    class Fails(Scripted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            bias = self.bias if torch._C._current_graph_task_id() == -1 else self.bias[:3]
            return super().forward(x) + self.gated(x, bias).tanh()

    model = Stack(Fails()).to(device)
    with recomputed(model, "option"), pytest.raises(RuntimeError, match="must match the size"):
        train(model, data(device))


OFFLOADS = {
    "fraction": offloaded,
    "recompute": lambda model: recomputed(model, "option"),
    "budget": lambda model: budgeted(model, LARGE),
}


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("how", ["fraction", "budget", "context"])
def test_a_module_inside_a_layer_compiled_in_place(how: str, device: torch.device) -> None:
    torch._dynamo.reset()
    model, x = stack(device), data(device)
    for layer in model.layers:
        layer.up.compile(backend="aot_eager")
    expected = train(model, x)
    context = forebay.save_on_host(min_bytes=1024, device=device.type) if how == "context" else OFFLOADS[how](model)
    with context:
        for _ in range(PASSES):
            assert_same(expected, train(model, x))
    assert context.stats()["stored_bytes"] > 0


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("how", OFFLOADS)
def test_layers_may_be_compiled_afterwards(how: str, device: torch.device) -> None:
    torch._dynamo.reset()
    model, x = stack(device), data(device)
    expected = train(model, x)
    with OFFLOADS[how](model) as handle:
        for layer in model.layers:
            layer.compile(backend="aot_eager")
        for _ in range(PASSES):
            assert_same(expected, train(model, x))
        assert handle.stats()["stored_bytes"] > 0
    assert all(layer._compiled_call_impl is not None for layer in model.layers)
    assert_same(expected, train(model, x))


@pytest.mark.parametrize("how", OFFLOADS)
@pytest.mark.parametrize("inner", [False, True])
def test_what_is_compiled_as_a_whole_in_place_is_refused(inner: bool, how: str, device: torch.device) -> None:
    model = stack(device)
    model.compile(backend="eager")
    whole, named = (nn.Sequential(model), "a Stack") if inner else (model, "the model")
    with pytest.raises(forebay.OptionError, match=rf"{named} is compiled as a whole.*compile the layers instead"):
        OFFLOADS[how](whole)


@pytest.mark.parametrize("how", OFFLOADS)
def test_a_model_compiled_as_a_whole_afterwards_is_named(how: str, device: torch.device) -> None:
    torch._dynamo.reset()
    model, x = stack(device), data(device)
    expected = train(model, x)
    with OFFLOADS[how](model) as handle:
        model.compile(backend="aot_eager")
        with pytest.warns(UserWarning, match=r"compiled as a whole after offload_activations.*nothing is offloaded"):
            assert_same(expected, train(model, x))
        assert handle.stats()["stored_bytes"] == 0


def by_gradient(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    held = {name: parameter.detach() for name, parameter in model.named_parameters()}
    loss = torch.func.grad(lambda given: torch.func.functional_call(model, given, (x,)).square().mean())
    return list(loss(held).values())


def by_batches(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.func.vmap(lambda one: model(one[None])[0])(x)]


def forwards(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        return [forward_ad.unpack_dual(model(forward_ad.make_dual(x.clone(), torch.ones_like(x)))).tangent]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.parametrize("how", OFFLOADS)
@pytest.mark.parametrize("run", [by_gradient, by_batches, forwards], ids=lambda run: run.__name__)
def test_transforms_are_left_alone(run, how: str, device: torch.device) -> None:
    model, x = stack(device), data(device)
    expected, trained = run(model, x), train(model, x)
    with OFFLOADS[how](model) as handle:
        for _ in range(2):
            assert_same(expected, run(model, x))
        assert handle.stats()["stored_bytes"] == 0
        assert_same(trained, train(model, x))
        assert handle.stats()["stored_bytes"] > 0


def replica_of(module: nn.Module) -> nn.Module:
    """Return what DataParallel calls, with parameters that are all zero."""
    replica = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        replica._modules[name] = replica_of(child)
    for name, parameter in module._parameters.items():
        object.__setattr__(replica, name, torch.zeros_like(parameter))
    return replica


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("how", OFFLOADS)
def test_replicas_have_parameters_of_their_own(how: str, grad: bool, device: torch.device) -> None:
    model, x = stack(device), data(device)
    with OFFLOADS[how](model), torch.set_grad_enabled(grad):
        assert torch.equal(replica_of(model.layers[0])(x), x)
        assert not torch.equal(model.layers[0](x), x)


def test_layers_called_by_other_means(device: torch.device) -> None:
    """Whoever the caller is, and whatever it calls itself."""
    model, x = stack(device), data(device)
    expected = model.layers[0](x)
    with offloaded(model):
        caller = types.SimpleNamespace(call=model.layers[0]._compiled_call_impl)
        assert torch.equal(caller.call(x), expected)
        gradients(model)
