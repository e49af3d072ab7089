"""The rows of ``bench/step.py``: workloads, systems, and how one of them is measured.

``python bench/rows.py NAME SPEC`` does one job with the options in SPEC, which is JSON, and prints its result as JSON.
``step.py`` calls this; it is not meant to be called by hand.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

GIB = 1 << 30
HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
# One peer's layers of 36 are enough to time pinning: 7 layers have 4 GiB of moments.
PINNED_LAYERS = 7


COUNTED = -1.0
"""Stands for the bytes each way that the optimizer counts."""


class CannotRunError(Exception):
    """A row cannot run here; the text says why."""


# Workloads.


def layer(hidden: int, kv: int, ffn: int) -> list[tuple[int, ...]]:
    """Shapes of one layer of Qwen2.5."""
    attention = [(hidden, hidden), (hidden,), (kv, hidden), (kv,), (kv, hidden), (kv,), (hidden, hidden)]
    return [*attention, (ffn, hidden), (ffn, hidden), (hidden, ffn), (hidden,), (hidden,)]


def shapes(workload: str, quick: bool) -> list[tuple[int, ...]]:
    """Shapes of a workload; a quick one has the same proportions and runs on a CPU in no time."""
    if workload == "small":
        return [(25, 40)] * 500 if quick else [(250, 400)] * 10_000
    vocabulary, hidden, kv, ffn, layers = (3000, 128, 16, 688, 2) if quick else (151_936, 2048, 256, 11_008, 36)
    return [(vocabulary, hidden), *layer(hidden, kv, ffn) * layers, (hidden,)]


def parameters(sizes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[torch.nn.Parameter]:
    """Make random parameters with random gradients: zeros can be faster than real numbers are."""
    torch.manual_seed(0)
    made = []
    for size in sizes:
        parameter = torch.nn.Parameter(torch.empty(size, dtype=dtype, device=device).normal_())
        parameter.grad = torch.empty_like(parameter).normal_()
        made.append(parameter)
    return made


# Systems: what is set up, stepped and waited for.


class TorchResident:
    """torch's own AdamW with everything on the device."""

    def __init__(self, params: list[torch.nn.Parameter], **kind: bool) -> None:
        self.params = params
        self.optimizer: Any = torch.optim.AdamW(params, **HYPER, **kind)

    def set_up(self) -> int:
        """Make the state; return the bytes of it that were pinned."""
        return 0

    def step(self) -> None:
        """Step, and return as soon as the system does."""
        self.optimizer.step()

    def settle(self) -> None:
        """Wait for what runs outside torch's current stream."""

    def numbers(self) -> dict[str, Any]:
        """Return the system's own statistics of its last step."""
        return {}

    def close(self) -> None:
        """Give everything back."""


class LoadAll(TorchResident):
    """Moments in pinned memory, all of them moved in, stepped with torch's fused AdamW and moved out again."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        super().__init__(params, fused=True)
        self.host: list[tuple[torch.Tensor, torch.Tensor]] = []

    def set_up(self) -> int:
        """Pin two moments for each parameter, each by itself."""
        pinned = self.params[0].device.type == "cuda"
        for p in self.params:
            first, second = (torch.zeros(p.shape, dtype=torch.float32, pin_memory=pinned) for _ in range(2))
            self.host.append((first, second))
            self.optimizer.state[p] = {"step": torch.zeros((), dtype=torch.float32, device=p.device)}
        return sum(2 * m.nbytes for m, _ in self.host) if pinned else 0

    def step(self) -> None:
        """Load all, step, offload all: three phases in order on one stream, without a wait of the host between."""
        state = self.optimizer.state
        for p, (first, second) in zip(self.params, self.host, strict=True):
            state[p]["exp_avg"] = first.to(p.device, non_blocking=True, copy=True)
            state[p]["exp_avg_sq"] = second.to(p.device, non_blocking=True, copy=True)
        self.optimizer.step()
        for p, (first, second) in zip(self.params, self.host, strict=True):
            first.copy_(state[p].pop("exp_avg"), non_blocking=True)
            second.copy_(state[p].pop("exp_avg_sq"), non_blocking=True)


class Torchao(TorchResident):
    """torchao's CPUOffloadOptimizer: gradients go to the host, the step runs there, parameters come back."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        try:
            from torchao.optim import CPUOffloadOptimizer
        except ImportError as error:
            raise CannotRunError(f"not installed: {error}") from error
        if params[0].device.type != "cuda":
            raise CannotRunError("needs a GPU")
        self.params = params
        self.make = lambda: CPUOffloadOptimizer(params, torch.optim.AdamW, fused=True, **HYPER)

    def set_up(self) -> int:
        """Pin a parameter and a gradient for each parameter; its moments are made, unpinned, in the first step."""
        self.optimizer = self.make()
        return 8 * sum(p.numel() for p in self.params if p.numel() >= self.optimizer.minimal_size)

    def step(self) -> None:
        """Call the hooks that backward would call, which send the gradients off, then step."""
        for p in self.params:
            for hook in (p._post_accumulate_grad_hooks or {}).values():
                hook(p)
        self.optimizer.step()


class Forebay(TorchResident):
    """forebay.AdamW."""

    def __init__(self, params: list[torch.nn.Parameter], **options: Any) -> None:
        import forebay

        self.params = params
        self.optimizer = forebay.AdamW(params, **HYPER, **options)

    def set_up(self) -> int:
        """Make and pin all state."""
        self.optimizer.prepare()
        return int(self.optimizer.stats()["pinned_bytes"])

    def settle(self) -> None:
        """Wait for the stores."""
        self.optimizer.synchronize()

    def numbers(self) -> dict[str, Any]:
        """Return the optimizer's own statistics."""
        return dict(self.optimizer.stats())

    def close(self) -> None:
        """Close the optimizer."""
        self.optimizer.close()


class Row:
    """One row of the table: a system, its workload, and the payload of a step."""

    def __init__(
        self,
        label: str,
        make: Callable[[list[torch.nn.Parameter]], TorchResident],
        *,
        workload: str = "qwen2.5-3b",
        dtype: torch.dtype = torch.float32,
        each_way_bytes: float | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.label = label
        self.make = make
        self.workload = workload
        self.dtype = dtype
        self.each_way_bytes = each_way_bytes
        self.options = options or {}


def forebay_row(label: str, each_way_bytes: float | None = 8, **settings: Any) -> Row:
    """Return a row of forebay; settings that are not the row's own are the optimizer's."""
    own = {key: settings.pop(key) for key in ("workload", "dtype") if key in settings}
    # As they are shown: JSON has no types of torch.
    shown = {key: str(value) if isinstance(value, torch.dtype) else value for key, value in settings.items()}
    return Row(label, lambda params: Forebay(params, **settings), each_way_bytes=each_way_bytes, options=shown, **own)


ROWS = {
    "torch-fused": Row("torch fused, resident", lambda params: TorchResident(params, fused=True)),
    "torch-foreach": Row("torch foreach, resident", lambda params: TorchResident(params, foreach=True)),
    "load-all": Row("load all, step, offload all", LoadAll, each_way_bytes=8),
    # Gradients go out and parameters come back: 4 bytes each way; the moments never cross.
    "torchao": Row("torchao CPUOffloadOptimizer", Torchao, each_way_bytes=4),
    "forebay": forebay_row("forebay, 4 slots of 16 MiB"),
    "forebay-72mib": forebay_row("forebay, 3 slots of 24 MiB", slots=3, chunk_bytes=24 << 20),
    "forebay-resident": forebay_row("forebay, resident", None, placement="resident"),
    "forebay-bf16": forebay_row("forebay, bf16 and f32 master", 12, dtype=torch.bfloat16),
    # Two moments, and of the master 16 bits and a carry.
    "forebay-compact": forebay_row(
        "forebay, bf16 and compact master", 10.125, dtype=torch.bfloat16, master_weights="compact"
    ),
    # Small tensors keep f32, so the bytes are those that the optimizer counts.
    "forebay-bf16-state": forebay_row(
        "forebay, bf16 moments, compact master",
        COUNTED,
        dtype=torch.bfloat16,
        master_weights="compact",
        state_dtype=torch.bfloat16,
        stochastic_rounding=True,
    ),
    "forebay-8bit": forebay_row(
        "forebay, 8-bit moments, compact master",
        COUNTED,
        dtype=torch.bfloat16,
        master_weights="compact",
        state_dtype="8bit",
    ),
    "forebay-host": forebay_row(
        "forebay, on the host, bf16 and f32 master", None, dtype=torch.bfloat16, placement="host"
    ),
    "forebay-host-8bit": forebay_row(
        "forebay, on the host, 8-bit moments, compact master",
        None,
        dtype=torch.bfloat16,
        master_weights="compact",
        state_dtype="8bit",
        placement="host",
    ),
    "forebay-small": forebay_row("forebay, 10,000 small tensors", workload="small"),
}


# Measuring.


def finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Memory:
    """Device memory above what was in use when this was made, as torch and as the driver count it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type != "cuda":
            return
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        self.allocated = torch.cuda.memory_allocated(device)
        self.reserved = torch.cuda.memory_reserved(device)
        self.free = self.least_free = torch.cuda.mem_get_info(device)[0]

    def look(self) -> None:
        """Ask the driver now."""
        if self.device.type == "cuda":
            self.least_free = min(self.least_free, torch.cuda.mem_get_info(self.device)[0])

    def peak(self) -> dict[str, int | None]:
        """Return the peaks in bytes; nothing where there is no GPU."""
        if self.device.type != "cuda":
            return {"torch_peak_bytes": None, "torch_reserved_bytes": None, "driver_peak_bytes": None}
        return {
            "torch_peak_bytes": torch.cuda.max_memory_allocated(self.device) - self.allocated,
            "torch_reserved_bytes": torch.cuda.max_memory_reserved(self.device) - self.reserved,
            "driver_peak_bytes": self.free - self.least_free,
        }


def measure(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Run one row."""
    row, device = ROWS[name], torch.device(spec["device"])

    # Code that the driver loads at its first use is counted by itself, here.
    finish(device)
    loading = Memory(device)
    tiny = row.make(parameters([(64, 64)], row.dtype, device))
    tiny.set_up()
    tiny.step()
    tiny.settle()
    finish(device)
    tiny.close()
    del tiny
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    loading.look()

    params = parameters(shapes(row.workload, spec["quick"]), row.dtype, device)
    finish(device)
    memory = Memory(device)
    system = row.make(params)
    start = time.perf_counter()
    pinned_bytes = system.set_up()
    finish(device)
    setup_s = time.perf_counter() - start
    memory.look()

    step_s, call_s, host_s, numbers = [], [], [], {}
    for number in range(spec["warmup"] + spec["steps"]):
        warming_up = number < spec["warmup"]
        finish(device)
        start = time.perf_counter()
        system.step()
        returned = time.perf_counter()
        if warming_up:
            memory.look()
        finish(device)
        system.settle()
        end = time.perf_counter()
        numbers = system.numbers()
        if not warming_up:
            step_s.append(end - start)
            call_s.append(returned - start)
            host_s.append(returned - start - numbers.get("stall_s", 0.0))
    memory.look()

    count = sum(p.numel() for p in params)
    median_s = statistics.median(step_s)
    payload = None if row.each_way_bytes is None else int(row.each_way_bytes * count)
    if row.each_way_bytes == COUNTED:
        payload = int(numbers["fetch_bytes"])
    ring_bytes = int(numbers.get("device_bytes", 0)) if payload else 0
    if ring_bytes and numbers["fetch_bytes"] != payload:
        raise AssertionError(f"fetched {numbers['fetch_bytes']} bytes where {payload} are the payload")
    return {
        "params": count,
        "tensors": len(params),
        "steps": len(step_s),
        "step_s": step_s,
        "median_step_s": median_s,
        "median_call_s": statistics.median(call_s),
        "median_host_s": statistics.median(host_s),
        "gparam_per_s": count / median_s / 1e9,
        "payload_bytes": payload,
        "gbps_each_way": None if payload is None else payload / median_s / 1e9,
        **memory.peak(),
        "driver_code_bytes": loading.peak()["driver_peak_bytes"],
        "ring_bytes": ring_bytes,
        # The driver maps pinned memory with 8 bytes for each page of 4 KiB, in the device's memory.
        "mapping_bytes": pinned_bytes // 4096 * 8 if device.type == "cuda" else 0,
        "pinned_bytes": pinned_bytes,
        "setup_s": setup_s,
        "setup_gib_per_s": pinned_bytes / GIB / setup_s if pinned_bytes else None,
        "last_step": numbers,
    }


# Other jobs.


def machine(spec: dict[str, Any]) -> dict[str, Any]:
    """Say what this machine is, and settle which device to use."""
    device = torch.device(spec["device"] or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CannotRunError(f"no GPU that torch can use, {device} was asked for")
    driver = None
    if device.type == "cuda":
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            driver = subprocess.run(query, check=True, capture_output=True, text=True).stdout.split("\n")[0].strip()
    return {
        "device": "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}",
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "gpu_memory_bytes": torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        "driver": driver,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "forebay": importlib.metadata.version("forebay"),
    }


def wire(spec: dict[str, Any]) -> dict[str, Any]:
    """Measure the wire as ``forebay probe`` does."""
    import forebay

    found = forebay.probe(spec["device"])
    return {"gbps": found["wire_gbps"], "pin_gib_per_s": found["pin"]["gib_per_s"]}


def pin(spec: dict[str, Any]) -> dict[str, Any]:
    """Time what peers do to set up: pin moments one tensor at a time."""
    if torch.device(spec["device"]).type != "cuda":
        raise CannotRunError("needs a GPU: pinning is the driver's work")
    torch.zeros(1).pin_memory()
    sizes = layer(2048, 256, 11_008) * (1 if spec["quick"] else PINNED_LAYERS)
    payload = sum(2 * 4 * torch.Size(size).numel() for size in sizes)
    rates, held = {}, []
    ways: dict[str, Callable[[tuple[int, ...]], torch.Tensor]] = {
        "pin_memory()": lambda size: torch.zeros(size).pin_memory(),
        "empty(pin_memory=True)": lambda size: torch.empty(size, pin_memory=True),
    }
    for way, make in ways.items():
        start = time.perf_counter()
        held.append([make(size) for size in sizes for _ in range(2)])
        rates[way] = payload / GIB / (time.perf_counter() - start)
    return {"bytes": payload, "tensors": 2 * len(sizes), "gib_per_s": rates}


def exactness(spec: dict[str, Any]) -> dict[str, Any]:
    """Train the same numbers with torch's fused AdamW and with forebay, and count values that differ in any bit."""
    import forebay

    device, steps = torch.device(spec["device"]), spec["exact_steps"]
    sizes = [(61, 47), (128,), (256, 100)] if spec["quick"] else layer(2048, 256, 11_008)[:8]

    def train(make: Callable[[list[torch.nn.Parameter]], Any], dtype: torch.dtype, rounded: bool) -> list[torch.Tensor]:
        """Return parameters (masters, where there are any) and moments, on the host."""
        params = parameters(sizes, torch.bfloat16 if rounded else torch.float32, device)
        params = [torch.nn.Parameter(p.detach().to(dtype)) for p in params]
        optimizer = make(params)
        random = torch.Generator(device).manual_seed(1)
        for _ in range(steps):
            for p in params:
                gradient = torch.empty(p.shape, device=device).normal_(generator=random)
                p.grad = (gradient.bfloat16() if rounded else gradient).to(dtype)
            optimizer.step()
        states = [optimizer.state[p] for p in params]
        found = [state.get("master_param", p.detach()) for p, state in zip(params, states, strict=True)]
        found += [state[kind] for state in states for kind in ("exp_avg", "exp_avg_sq")]
        return [tensor.cpu().clone() for tensor in found]

    def compare(what: str, left: list[torch.Tensor], right: list[torch.Tensor]) -> dict[str, Any]:
        pairs = list(zip(left, right, strict=True))
        differing = sum(int((a.view(torch.int32) != b.view(torch.int32)).sum()) for a, b in pairs)
        largest = max(float((a - b).abs().max()) for a, b in pairs)
        compared = sum(a.numel() for a in left)
        return {"what": what, "compared": compared, "differing": differing, "largest_difference": largest}

    def optimizer(**options: Any) -> Callable[[list[torch.nn.Parameter]], Any]:
        return lambda params: forebay.AdamW(params, **HYPER, **options)

    def fused(params: list[torch.nn.Parameter]) -> Any:
        return torch.optim.AdamW(params, **HYPER, fused=True)

    chunk = 16 << 10 if spec["quick"] else 1 << 20
    f32, bf16 = torch.float32, torch.bfloat16
    streamed = train(optimizer(chunk_bytes=chunk, slots=3), f32, False)
    resident = train(optimizer(placement="resident"), f32, False)
    reference = train(fused, f32, False)
    masters = train(optimizer(chunk_bytes=chunk, slots=3), bf16, True)
    rounded = train(fused, f32, True)
    checks = [
        compare("forebay streamed, torch fused", streamed, reference),
        compare("forebay streamed, forebay resident", streamed, resident),
        compare("forebay's masters of bf16, torch fused in f32", masters, rounded),
    ]
    # Only torch's CUDA kernel rounds as forebay does; on the CPU the placements must agree.
    must_hold = checks if device.type == "cuda" else checks[1:2]
    return {
        "steps": steps,
        "checks": checks,
        "exact_with_torch": checks[0]["differing"] == 0,
        "exact": all(check["differing"] == 0 for check in must_hold),
    }


JOBS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "machine": machine,
    "wire": wire,
    "pin": pin,
    "exactness": exactness,
}


def do(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Do one job in this process."""
    try:
        return JOBS[name](spec) if name in JOBS else measure(name, spec)
    except CannotRunError as reason:
        return {"cannot_run": str(reason)}


if __name__ == "__main__":
    print(json.dumps(do(sys.argv[1], json.loads(sys.argv[2]))))
