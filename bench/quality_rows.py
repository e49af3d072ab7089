"""The rows of ``bench/quality.py``: formats of optimizer state, a small language model, and how one is trained.

``quality.py`` starts processes that call ``work``.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import sys
import sysconfig
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

# A neighbour, not a package: Python finds it in this file's folder.
import rows
import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
WARMUP, LAST_LR = 0.05, 0.1
"""The part of the steps in which the lr rises, and the part of it that the cosine leaves at the end."""


class Row(NamedTuple):
    """One row: whose AdamW trains the bf16 weights, and its options."""

    label: str
    options: dict[str, Any]
    system: str = "forebay"


def forebay_row(label: str, **options: Any) -> Row:
    """Return a row of forebay with compact masters, which have the bits of f32 ones."""
    return Row(label, {"master_weights": "compact", **options})


ROWS = {
    "f32": Row("f32 state, f32 masters", {}),
    "compact": forebay_row("f32 state, compact masters"),
    "bf16": forebay_row("bf16 state", state_dtype=torch.bfloat16),
    "bf16-stochastic": forebay_row("bf16 state, stochastic", state_dtype=torch.bfloat16, stochastic_rounding=True),
    "8bit": forebay_row("8-bit state", state_dtype="8bit"),
    "8bit-stochastic": forebay_row("8-bit state, stochastic", state_dtype="8bit", stochastic_rounding=True),
    # No masters: torchao rounds the weights stochastically instead, as its README says for bf16 weights.
    "torchao": Row("torchao AdamW8bit", {"bf16_stochastic_round": True}, "torchao"),
    "torch": Row("torch, bf16, no masters", {"fused": True}, "torch"),
}


class Size(NamedTuple):
    """What is trained on how much in each step."""

    layers: int
    width: int
    heads: int
    length: int
    batch: int
    lr: float
    text_bytes: int = 8_000_000
    evaluations: int = 20
    """How often the held-out loss is taken."""
    sequences: int = 64
    """Held-out sequences, each time but the last."""
    last_sequences: int = 1024


SIZES = {
    "tiny": Size(1, 32, 2, 32, 4, 3e-3, text_bytes=200_000, evaluations=4, sequences=8, last_sequences=16),
    "small": Size(3, 192, 3, 128, 8, 2e-3),
    "medium": Size(4, 256, 4, 256, 16, 1e-3),
}


# The text.

LEFT_OUT = {"distutils", "encodings", "idlelib", "lib2to3", "pydoc_data", "test", "tkinter", "turtledemo"}
"""Tables of characters, old copies of other modules, tests, and what is often packaged apart."""
WHAT = (
    "the topics of Python's reference (pydoc_data.topics), then the source of its standard library: modules of "
    f"sys.stdlib_module_names without {', '.join(sorted(LEFT_OUT))} and without folders named test or tests, sorted; "
    "each topic and each file is a document; every 20th document is held out"
)
EACH_HELD_OUT = 20


def documents() -> Iterator[bytes]:
    """Yield the documents of Python itself, in an order that depends on nothing but its version."""
    with contextlib.suppress(ImportError):
        from pydoc_data import topics

        for name in sorted(topics.topics):
            yield topics.topics[name].encode()
    root = Path(sysconfig.get_path("stdlib"))
    for name in sorted(sys.stdlib_module_names - LEFT_OUT):
        folder, module = root / name, root / f"{name}.py"
        found = sorted(folder.rglob("*.py")) if folder.is_dir() else [module] if module.is_file() else []
        for path in found:
            if not {"test", "tests"} & set(path.relative_to(root).parts):
                yield path.read_bytes()


class Text:
    """Bytes to train on, and bytes of other documents to test on."""

    def __init__(self, limit: int) -> None:
        trained, held_out = bytearray(), bytearray()
        for self.count, document in enumerate(documents(), 1):
            (trained if self.count % EACH_HELD_OUT else held_out).extend(document)
            if len(trained) + len(held_out) >= limit:
                break
        self.trained, self.held_out = bytes(trained), bytes(held_out)

    def about(self) -> dict[str, Any]:
        """Say what it is."""
        return {
            "what": WHAT,
            "documents": self.count,
            "trained_bytes": len(self.trained),
            "held_out_bytes": len(self.held_out),
            "sha256": hashlib.sha256(self.trained + self.held_out).hexdigest(),
        }


# The model.


class Layer(torch.nn.Module):
    """Causal attention and a feed-forward part, each on a norm of its input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, self.heads = size.width, size.heads
        self.first, self.second = (torch.nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(width, 3 * width, bias=False), torch.nn.Linear(width, width, bias=False)
        self.up, self.down = (
            torch.nn.Linear(width, 4 * width, bias=False),
            torch.nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
        """Return the input and what the layer adds to it."""
        batch, length, width = x.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        query, key, value = self.qkv(self.first(x)).view(shape).permute(2, 0, 3, 1, 4)
        # By hand: at this size it is faster on a CPU than the fused kernels, and its gradients have the same bits
        # every time on a GPU.
        scores = (query * (width // self.heads) ** -0.5) @ key.transpose(-1, -2)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1, dtype=torch.float32).to(value.dtype)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Model(torch.nn.Module):
    """A decoder-only transformer over bytes; the logits use the embedding again."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding, self.position = (torch.nn.Embedding(n, size.width) for n in (256, size.length))
        self.layers = torch.nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = torch.nn.LayerNorm(size.width, bias=False)
        self.future: torch.Tensor
        self.register_buffer("future", torch.ones(size.length, size.length, dtype=torch.bool).triu(1))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_sum = name.endswith(("out.weight", "down.weight"))
                torch.nn.init.normal_(parameter, std=0.02 / (2 * size.layers) ** (0.5 if into_sum else 0))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the next bytes, in nats."""
        x = self.embedding(text[:, :-1]) + self.position.weight
        for layer in self.layers:
            x = layer(x, self.future)
        logits = functional.linear(self.norm(x), self.embedding.weight)
        return functional.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())

    def groups(self) -> list[dict[str, Any]]:
        """Return matrices, which decay, and the weights of norms, which do not."""
        matrices = [one for one in self.parameters() if one.dim() == 2]
        norms = [one for one in self.parameters() if one.dim() == 1]
        return [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": norms, "weight_decay": 0.0}]

    def digest(self) -> str:
        """Return a sum over the bits of all weights."""
        total = hashlib.sha256()
        for parameter in self.parameters():
            total.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
        return total.hexdigest()


# Systems.


class System:
    """An optimizer of the weights, with clipping."""

    optimizer: Any

    def step(self, lr: float) -> None:
        """Clip, step with this lr, and drop the gradients."""
        self.clip()
        self.set_lr(lr)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clip(self) -> None:
        """Clip the gradients."""
        torch.nn.utils.clip_grad_norm_([one for group in self.optimizer.param_groups for one in group["params"]], CLIP)

    def set_lr(self, lr: float) -> None:
        """Give every group this lr."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def state_bytes(self) -> int | None:
        """Return the bytes of state that a step reads, masters included."""
        return sum(state[name].nbytes for state in self.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))


class Torch(System):
    """torch's AdamW on the weights themselves."""

    def __init__(self, model: Model, lr: float, options: dict[str, Any]) -> None:
        self.optimizer = torch.optim.AdamW(model.groups(), lr=lr, betas=BETAS, **options)


class Torchao(System):
    """torchao's AdamW8bit."""

    def __init__(self, model: Model, lr: float, options: dict[str, Any]) -> None:
        try:
            from torchao.optim import AdamW8bit
        except ImportError as error:
            raise rows.CannotRunError(f"not installed: {error}") from error
        self.optimizer = AdamW8bit(model.groups(), lr=lr, betas=BETAS, **options)

    def step(self, lr: float) -> None:
        """Step; the first one compiles, for which a machine needs a C compiler."""
        from torch._dynamo.exc import TorchDynamoException

        try:
            super().step(lr)
        except TorchDynamoException as error:
            reason = str(error).strip().splitlines()[0]
            raise rows.CannotRunError(f"torch.compile does not work here: {reason}") from error

    def set_lr(self, lr: float) -> None:
        """Fill the tensors that torchao keeps; with a number it refuses to step."""
        for group in self.optimizer.param_groups:
            group["lr"].fill_(lr)

    def state_bytes(self) -> int | None:
        """Return the bytes of the moments, with their scales and without the table that all share."""
        total = 0
        for state in self.optimizer.state.values():
            for moment in (state["exp_avg"], state["exp_avg_sq"]):
                parts = [moment.codes, moment.scale] if hasattr(moment, "codes") else [moment]
                total += sum(part.nbytes for part in parts)
        return total


class Forebay(System):
    """forebay.AdamW, which clips inside its step."""

    def __init__(self, model: Model, lr: float, options: dict[str, Any], placement: str) -> None:
        import forebay

        try:
            self.optimizer = forebay.AdamW(
                model.groups(), lr=lr, betas=BETAS, placement=placement, max_grad_norm=CLIP, **options
            )
            self.optimizer.prepare()
        except (forebay.OptionError, TypeError) as reason:
            # Without options of its own there is nothing that a build could lack.
            if not options:
                raise
            raise rows.CannotRunError(f"not in this build: {reason}") from reason

    def clip(self) -> None:
        """Leave it to the step."""

    def state_bytes(self) -> int | None:
        """Return the bytes that a step fetches; none if they stay where they are."""
        self.optimizer.synchronize()
        return int(self.optimizer.stats()["fetch_bytes"]) or None


def system(row: Row, model: Model, lr: float, placement: str) -> System:
    """Return the optimizer of a row."""
    if row.system == "forebay":
        return Forebay(model, lr, row.options, placement)
    return (Torchao if row.system == "torchao" else Torch)(model, lr, row.options)


# Training.


def schedule(peak: float, steps: int) -> list[float]:
    """Return the lr of every step: a rise, then a cosine."""
    rise = max(1, round(WARMUP * steps))
    falls = (0.5 + 0.5 * math.cos(math.pi * n / max(1, steps - rise)) for n in range(1, steps - rise + 1))
    return [peak * n / rise for n in range(1, rise + 1)] + [peak * (LAST_LR + (1 - LAST_LR) * part) for part in falls]


def tensor_of(text: bytes, device: torch.device) -> torch.Tensor:
    """Return the bytes on a device."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)


class HeldOut:
    """Sequences that are not trained on, evenly from all of the held-out text, always the same."""

    def __init__(self, text: bytes, size: Size, device: torch.device) -> None:
        held_out, self.batch = tensor_of(text, device), size.batch
        self.some, self.all = (
            held_out[(torch.arange(count) * ((len(text) - size.length - 1) // count)).to(device)[:, None] + within]
            for within in [torch.arange(size.length + 1, device=device)]
            for count in (size.sequences, size.last_sequences)
        )

    @torch.no_grad()
    def loss(self, model: Model, sequences: torch.Tensor) -> torch.Tensor:
        """Return the loss, on the device."""
        return torch.stack([model(part.long()) for part in sequences.split(self.batch)]).mean()


def train(name: str, spec: dict[str, Any], tell: Callable[[int], None]) -> dict[str, Any]:
    """Train one row with one seed, and tell how far it is. The host waits for the device at the end only."""
    row, size, device, steps = ROWS[name], SIZES[spec["size"]], torch.device(spec["device"]), spec["steps"]
    # Equal bits of two rows mean something only if those of two runs are equal. This imports less than
    # use_deterministic_algorithms does.
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.manual_seed(spec["seed"])
    model = Model(size).to(device, torch.bfloat16)
    optimizer = system(row, model, size.lr, spec["placement"])
    text = Text(size.text_bytes)
    held_out, trained = HeldOut(text.held_out, size, device), tensor_of(text.trained, device)
    order = torch.Generator().manual_seed(spec["seed"])
    begins = torch.randint(len(trained) - size.length, (steps, size.batch, 1), generator=order).to(device)
    within = torch.arange(size.length + 1, device=device)

    losses = torch.zeros(steps, device=device)
    at = moments(steps, size)
    tested = []
    rows.finish(device)
    start = time.perf_counter()
    for number, lr in enumerate(schedule(size.lr, steps)):
        loss = model(trained[begins[number] + within].long())
        loss.backward()
        losses[number] = loss.detach()
        optimizer.step(lr)
        if number + 1 in at["held_out"]:
            tested.append(held_out.loss(model, held_out.some))
            tell(number + 1)
    final = float(held_out.loss(model, held_out.all))
    rows.finish(device)
    seconds = time.perf_counter() - start
    if not math.isfinite(final):
        raise ArithmeticError(f"the held-out loss is {final} after {steps} steps")
    count, state_bytes = sum(one.numel() for one in model.parameters()), optimizer.state_bytes()
    return {
        "seed": spec["seed"],
        "seconds": seconds,
        "parameters": count,
        "state_bytes_per_parameter": state_bytes and state_bytes / count,
        "held_out_loss": final,
        "held_out": [round(float(value), 6) for value in tested],
        "trained": smoothed(losses),
        "digest": model.digest(),
    }


def moments(steps: int, size: Size) -> dict[str, list[float]]:
    """Return the steps of the losses that are noted: after each, or in the middle of those whose mean is taken."""
    pause, window = max(1, steps // size.evaluations), mean_over(steps)
    begins = range(0, steps, window)
    return {
        "held_out": list(range(pause, steps + 1, pause)),
        "trained": [(begin + 1 + min(begin + window, steps)) / 2 for begin in begins],
    }


def mean_over(steps: int, points: int = 50) -> int:
    """Return how many training losses make one that is noted."""
    return -(-steps // points)


def smoothed(losses: torch.Tensor) -> list[float]:
    """Return the training loss as means of so many steps each."""
    return [round(float(part.mean()), 6) for part in losses.cpu().split(mean_over(len(losses)))]


def work(name: str, spec: dict[str, Any], pipe: Connection) -> None:
    """Train in this process; send the steps done now and then, and the result at the end. An error is a result."""
    torch.set_num_threads(spec["threads"])
    try:
        result = train(name, spec, lambda step: pipe.send({"step": step}))
    except rows.CannotRunError as reason:
        result = {"cannot_run": str(reason)}
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    pipe.send(result)
