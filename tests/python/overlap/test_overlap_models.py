"""Overlapped steps of models as they are: of transformers, checkpointed, compiled, offloaded, scaled."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import forebay
from forebay.optim.overlap.pending import Pending
from support.models import tiny
from support.optim import TINY
from support.overlap import Run, adamw, batch, both, net
from support.sizes import combinations

if TYPE_CHECKING:
    from collections.abc import Callable

CLIPS = pytest.mark.parametrize("clip", [None, 0.05], ids=["plain", "clipped"])


@pytest.fixture(autouse=True)
def same_bits_each_time():
    """Have CUDA's kernels give the same bits each time."""
    if not torch.cuda.is_available():
        yield
        return
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def train_tokens(run: Run, steps: int, micro: int = 2) -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        for part in range(micro):
            tokens = torch.randint(3, 97, (2, 24), generator=generator).to(run.device)
            loss = run.model(input_ids=tokens, labels=tokens).loss
            with run.last() if part == micro - 1 else nullcontext():
                loss.backward()
            run.see(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()


@CLIPS
@pytest.mark.parametrize("how", ["plain", "checkpointed", "checkpointed, reentrant", "offloaded", "recomputed"])
@pytest.mark.parametrize("kind", ["qwen2", "llama, tied"])
def test_models_of_transformers(device: torch.device, kind: str, how: str, clip: float | None) -> None:
    def make(device: torch.device) -> Any:
        model = tiny(kind.partition(",")[0], device)
        if "tied" in kind:
            model.config.tie_word_embeddings = True
            model.lm_head.weight = model.model.embed_tokens.weight
        if "checkpointed" in how:
            model.gradient_checkpointing_enable({"use_reentrant": "reentrant" in how})
            model.enable_input_require_grads()
        elif how in ("offloaded", "recomputed"):
            forebay.offload_activations(model, min_bytes=1024, recompute=how == "recomputed")
        return model

    def body(run: Run) -> None:
        train_tokens(run, 4)
        run.model.eval()
        with torch.no_grad():
            tokens = torch.arange(3, 11, device=run.device)[None]
            run.see(run.model.generate(tokens, max_new_tokens=4, do_sample=False).float())
        run.model.train()
        train_tokens(run, 2)

    stats = both(body, device, model=make, late=True, max_grad_norm=clip, chunk_bytes=1 << 15)
    count = len(list(make(device).parameters()))
    assert stats["taken_in_backward"] == (count if clip is None else 0)
    assert stats["waited_in_step"] == 0


class Shared(torch.nn.Module):
    """One layer that is called several times, under checkpoints."""

    def __init__(self, device: torch.device, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.shared, self.own = (torch.nn.Linear(24, 24, device=device) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        x = self.first(x)
        for _ in range(3):
            x = checkpoint(self.part, x, use_reentrant=self.reentrant)
        return checkpoint(self.own, x, use_reentrant=self.reentrant)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """Return a part's output."""
        return self.shared(x).tanh() + x


@CLIPS
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("counted", [False, True], ids=["marked", "counted"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_a_shared_layer_under_checkpoints(
    device: torch.device, reentrant: bool, counted: bool, micro: int, clip: float | None
) -> None:
    def body(run: Run) -> None:
        if counted:
            run.last = nullcontext  # type: ignore[method-assign]
        run.train(4, micro)

    overlap = {"accumulation_steps": micro} if counted else {}
    for late in (False, True):
        stats = both(
            body,
            device,
            model=lambda device: Shared(device, reentrant),
            late=late,
            overlap=overlap,
            max_grad_norm=clip,
        )
        # The gradient of the shared layer is left to the step if its hook runs once for each part.
        assert stats["taken_in_backward"] == (0 if clip else 4 if reentrant else 6)


def test_a_shared_weight_used_without_its_module_is_exact_or_refused(device: torch.device) -> None:
    class Functional(Shared):
        def part(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.shared.weight, self.shared.bias).tanh()

    model = Functional(device, reentrant=True)
    optimizer = adamw(model)
    forebay.overlap_step(model, optimizer)
    loss = model(batch(1, model)).sum()
    with pytest.raises(forebay.OptionError, match=r"a backward adds to it|is read between"), optimizer.last_backward():
        loss.backward()


HOWS: dict[str, Callable[[Any], Any]] = {
    "layers in place": lambda model: [layer.compile(backend="aot_eager") for layer in model[::2]],
    "one of them": lambda model: model[2].compile(backend="aot_eager"),
    "layers": lambda model: [
        model.__setitem__(i, torch.compile(model[i], backend="aot_eager")) for i in range(0, len(model), 2)
    ],
    "all in place": lambda model: model.compile(backend="aot_eager"),
}


@CLIPS
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("when", ["before", "after", "between"])
@pytest.mark.parametrize("how", HOWS)
def test_compiled_layers(device: torch.device, how: str, when: str, clip: float | None) -> None:
    torch._dynamo.reset()

    def make(device: torch.device) -> torch.nn.Module:
        model = net(device)
        if when == "before":
            HOWS[how](model)
        return model

    def body(run: Run) -> None:
        if when == "after":
            HOWS[how](run.model)
        run.train(3)
        if when == "between":
            HOWS[how](run.model)
        run.train(range(3, 7))

    both(body, device, model=make, late=True, max_grad_norm=clip)
    torch._dynamo.reset()


@CLIPS
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("when", ["before", "after", "between"])
def test_a_model_compiled_as_a_whole(device: torch.device, when: str, clip: float | None) -> None:
    torch._dynamo.reset()

    def body(run: Run) -> None:
        model = run.model
        if when == "between":
            run.train(3)
        if when != "before":
            compiled = torch.compile(model, backend="aot_eager")
            run.loss = lambda number: compiled(batch(number, model)).square().mean()  # type: ignore[method-assign]
        run.train(range(3, 7))

    def make(device: torch.device) -> Any:
        model = net(device)
        return torch.compile(model, backend="aot_eager") if when == "before" else model

    stats = both(body, device, model=make, late=True, max_grad_norm=clip)
    # Hooks do not run in what was compiled afterwards, so the step waits itself.
    assert stats["waited_in_step"] == (0 if when == "before" else 6)
    torch._dynamo.reset()


@CLIPS
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(("offload_first", "compile_when"), combinations([True, False], ["first", "last"]))
def test_compiled_layers_with_offloaded_activations(
    device: torch.device, compile_when: str, offload_first: bool, clip: float | None
) -> None:
    from support.offload import data, stack

    torch._dynamo.reset()

    def body(run: Run) -> None:
        def offload() -> Any:
            return forebay.offload_activations(run.model, min_bytes=4096)

        def compile_layers() -> None:
            for layer in run.model.layers:
                layer.compile(backend="aot_eager")

        if run.overlaps:
            run.handle.remove()
        if compile_when == "first":
            compile_layers()
        handle = offload() if offload_first else None
        if run.overlaps:
            run.handle = forebay.overlap_step(run.model, run.optimizer)
        handle = handle or offload()
        if compile_when == "last":
            compile_layers()
        for step in range(5):
            loss = run.model(data(run.device, seed=step)).square().mean()
            with run.last():
                loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.see(loss)
        if run.overlaps:
            for name, parameter in run.model.named_parameters():
                assert isinstance(parameter, Pending), name
        handle.remove()
        if run.overlaps:
            run.handle.remove()
            run.handle = forebay.overlap_step(run.model, run.optimizer)

    both(body, device, model=lambda device: stack(device, 3), late=False, max_grad_norm=clip)
    torch._dynamo.reset()


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_a_grad_scaler_with_clipping(device: torch.device, fused: bool) -> None:
    def make(model: torch.nn.Module, **options: Any) -> Any:
        return forebay.AdamW(model.parameters(), lr=1e-2, chunk_bytes=TINY, fused=fused, **options)

    def body(run: Run) -> None:
        scaler = torch.amp.GradScaler(run.device.type, init_scale=2.0**120, growth_interval=2)
        for step in range(8):
            loss = run.loss(step)
            with run.last():
                scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(run.optimizer)
                torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
            run.see(loss, torch.tensor(scaler.get_scale()))

    both(body, device, optimizer=make, late=True, max_grad_norm=0.05)


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_a_grad_scaler_without_clipping_raises(device: torch.device, fused: bool) -> None:
    model = net(device)
    optimizer = forebay.AdamW(model.parameters(), chunk_bytes=TINY, fused=fused)
    forebay.overlap_step(model, optimizer)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
    loss = model(batch(1, model)).sum()
    with optimizer.last_backward():
        scaler.scale(loss).backward()
    with pytest.raises(forebay.OptionError, match="max_grad_norm"):
        scaler.step(optimizer)


@CLIPS
def test_autocast(device: torch.device, clip: float | None) -> None:
    def body(run: Run) -> None:
        for step in range(5):
            with torch.autocast(run.device.type, torch.bfloat16):
                loss = run.loss(step)
            with run.last():
                loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.see(loss)

    both(body, device, late=True, max_grad_norm=clip)


@CLIPS
def test_averaged_weights_along_the_way(device: torch.device, clip: float | None) -> None:
    def body(run: Run) -> None:
        average = torch.optim.swa_utils.AveragedModel(run.model)
        run.train(5, after=lambda: average.update_parameters(run.model))
        run.see(*average.module.parameters())

    both(body, device, late=True, max_grad_norm=clip)


@CLIPS
def test_hooks_of_the_optimizer(device: torch.device, clip: float | None) -> None:
    def body(run: Run) -> None:
        run.optimizer.register_step_post_hook(lambda *_: run.see(run.model[2].weight))  # type: ignore[index]
        run.train(4)

    both(body, device, late=True, max_grad_norm=clip)


@CLIPS
def test_a_weight_that_is_parametrized(device: torch.device, clip: float | None) -> None:
    def make(device: torch.device) -> torch.nn.Module:
        model = net(device)
        torch.nn.utils.parametrizations.weight_norm(model[2])
        return model

    both(lambda run: run.train(4), device, model=make, late=True, max_grad_norm=clip)


@CLIPS
def test_a_function_that_reads_the_weights_of_another_module(device: torch.device, clip: float | None) -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.attention = torch.nn.MultiheadAttention(24, 4, batch_first=True)
            self.encoder = torch.nn.TransformerEncoderLayer(24, 4, 32, 0.0, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.encoder(self.attention(x[None], x[None], x[None])[0])

    def body(run: Run) -> None:
        run.train(4)
        run.model.eval()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.see(run.model(batch(1, run.model)))

    both(body, device, model=lambda device: Attention().to(device), late=True, max_grad_norm=clip)
