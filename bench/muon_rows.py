"""The rows of ``bench/muon.py``: Muon for matrices and AdamW for the rest, with and without forebay.

``python bench/muon_rows.py NAME SPEC`` does one job with the options in SPEC, which is JSON, and prints its result as
JSON. ``muon.py`` calls this; it is not meant to be called by hand.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any, NamedTuple

# A neighbour, not a package: Python finds it in this file's folder.
import rows
import torch

ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}


class Row(NamedTuple):
    """One row: which optimizers keep their state on the host, and what is timed."""

    label: str
    muon: bool = False
    """Whether Muon's momentum is on the host."""
    adamw: bool = False
    """Whether AdamW's state is on the host."""
    trains: bool = False
    """Whether whole training steps are timed."""
    overlaps: bool = False


ROWS = {
    "torch": Row("step: torch, resident"),
    "forebay-muon": Row("step: Muon's momentum on the host", muon=True),
    "forebay": Row("step: all state on the host", muon=True, adamw=True),
    "train-torch": Row("training: torch, resident", trains=True),
    "train-forebay-muon": Row("training: Muon's momentum on the host", muon=True, trains=True),
    "train-overlap-muon": Row("training: the same, overlapped", muon=True, trains=True, overlaps=True),
    "train-forebay": Row("training: all state on the host", muon=True, adamw=True, trains=True),
    "train-overlap": Row("training: the same, overlapped", muon=True, adamw=True, trains=True, overlaps=True),
}


class Layer(torch.nn.Module):
    """The matrices of a layer of Qwen2.5. In the place of attention, which has no weights, is a product."""

    def __init__(self, hidden: int, kv: int, ffn: int) -> None:
        super().__init__()
        linear = torch.nn.Linear
        self.first, self.second = torch.nn.RMSNorm(hidden), torch.nn.RMSNorm(hidden)
        self.query, self.key, self.value = linear(hidden, hidden), linear(hidden, kv), linear(hidden, kv)
        self.out = linear(hidden, hidden, bias=False)
        self.gate, self.up = linear(hidden, ffn, bias=False), linear(hidden, ffn, bias=False)
        self.down = linear(ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input and what the layer adds to it."""
        inner = self.first(x)
        mixed = (self.key(inner) * self.value(inner)).mean(-1, keepdim=True)
        x = x + self.out(self.query(inner) * mixed)
        inner = self.second(x)
        return x + self.down(torch.nn.functional.silu(self.gate(inner)) * self.up(inner))


class Model(torch.nn.Module):
    """The parameters of Qwen2.5-3B, or fewer of the same proportions."""

    def __init__(self, quick: bool) -> None:
        super().__init__()
        self.vocabulary, hidden, kv, ffn, layers = (
            (3000, 128, 16, 688, 2) if quick else (151_936, 2048, 256, 11_008, 36)
        )
        self.embedding = torch.nn.Embedding(self.vocabulary, hidden)
        self.layers = torch.nn.ModuleList(Layer(hidden, kv, ffn) for _ in range(layers))
        self.norm = torch.nn.RMSNorm(hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a loss. It has no logits, so that the passes are those of the layers."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return (self.norm(x) - 1).float().square().mean()

    def matrices(self) -> list[torch.nn.Parameter]:
        """Return what Muon trains."""
        return [one for one in self.layers.parameters() if one.dim() == 2]

    def others(self) -> list[torch.nn.Parameter]:
        """Return what AdamW trains."""
        chosen = set(map(id, self.matrices()))
        return [one for one in self.parameters() if id(one) not in chosen]


def optimizers(row: Row, model: Model) -> list[Any]:
    """Return the two optimizers of a row."""
    import forebay

    if not hasattr(torch.optim, "Muon"):
        raise rows.CannotRunError(f"torch {torch.__version__} has no Muon")
    muon: Any = torch.optim.Muon(model.matrices(), lr=0.02, weight_decay=0.1)
    adamw: Any = torch.optim.AdamW(model.others(), **ADAMW, fused=True)
    return [forebay.offload(muon) if row.muon else muon, forebay.offload(adamw) if row.adamw else adamw]


def tokens(spec: dict[str, Any], model: Model, number: int) -> torch.Tensor:
    """Return the tokens of one step."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, model.vocabulary, (1, spec["tokens"]), generator=generator).to(spec["device"])


def digest(parameters: list[torch.nn.Parameter]) -> int:
    """Return a sum over the bits of parameters."""
    return sum(int(one.detach().view(torch.int32).sum(dtype=torch.int64)) for one in parameters)


class Marks:
    """Moments on torch's stream, or on the host for the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu, self.marks = device.type == "cuda", []

    def mark(self) -> None:
        """Note this moment."""
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the time from each mark to the next one; all must be reached."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [a.elapsed_time(b) / 1e3 if self.on_gpu else b - a for a, b in pairs]


def measure(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Run one row."""
    import forebay

    row, device = ROWS[name], torch.device(spec["device"])
    torch.manual_seed(0)
    with device:
        model = Model(spec["quick"])
    rows.finish(device)
    memory = rows.Memory(device)
    both = optimizers(row, model)
    hosted = [one for one, is_hosted in zip(both, (row.muon, row.adamw), strict=True) if is_hosted]
    handles = [forebay.overlap_step(model, one, accumulation_steps=1) for one in hosted if row.overlaps]
    seconds = (_train if row.trains else _step)(model, both, spec, device)
    memory.look()
    for one in hosted:
        one.synchronize()
    rows.finish(device)
    hidden = [handle.stats() for handle in handles]
    for handle in handles:
        handle.remove()
    stats = [one.stats() for one in hosted]
    # In units, and through the engine: plain or overlapped.
    moved = [
        (one.get("fetched_bytes"), other.get("fetch_bytes"), one.get("fetch_bytes"))
        for one, other in zip(stats, hidden or [{}] * len(stats), strict=True)
    ]
    payload = sum(int(next(count for count in counts if count is not None)) for counts in moved)
    return {
        "parameters": sum(one.numel() for one in model.parameters()),
        "in_muon": sum(one.numel() for one in model.matrices()),
        "seconds": seconds,
        "median_s": statistics.median(seconds),
        "payload_bytes": payload,
        "pinned_bytes": sum(int(one["pinned_bytes"]) for one in stats),
        "device_bytes": sum(int(one["device_bytes"]) for one in stats),
        "exposed_s": [one["exposed_s"] for one in hidden],
        "muon_digest": digest(model.matrices()),
        **memory.peak(),
        "last_step": stats,
    }


def _step(model: Model, both: list[Any], spec: dict[str, Any], device: torch.device) -> list[float]:
    """Time steps over random gradients, until all state is back where it belongs."""
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter).normal_()
    found = []
    for _ in range(spec["warmup"] + spec["steps"]):
        rows.finish(device)
        start = time.perf_counter()
        for one in both:
            one.step()
        rows.finish(device)
        for one in both:
            if hasattr(one, "synchronize"):
                one.synchronize()
        found.append(time.perf_counter() - start)
    return found[spec["warmup"] :]


def _train(model: Model, both: list[Any], spec: dict[str, Any], device: torch.device) -> list[float]:
    """Time training steps from the begin of one forward to that of the next; the host does not wait in between."""
    marks = Marks(device)
    batches = [tokens(spec, model, number) for number in range(spec["warmup"] + spec["steps"] + 1)]
    for batch in batches:
        marks.mark()
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(batch)
        loss.backward()
        for one in both:
            one.step()
            one.zero_grad()
    rows.finish(device)
    return marks.seconds()[spec["warmup"] :]


def do(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Do one job in this process."""
    try:
        return measure(name, spec) if name in ROWS else rows.do(name, spec)
    except rows.CannotRunError as reason:
        return {"cannot_run": str(reason)}


if __name__ == "__main__":
    print(json.dumps(do(sys.argv[1], json.loads(sys.argv[2]))))
