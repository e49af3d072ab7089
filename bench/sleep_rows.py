"""The rows of ``bench/sleep.py``: ways to bring tensors from the GPU to the host and back, and how each is timed.

``python bench/sleep_rows.py NAME SPEC`` does one job with the options in SPEC, which is JSON, and prints its result as
JSON. The job ``sleep`` is all rows over one workload, one after the other.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import rows
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

WORKLOADS = ("400", "20000")
"""Numbers of tensors that the bytes are spread over."""


@dataclass
class Way:
    """One way there and back, with what is known about its first time."""

    there: Callable[[], None]
    back: Callable[[], None]
    repeats: int
    about: Callable[[], dict[str, Any]] = dict


def tensors_of(spec: dict[str, Any], count: int) -> list[torch.nn.Parameter]:
    """Return parameters with random values, f32."""
    elements = spec["bytes"] // 4 // count
    device = torch.device(spec["device"])
    with torch.no_grad():
        return [torch.nn.Parameter(torch.empty(elements, device=device).uniform_()) for _ in range(count)]


def flat(tensors: list[torch.nn.Parameter], spec: dict[str, Any]) -> Way:
    """One pinned copy of everything: the limit."""
    size = sum(tensor.numel() for tensor in tensors)
    device = torch.device(spec["device"])
    here = torch.empty(size, device=device)
    host = torch.empty(size, pin_memory=device.type == "cuda")

    def there() -> None:
        host.copy_(here, non_blocking=True)

    def back() -> None:
        here.copy_(host, non_blocking=True)

    return Way(there, back, spec["repeats"])


def to_cpu(tensors: list[torch.nn.Parameter], spec: dict[str, Any], **how: Any) -> Way:
    """Replace ``data`` by a copy on the host and back, tensor by tensor."""
    device = torch.device(spec["device"])

    def there() -> None:
        for tensor in tensors:
            tensor.data = tensor.data.to("cpu", **how)

    def back() -> None:
        for tensor in tensors:
            tensor.data = tensor.data.to(device, **how)

    # Every time is like the first: nothing is kept.
    return Way(there, back, 1)


def non_blocking(tensors: list[torch.nn.Parameter], spec: dict[str, Any]) -> Way:
    """Do the same without waiting for each, through torch's cache of pinned blocks."""
    way = to_cpu(tensors, spec, non_blocking=True)
    way.repeats = spec["repeats"]
    return way


def memory_saver(tensors: list[torch.nn.Parameter], spec: dict[str, Any]) -> Way:
    """Pause and resume with torch_memory_saver, once: nothing is kept from one time to the next."""
    if tensors[0].device.type != "cuda":
        raise rows.CannotRunError("needs a GPU")
    try:
        from torch_memory_saver import torch_memory_saver as saver
    except ImportError as error:
        raise rows.CannotRunError("not installed: no module named 'torch_memory_saver'") from error
    try:
        with saver.region(enable_cpu_backup=True):
            held = [tensor.detach().clone() for tensor in tensors]
    except Exception as error:
        raise rows.CannotRunError(f"torch_memory_saver: {type(error).__name__}: {error}") from error

    def about() -> dict[str, Any]:
        differing = sum(int((a != b).sum()) for a, b in zip(held, tensors, strict=True))
        held.clear()
        return {"differing": differing}

    return Way(saver.pause, saver.resume, 1, about)


def forebay_way(*, give_back: bool, prepare: bool = False) -> Callable[..., Way]:
    """Sleep and wake with forebay."""

    def make(tensors: list[torch.nn.Parameter], spec: dict[str, Any]) -> Way:
        import forebay

        device = torch.device(spec["device"])
        model = torch.nn.ParameterList(tensors)
        start = time.perf_counter()
        sleeper = forebay.Sleeper(model, prepare=prepare)
        if prepare:
            while not sleeper.stats()["pinned_bytes"]:
                time.sleep(0.01)
        setup_s = time.perf_counter() - start
        falls: list[int] = []

        def there() -> None:
            sleeper.sleep(give_back=give_back)

        def about() -> dict[str, Any]:
            stats = sleeper.stats()
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                before = torch.cuda.mem_get_info(device)[0]
                sleeper.sleep(give_back=True)
                falls.append(torch.cuda.mem_get_info(device)[0] - before)
                sleeper.wake()
            stats["setup_s"] = setup_s
            stats["given_back_bytes"] = falls[-1] if falls else None
            sleeper.release()
            return stats

        return Way(there, sleeper.wake, spec["repeats"], about)

    return make


ROWS: dict[str, tuple[str, Callable[..., Way]]] = {
    "flat": ("one flat pinned copy (limit)", flat),
    "to-cpu": ('.to("cpu"), tensor by tensor', to_cpu),
    "non-blocking": (".to(non_blocking), torch's pinned cache", non_blocking),
    "memory-saver": ("torch_memory_saver", memory_saver),
    "forebay": ("forebay, without give-back", forebay_way(give_back=False)),
    "forebay-give-back": ("forebay, with give-back", forebay_way(give_back=True)),
    "forebay-prepared": ("forebay, prepare=True", forebay_way(give_back=False, prepare=True)),
}


def measure(row: str, tensors: list[torch.nn.Parameter], before: list[torch.Tensor], spec: dict[str, Any]) -> Any:
    """Go there and back a few times; the first time is reported separately."""
    device = torch.device(spec["device"])
    size = sum(tensor.numel() * 4 for tensor in tensors)
    way = ROWS[row][1](tensors, spec)
    times: list[tuple[float, float]] = []
    for _ in range(way.repeats):
        rows.finish(device)
        start = time.perf_counter()
        way.there()
        rows.finish(device)
        gone = time.perf_counter()
        way.back()
        rows.finish(device)
        times.append((gone - start, time.perf_counter() - gone))
    about = way.about()
    differing = sum(int((a != b).sum()) for a, b in zip(tensors, before, strict=True))
    later = times[1:] or times
    sleep_s, wake_s = (statistics.median(each) for each in zip(*later, strict=True))
    return {
        "bytes": size,
        "tensors": len(tensors),
        "times_s": times,
        "first_sleep_gbps": size / times[0][0] / 1e9,
        "first_wake_gbps": size / times[0][1] / 1e9,
        "sleep_gbps": size / sleep_s / 1e9,
        "wake_gbps": size / wake_s / 1e9,
        "differing": differing,
        "stats": {key: value for key, value in about.items() if key not in ("kinds", "residual")},
    }


def sleep(spec: dict[str, Any]) -> dict[str, Any]:
    """Measure all rows over one workload; an error is the result of its row."""
    tensors = tensors_of(spec, int(spec["workload"]))
    before = [tensor.detach().clone() for tensor in tensors]
    found: dict[str, Any] = {}
    for row in spec["rows"]:
        try:
            found[row] = measure(row, tensors, before, spec)
        except rows.CannotRunError as reason:
            found[row] = {"cannot_run": str(reason)}
        except Exception as error:
            traceback.print_exc()
            found[row] = {"error": f"{type(error).__name__}: {error}"}
        # What one row leaves in torch's caches is not the next one's.
        gc.collect()
        torch.cuda.empty_cache()
    return found


def do(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Do one job in this process."""
    return sleep(spec) if name == "sleep" else rows.do(name, spec)


if __name__ == "__main__":
    print(json.dumps(do(sys.argv[1], json.loads(sys.argv[2]))))
