"""The rows of ``bench/compare.py``: what one process measures with one build of forebay.

``python bench/compare_rows.py FOLDER NAME SPEC`` does one job with forebay from a folder and the options in SPEC, which
is JSON, and prints its result as JSON. Only ``AdamW``, ``offload_activations`` and ``Sleeper`` are used, so that builds
of different internals can be compared.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

GIB, MIB = 1 << 30, 1 << 20
# vocabulary, hidden, key and value, feed-forward, layers
MODELS = {
    "qwen2.5-3b": (151_936, 2048, 256, 11_008, 36),
    "qwen2.5-1.5b": (151_936, 1536, 256, 8960, 28),
    "qwen2.5-0.5b": (151_936, 896, 128, 4864, 24),
    "tiny": (3000, 128, 16, 688, 2),
}
HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


@dataclass
class Found:
    """What one process measured: values by metric, and a sum over the bits of its results."""

    seconds: dict[str, list[float]]
    peak_bytes: dict[str, list[float]]
    bits: int | None
    # What the optimizer says about its last step: the host's share and the times of both sides, for example.
    stats: dict[str, float] | None = None


def finish(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def layer(hidden: int, kv: int, ffn: int) -> list[tuple[int, ...]]:
    """Return the shapes of one layer of Qwen2.5."""
    attention = [(hidden, hidden), (hidden,), (kv, hidden), (kv,), (kv, hidden), (kv,), (hidden, hidden)]
    return [*attention, (ffn, hidden), (ffn, hidden), (hidden, ffn), (hidden,), (hidden,)]


def shapes(spec: dict[str, Any]) -> list[tuple[int, ...]]:
    """Return the shapes of a model, or of as many layers as a number of parameters allows."""
    if spec["params"] is None:
        vocabulary, hidden, kv, ffn, layers = MODELS[spec["model"]]
        return [(vocabulary, hidden), *layer(hidden, kv, ffn) * layers, (hidden,)]
    one = layer(512, 64, 2048)
    count, left = divmod(spec["params"], sum(rows * (columns or [1])[0] for rows, *columns in one))
    return one * count + [(left,)] * bool(left)


def parameters(sizes: list[tuple[int, ...]], dtype: str, device: str) -> list[Any]:
    """Return random parameters with random gradients."""
    torch.manual_seed(0)
    made = []
    for size in sizes:
        parameter = torch.nn.Parameter(torch.empty(size, dtype=getattr(torch, dtype), device=device).normal_())
        parameter.grad = torch.empty_like(parameter).normal_()
        made.append(parameter)
    return made


def bits_of(tensors: list[Any]) -> int:
    """Return a sum over the bits of tensors. It needs no second copy of them."""
    views = {4: torch.int32, 2: torch.int16}
    total = 0
    for number, tensor in enumerate(tensors):
        values = tensor.detach().view(views[tensor.element_size()])
        total += (2 * number + 1) * int(values.sum(dtype=torch.int64))
    return total


def optimizer_steps(sizes: list[tuple[int, ...]], dtype: str, spec: dict[str, Any], **options: Any) -> Found:
    """Time whole steps, set-up, and the host's work: the time of the call without its waits for slots."""
    import forebay

    device = spec["device"]
    made = parameters(sizes, dtype, device)
    optimizer = forebay.AdamW(made, **HYPER, **options)
    finish(device)
    start = time.perf_counter()
    optimizer.prepare()
    finish(device)
    set_up_s = time.perf_counter() - start
    # An automatic share of the host needs six steps to settle.
    warmup = 7 if options.get("placement") == "hybrid" else 2
    step_s, host_s = [], []
    for number in range(warmup + spec["steps"]):
        finish(device)
        start = time.perf_counter()
        optimizer.step()
        called_s = time.perf_counter() - start
        finish(device)
        optimizer.synchronize()
        if number >= warmup:
            step_s.append(time.perf_counter() - start)
            host_s.append(called_s - optimizer.stats()["stall_s"])
    bits, stats = bits_of(made), optimizer.stats()
    optimizer.close()
    streams = options.get("placement", "stream") == "stream"
    seconds = {"step": step_s, "set-up": [set_up_s]} | ({"host work": host_s} if streams else {})
    return Found(seconds, {}, bits, stats)


def stream(dtype: str) -> Callable[[dict[str, Any]], Found]:
    """Return a row of the streamed step."""
    return lambda spec: optimizer_steps(shapes(spec), dtype, spec)


def hybrid(dtype: str) -> Callable[[dict[str, Any]], Found]:
    """Return a row of the step that the GPU and the host share."""
    return lambda spec: optimizer_steps(shapes(spec), dtype, spec, placement="hybrid")


def host_work(spec: dict[str, Any]) -> Found:
    """Time the streamed step over many small tensors."""
    sizes: list[tuple[int, ...]] = [(25, 40)] * 500 if spec["small"] else [(250, 400)] * 10_000
    return optimizer_steps(sizes, "float32", spec | {"steps": max(7, spec["steps"])})


def decoder(spec: dict[str, Any]) -> tuple[Any, Any]:
    """Return layers of a language model's shape, and an input."""
    hidden, ffn, heads, layers, size = (128, 512, 4, 4, (2, 128)) if spec["small"] else (3584, 18_944, 28, 6, (4, 4096))

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(hidden))

        def forward(self, x: Any) -> Any:
            wide = x.float()
            scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            return self.weight * scaled.to(x.dtype)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before_attention, self.before_ffn = Norm(), Norm()
            self.qkv, self.merge = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden, bias=False)
            self.gate, self.up = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
            self.down = nn.Linear(ffn, hidden, bias=False)

        def forward(self, x: Any) -> Any:
            q, k, v = self.qkv(self.before_attention(x)).view(*size, 3, heads, -1).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.merge(mixed.transpose(1, 2).reshape(*size, hidden))
            y = self.before_ffn(x)
            return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(layers))
            self.norm = Norm()

        def forward(self, x: Any) -> Any:
            for one in self.layers:
                x = one(x)
            return self.norm(x)

    torch.manual_seed(0)
    with torch.device(spec["device"]):
        model = Decoder().to(torch.bfloat16)
        return model, torch.randn(*size, hidden).to(torch.bfloat16)


def activations(gib: float) -> Callable[[dict[str, Any]], Found]:
    """Return a row of forward and backward within a budget of activation memory."""

    def run(spec: dict[str, Any]) -> Found:
        import forebay

        device = spec["device"]
        model, tokens = decoder(spec)
        least = {"min_bytes": 1 << 10} if spec["small"] else {}
        # Budgets of the small model are small in proportion.
        budget = int(gib * (MIB if spec["small"] else GIB))
        handle = forebay.offload_activations(model, budget_bytes=budget, **least)
        pass_s, peak, warmup = [], [], 8
        for number in range(warmup + spec["steps"]):
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
            finish(device)
            if number >= warmup and device != "cpu":
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
            start = time.perf_counter()
            model(tokens).sum().backward()
            finish(device)
            if number >= warmup:
                pass_s.append(time.perf_counter() - start)
                if device != "cpu":
                    peak.append(float(torch.cuda.max_memory_allocated(device) - before))
        handle.remove()
        # The GPU's attention adds in no fixed order, so its gradients are not compared.
        bits = bits_of([parameter.grad for parameter in model.parameters()]) if device == "cpu" else None
        return Found({"pass": pass_s}, {"peak": peak} if peak else {}, bits)

    return run


def sleep(spec: dict[str, Any]) -> Found:
    """Time sleep and wake; the first time, which pins, is a figure of its own."""
    import forebay

    device, count = spec["device"], 400
    elements = (16 * MIB if spec["small"] else 8_000_000_000) // 4 // count
    torch.manual_seed(0)
    tensors = [torch.nn.Parameter(torch.empty(elements, device=device).uniform_()) for _ in range(count)]
    before = bits_of(tensors)
    sleeper = forebay.Sleeper(torch.nn.ParameterList(tensors))
    sleep_s, wake_s = [], []
    for _ in range(1 + spec["steps"]):
        finish(device)
        start = time.perf_counter()
        sleeper.sleep(give_back=False)
        finish(device)
        gone = time.perf_counter()
        sleeper.wake()
        finish(device)
        sleep_s.append(gone - start)
        wake_s.append(time.perf_counter() - gone)
    bits = bits_of(tensors)
    if bits != before:
        raise AssertionError("tensors changed while they slept")
    sleeper.release()
    return Found({"sleep": sleep_s[1:], "wake": wake_s[1:], "first sleep": sleep_s[:1]}, {}, bits)


ROWS: dict[str, Callable[[dict[str, Any]], Found]] = {
    "stream-f32": stream("float32"),
    "stream-bf16": stream("bfloat16"),
    "host-work": host_work,
    "hybrid-f32": hybrid("float32"),
    "hybrid-bf16": hybrid("bfloat16"),
    "activations-5gib": activations(5),
    "activations-10gib": activations(10),
    "sleep": sleep,
}


def machine(device: str | None) -> dict[str, Any]:
    """Describe this machine and choose the device."""
    device = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    gpu = device if device != "cpu" else None
    return {
        "device": device,
        "gpu": torch.cuda.get_device_name(gpu) if gpu else None,
        "gpu_free_bytes": torch.cuda.mem_get_info(gpu)[0] if gpu else None,
        "cpus": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def do(folder: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Do one job in this process, with forebay from a folder."""
    if name == "machine":
        return machine(spec["device"])
    import forebay

    if not Path(forebay.__file__).resolve().is_relative_to(Path(folder).resolve()):
        raise AssertionError(f"imported {forebay.__file__}, not what is in {folder}")
    return asdict(ROWS[name](spec))


if __name__ == "__main__":
    print(json.dumps(do(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))))
