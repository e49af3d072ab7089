"""Offload goes on working whatever is done with gradient checkpointing: as trainers do it, and in any other order."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import forebay
from forebay.activations.budget.controller import MEASURING
from support.budget import budgeted, by_chance, recomputed
from support.models import forwards_of, tiny
from support.offload import assert_nothing_left, offloaded
from support.sizes import combinations
from support.tensors import assert_same

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    # torch's own, about a reentrant checkpoint without gradients, as in generation.
    "ignore:None of the inputs have requires_grad",
)
LARGE = 1 << 29
INPUT_BYTES = 2 * 96 * 64 * 4
"""What the input of a layer takes."""


class Run:
    """A model in training, and the switch as a framework uses it."""

    def __init__(self, model: Any, device: torch.device, *, reentrant: bool, called: Any = None) -> None:
        self.model, self.device, self.kwargs = model, device, {"use_reentrant": reentrant}
        # What is called, if it is a wrapper around the model.
        self.called = model if called is None else called
        self.handle: Any = None
        self.stored: list[float] = []
        self.results: list[torch.Tensor] = []

    def tokens(self, length: int) -> torch.Tensor:
        """Return words, the same each time."""
        return torch.randint(3, 97, (2, length), generator=torch.Generator().manual_seed(5)).to(self.device)

    def on(self) -> None:
        """Switch on, as Trainer does."""
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=self.kwargs)

    def off(self) -> None:
        """Switch off."""
        self.model.gradient_checkpointing_disable()

    @contextlib.contextmanager
    def switched_off(self) -> Iterator[None]:
        """Switch off and on again, as TRL does around generation and reference passes."""
        was_on = self.model.is_gradient_checkpointing
        if was_on:
            self.off()
        yield
        if was_on:
            self.on()

    def generate(self) -> None:
        """Generate as TRL does."""
        with self.switched_off():
            self.results.append(self.model.generate(self.tokens(12), max_new_tokens=4, do_sample=False))

    def generate_as_it_is(self) -> None:
        """Generate without switching."""
        self.results.append(self.model.generate(self.tokens(12), max_new_tokens=4, do_sample=False, use_cache=False))

    def reference(self) -> None:
        """Run a reference pass as TRL does."""
        with torch.no_grad(), self.switched_off():
            self.results.append(self.called(input_ids=self.tokens(96)).logits)

    def evaluate(self) -> None:
        """Evaluate as Trainer does."""
        self.called.eval()
        with torch.no_grad():
            self.results.append(self.called(input_ids=self.tokens(96)).logits)
        self.called.train()

    def step(self, between: Callable[[], None] | None = None) -> None:
        """Train, and note what that stored."""
        before = self.handle.stats()["stored_bytes"] if self.handle is not None else 0
        self.called.zero_grad(set_to_none=True)
        torch.manual_seed(9)
        loss = self.called(input_ids=self.tokens(96), labels=self.tokens(96)).loss
        if between is not None:
            between()
        loss.backward()
        grads = [parameter.grad for parameter in self.called.parameters() if parameter.grad is not None]
        assert grads
        self.results += [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
        if self.handle is not None:
            self.stored.append(self.handle.stats()["stored_bytes"] - before)

    def step_off_before_backward(self) -> None:
        """Train, switched off between the two halves of the pass."""
        self.step(self.off)

    def step_on_before_backward(self) -> None:
        """Train, switched on between the two halves of the pass."""
        self.step(self.on)


ORDERS = {
    "off and on": "on offload step off on step step",
    "off, on, off": "on offload step off step on step off step",
    "on later": "offload step on step step",
    "on at once": "offload on step step",
    "on twice": "on offload on step on step",
    "off later": "on offload step off step step",
    "off at once": "on offload off step",
    "off twice": "offload off step off step",
    "SFT": "offload on step step evaluate step",
    "DPO": "on offload reference step reference step evaluate step",
    "GRPO": "on offload generate reference step generate reference step step",
    "GRPO, offload first": "offload on generate reference step generate reference step",
    "generation while it is on": "on offload step generate_as_it_is step off generate_as_it_is step",
    "off before backward": "on offload step_off_before_backward step on step",
    "on before backward": "offload step_on_before_backward step off step",
}


def play(order: str, run: Run, offload: Callable[[], Any] | None) -> Run:
    """Do what an order says, without offload if there is none."""
    for word in order.split():
        if word != "offload":
            getattr(run, word)()
        elif offload is not None:
            run.handle = offload()
    return run


def compare(
    order: str, make: Callable[[], Run], offload: Callable[[Any], Any], *, each: bool = True, remove: bool = True
) -> Run:
    """Assert that an order gives the same bits with offload as without, and that each of its passes stores bytes."""
    expected = play(order, make(), None)
    run = make()
    play(order, run, lambda: offload(run.called))
    assert_same(expected.results, run.results)
    if each:
        assert all(run.stored), run.stored
    assert sum(run.stored) > 0
    assert run.handle.stats()["fetched_bytes"] > 0
    assert_nothing_left(run.handle)
    if remove:
        run.handle.remove()
    return run


def make_tiny(device: torch.device, reentrant: bool, kind: str = "llama") -> Run:
    return Run(tiny(kind, device), device, reentrant=reentrant)


@pytest.mark.parametrize(("order", "reentrant", "recompute"), combinations(ORDERS, [False, True], [False, True]))
def test_every_order_of_switching(order: str, reentrant: bool, recompute: bool, device: torch.device) -> None:
    compare(ORDERS[order], lambda: make_tiny(device, reentrant), lambda model: offloaded(model, recompute=recompute))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_same_bytes_are_stored_after_the_switch(kind: str, reentrant: bool, device: torch.device) -> None:
    run = compare(
        "on offload step off step on step generate step",
        lambda: make_tiny(device, reentrant, kind),
        lambda model: offloaded(model),
    )
    first, without, again, last = run.stored
    assert first == again == last >= 4 * INPUT_BYTES
    assert without > 4 * first, "all that layers save"


def test_the_default_options_store_too(device: torch.device) -> None:
    compare(
        ORDERS["GRPO"],
        lambda: make_tiny(device, False),
        lambda model: forebay.offload_activations(model, min_bytes=4096),
        each=False,
    )


def test_layers_are_recomputed_once_however_it_is_switched(device: torch.device) -> None:
    run = make_tiny(device, False)
    calls = forwards_of(run.model)
    with offloaded(run.model, recompute=True):
        for switch in (run.off, run.on, run.on, run.off):
            switch()
            calls.clear()
            run.step()
            assert len(calls) == 8


def test_every_second_layer(device: torch.device) -> None:
    class EverySecond(Run):
        def on(self) -> None:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=self.kwargs, every_n_layers=2)

    def make() -> Run:
        return EverySecond(tiny("llama", device), device, reentrant=False)

    run = compare("on offload step off on step", make, lambda model: offloaded(model))
    assert run.stored[0] == run.stored[1]
    compare("on offload step step step off on step", make, lambda model: budgeted(model, LARGE), each=False)


# Under a budget the plan decides, whether it is on or off.


def drawn(model: nn.Module, seed: int, **options: Any) -> Any:
    handle = budgeted(model, LARGE, min_bytes=256, **options)
    by_chance(handle, seed)
    return handle


@pytest.mark.parametrize(("order", "reentrant", "recompute"), combinations(ORDERS, [False, True], [False, "auto"]))
def test_every_order_under_a_budget(order: str, reentrant: bool, recompute: bool | str, device: torch.device) -> None:
    # Once as long as it only measures, once when plans are in force before the switch.
    later = ORDERS[order].replace("offload", "offload step step step", 1)
    for seed, words in enumerate((ORDERS[order], f"{later} step step")):
        compare(
            words,
            lambda: make_tiny(device, reentrant),
            lambda model, seed=seed: drawn(model, seed, recompute=recompute),
            each=False,
        )


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_plan_stays_valid_when_it_is_switched(reentrant: bool, device: torch.device) -> None:
    run = make_tiny(device, reentrant)
    calls = forwards_of(run.model)
    with recomputed(run.model, "budget") as run.handle:
        play("step on step off step on step", run, None)
        assert len(run.results) > MEASURING
        (workload,) = run.handle._budget.workloads.values()
        assert len({family for family, _ in workload.builds}) == 1, "layers are alike, on or off"
        for switch in (run.on, run.off, run.on):
            switch()
            calls.clear()
            run.step()
            assert run.stored[-1] > 0
            assert len(calls) == 8, "by the plan, and not once more by the model"
        assert len(run.handle._budget.workloads) == 1


def test_a_budget_decides_instead_of_checkpointing(device: torch.device) -> None:
    run = make_tiny(device, False)
    run.on()
    calls = forwards_of(run.model)
    with budgeted(run.model, LARGE) as run.handle:
        for _ in range(MEASURING + 1):
            calls.clear()
            run.step()
        assert len(calls) == 4, "there is room for all, so nothing is recomputed"
    calls.clear()
    run.handle = None
    run.step()
    assert len(calls) == 8, "without the budget the model recomputes again"


def test_a_reentrant_checkpoint_gives_no_gradients_to_a_layer_without_any_before_it(device: torch.device) -> None:
    """As torch does it."""

    class Frozen(Run):
        def on(self) -> None:
            super().on()
            self.model.disable_input_require_grads()
            self.model.get_input_embeddings().requires_grad_(False)

    def make() -> Run:
        return Frozen(tiny("llama", device), device, reentrant=True)

    expected, run = make(), make()
    with budgeted(run.model, LARGE) as run.handle:
        for one in (expected, run):
            play("on step step step", one, None)
        assert_same(expected.results, run.results)
    layers = run.model.model.layers
    assert all(parameter.grad is None for parameter in layers.parameters())
    assert run.model.lm_head.weight.grad is not None


# Wrappers.


def lora(model: Any) -> Any:
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


HANDLES = {
    "offload": lambda model: offloaded(model),
    "recompute": lambda model: offloaded(model, recompute=True),
    "budget": lambda model: drawn(model, 3),
}
WRAPPED = ["off, on, off", "on later", "GRPO"]


@pytest.mark.parametrize("how", HANDLES)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("order", WRAPPED)
def test_adapters(order: str, reentrant: bool, how: str, device: torch.device) -> None:
    compare(
        ORDERS[order],
        lambda: Run(lora(tiny("qwen2", device)), device, reentrant=reentrant),
        HANDLES[how],
        each=how != "budget",
    )


@pytest.mark.parametrize("how", HANDLES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_adapters_that_are_added_later(how: str, reentrant: bool, device: torch.device) -> None:
    expected = Run(lora(tiny("qwen2", device)), device, reentrant=reentrant)
    model = tiny("qwen2", device)
    handle = HANDLES[how](model)
    run = Run(lora(model), device, reentrant=reentrant)
    run.handle = handle
    for one in (expected, run):
        play("on step generate step off on step", one, None)
    assert_same(expected.results, run.results)
    if how == "budget":
        assert any(run.stored)
    else:
        assert all(one >= 4 * INPUT_BYTES for one in run.stored), "the first layer's inputs too"
    assert_nothing_left(handle)


@pytest.fixture
def group() -> Iterator[None]:
    """Make a group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


CPU = torch.device("cpu")


@pytest.mark.parametrize("how", HANDLES)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("order", WRAPPED)
def test_data_parallel(order: str, reentrant: bool, how: str, group: None) -> None:
    def make() -> Run:
        model = tiny("llama", CPU)
        return Run(model, CPU, reentrant=reentrant, called=DistributedDataParallel(model))

    compare(ORDERS[order], make, HANDLES[how], each=how != "budget")


@pytest.mark.filterwarnings("ignore")  # FSDP's own
@pytest.mark.parametrize("how", HANDLES)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("order", WRAPPED)
def test_fully_sharded(order: str, reentrant: bool, how: str, group: None) -> None:
    def make() -> Run:
        model = tiny("llama", CPU)
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return Run(fully_shard(model, mesh=mesh), CPU, reentrant=reentrant)

    compare(ORDERS[order], make, HANDLES[how], each=how != "budget")


@pytest.fixture
def accelerator(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield accelerate.Accelerator(cpu=True, mixed_precision=request.param)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("how", HANDLES)
@pytest.mark.parametrize("accelerator", ["no", "bf16"], indirect=True)
@pytest.mark.parametrize("before", [False, True])
def test_models_that_accelerate_has_prepared(how: str, before: bool, accelerator: Any) -> None:
    expected = Run(tiny("llama", CPU), CPU, reentrant=False)
    expected.called = accelerator.prepare(expected.model)
    model = tiny("llama", CPU)
    handle = HANDLES[how](model) if before else None
    prepared = accelerator.prepare(model)
    run = Run(accelerator.unwrap_model(prepared), CPU, reentrant=False, called=prepared)
    run.handle = handle if handle is not None else HANDLES[how](prepared)
    for one in (expected, run):
        play(ORDERS["GRPO"].replace("offload", ""), one, None)
    assert_same(expected.results, run.results)
    assert all(run.stored) if how != "budget" else any(run.stored)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("how", HANDLES)
@pytest.mark.parametrize("place", ["in place", "wrapped"])
@pytest.mark.parametrize("before", [False, True])
def test_compiled_layers(before: bool, place: str, how: str, device: torch.device) -> None:
    def compiled(model: Any) -> None:
        layers = model.model.layers
        for i, layer in enumerate(layers):
            if place == "in place":
                layer.compile(backend="aot_eager")
            else:
                layers[i] = torch.compile(layer, backend="aot_eager", fullgraph=True)

    def make() -> Run:
        model = tiny("llama", device)
        model.config.use_cache = False
        return Run(model, device, reentrant=False)

    torch._dynamo.reset()
    expected, run = make(), make()
    if not before:
        compiled(expected.model)
        compiled(run.model)
    run.handle = HANDLES[how](run.model)
    if before:
        compiled(expected.model)
        compiled(run.model)
    for one in (expected, run):
        play("step on step off step on step", one, None)
    assert_same(expected.results, run.results)
    if place == "wrapped" and before:
        # What is called then is another module, inside of which the layer is traced with its checkpoint.
        return
    assert all(run.stored) if how != "budget" else any(run.stored)


class Holder(nn.Module):
    """A model that has another one inside."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **kwargs: Any) -> Any:
        """Call the inner model past its hooks."""
        return self.inner.forward(**kwargs)


@pytest.mark.parametrize("how", HANDLES)
@pytest.mark.parametrize("order", WRAPPED)
def test_a_model_inside_another(order: str, how: str, device: torch.device) -> None:
    def make() -> Run:
        model = tiny("llama", device)
        return Run(model, device, reentrant=False, called=Holder(model))

    compare(ORDERS[order], make, HANDLES[how], each=how != "budget")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_whose_hooks_are_skipped(reentrant: bool, device: torch.device) -> None:
    """The hooks of the modules between it and the layers follow the switch."""
    expected, run = make_tiny(device, reentrant), make_tiny(device, reentrant)
    run.handle = offloaded(run.model)
    for one in (expected, run):
        one.called = Holder(one.model)
        play("on step off on step reference step", one, None)
    assert_same(expected.results, run.results)
    assert all(one >= 4 * INPUT_BYTES for one in run.stored), "the first layer's inputs too"


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_no_module_calls(reentrant: bool, device: torch.device) -> None:
    """Without any call of a module around the layers, the first of them finds out that it was switched."""

    def run(model: Any) -> list[torch.Tensor]:
        x = torch.randn(2, 96, 64, generator=torch.Generator().manual_seed(3)).to(device).requires_grad_()
        h, places = x, model.model.rotary_emb(x, torch.arange(96, device=device)[None])
        for layer in model.model.layers:
            h = layer(h, position_embeddings=places)
        h.square().mean().backward()
        assert x.grad is not None
        found = [x.grad, *(parameter.grad for parameter in model.model.layers.parameters())]
        model.zero_grad(set_to_none=True)
        return found

    model = tiny("llama", device)
    kwargs = {"use_reentrant": reentrant}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    expected = run(model)
    with offloaded(model) as handle:
        for _ in range(2):
            before = handle.stats()["stored_bytes"]
            assert_same(expected, run(model))
            whole = handle.stats()["stored_bytes"] - before
            model.gradient_checkpointing_disable()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
            before = handle.stats()["stored_bytes"]
            assert_same(expected, run(model))
            assert 0 < handle.stats()["stored_bytes"] - before < whole, "all but the first"
            before = handle.stats()["stored_bytes"]
            assert_same(expected, run(model))
            assert handle.stats()["stored_bytes"] - before == whole


class Pair(nn.Module):
    """A layer made of two layers, which have their own checkpointing."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Call both."""
        for part in self.parts:
            x = part(x, **kwargs)
        return x


@pytest.mark.parametrize("how", HANDLES)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("order", WRAPPED)
def test_checkpointing_inside_of_layers(order: str, reentrant: bool, how: str, device: torch.device) -> None:
    def make() -> Run:
        model = tiny("llama", device)
        layers = model.model.layers
        model.model.layers = nn.ModuleList([Pair(layers[0], layers[1]), Pair(layers[2], layers[3])])
        model.config.num_hidden_layers = 2
        model.config.use_cache = False
        return Run(model, device, reentrant=reentrant)

    words = ORDERS[order].replace("generate", "generate_as_it_is")
    for later in (words, words.replace("offload", "offload step step step", 1)):
        compare(later, make, HANDLES[how], each=how != "budget")


def test_checkpointing_inside_of_layers_is_measured_again(device: torch.device) -> None:
    run = make_tiny(device, False)
    layers = run.model.model.layers
    run.model.model.layers = nn.ModuleList([Pair(layers[0], layers[1]), Pair(layers[2], layers[3])])
    run.model.config.num_hidden_layers = 2
    run.model.config.use_cache = False
    with budgeted(run.model, LARGE) as run.handle:
        play("step step step on step step off step on step", run, None)
        off, on = run.handle._budget.workloads.values()
        assert off.cost is not None is not on.cost
        assert off.cost.layers[0].saved_bytes > 2 * on.cost.layers[0].saved_bytes


class OldModel(nn.Module):
    """Has the function itself and calls it for its layers, as models of older releases do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))
        self.gradient_checkpointing = False

    def switch(self, to: bool) -> None:
        """Store a new function, as each switch does."""
        self.gradient_checkpointing = to
        self._gradient_checkpointing_func = lambda *args: checkpoint(*args, use_reentrant=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call all layers."""
        for layer in self.layers:
            x = self._gradient_checkpointing_func(layer.__call__, x) if self.gradient_checkpointing else layer(x)
        return x


@pytest.mark.parametrize("how", HANDLES)
def test_models_that_call_the_checkpoint_for_their_layers(how: str, device: torch.device) -> None:
    x = torch.randn(96, 64, generator=torch.Generator().manual_seed(3)).to(device)

    def run(model: OldModel) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        model(x.clone().requires_grad_()).square().mean().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    model = OldModel().to(device)
    expected = run(model)
    with HANDLES[how](model) as handle:
        for to in (True, False, True, True):
            model.switch(to)
            before = handle.stats()["stored_bytes"]
            assert_same(expected, run(model))
            assert handle.stats()["stored_bytes"] > before or how == "budget"
        assert handle.stats()["fetched_bytes"] > 0


# Removal, copies and several offloads.


def attributes(model: nn.Module) -> list[dict[str, Any]]:
    """Return the names of all attributes of each module, with the number of hooks."""
    return [
        {name: len(value) if "_hooks" in name else None for name, value in module.__dict__.items()}
        for module in model.modules()
    ]


def functions(model: nn.Module) -> set[str]:
    found = (module.__dict__.get("_gradient_checkpointing_func") for module in model.modules())
    return {type(one).__name__ for one in found if one is not None}


@pytest.mark.parametrize("how", HANDLES)
@pytest.mark.parametrize("last", ["on", "off"])
def test_removal_after_switching(how: str, last: str, device: torch.device) -> None:
    expected, run = make_tiny(device, False), make_tiny(device, False)
    for one in (expected, run):
        play(f"on offload step off on step {last} step", one, (lambda: HANDLES[how](run.model)) if one is run else None)
    run.handle.remove()
    assert attributes(run.model) == attributes(expected.model)
    assert functions(run.model) <= {"partial", "function"}
    stored, handle, run.handle = run.handle.stats()["stored_bytes"], run.handle, None
    for one in (expected, run):
        play("step off on step off step", one, None)
    assert_same(expected.results, run.results)
    assert handle.stats()["stored_bytes"] == stored > 0
    with HANDLES[how](run.model) as run.handle:
        run.stored = []
        play("step on step", run, None)
        assert any(run.stored)


def test_a_function_that_was_kept_elsewhere_does_nothing_after_removal(device: torch.device) -> None:
    run = make_tiny(device, False)
    play("on offload step", run, lambda: offloaded(run.model))
    layer = run.model.model.layers[1]
    kept = layer._gradient_checkpointing_func
    run.handle.remove()
    layer._gradient_checkpointing_func = kept
    before, first, run.results = run.handle.stats()["stored_bytes"], run.results, []
    run.step()
    assert run.stored == [before, 0]
    assert_same(first, run.results)


def test_removal_before_backward(device: torch.device) -> None:
    expected, run = make_tiny(device, False), make_tiny(device, False)
    play("on step off step", expected, None)
    run.on()
    handle = offloaded(run.model)
    run.step(handle.remove)
    play("off step", run, None)
    assert_same(expected.results, run.results)


def test_two_offloads_of_one_model(device: torch.device) -> None:
    """Each follows the switch for its own layers, and removing one leaves the other."""
    expected, run = make_tiny(device, False), make_tiny(device, False)
    play("on step off on step off on step", expected, None)
    run.on()
    layers = list(run.model.model.layers)
    first, second = offloaded(run.model, layers=layers[:2]), offloaded(run.model, layers=layers[2:])

    def stored() -> tuple[float, float]:
        return first.stats()["stored_bytes"], second.stats()["stored_bytes"]

    run.step()
    before = stored()
    assert all(before)
    play("off on step", run, None)
    assert stored() == tuple(2 * one for one in before)
    first.remove()
    play("off on step", run, None)
    assert stored() == (2 * before[0], 3 * before[1])
    second.remove()
    assert functions(run.model) == {"partial"}
    assert_same(expected.results, run.results)
    with pytest.raises(forebay.OptionError, match="is offloaded already"), offloaded(run.model):
        offloaded(run.model)


def test_copies_are_as_without_offload(device: torch.device) -> None:
    run = make_tiny(device, False)
    play("on offload step off on step", run, lambda: offloaded(run.model))
    twin = Run(copy.deepcopy(run.model), device, reentrant=False)
    stored = run.handle.stats()["stored_bytes"]
    play("step off on step", twin, None)
    assert_same(run.results, twin.results)
    assert run.handle.stats()["stored_bytes"] == stored
    assert functions(twin.model) == {"partial"}
    run.handle.remove()


def test_a_checkpoint_that_is_not_the_models_is_still_named(device: torch.device) -> None:
    model = tiny("llama", device)
    model.gradient_checkpointing_enable()
    model.gradient_checkpointing_disable()
    whole = model.model.forward

    def inside(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(whole, *args, use_reentrant=False, **kwargs)

    model.model.forward = inside
    run = Run(model, device, reentrant=False)
    with offloaded(model) as handle:
        with pytest.warns(UserWarning, match=r"inside a checkpoint .* not control.*after that checkpoint was put"):
            run.step()
        assert handle.stats()["stored_bytes"] == 0
