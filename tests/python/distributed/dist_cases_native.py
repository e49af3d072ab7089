"""Cases about native checkpoints on 1, 2 and 3 ranks: each number saves, then each loads what every one saved."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import forebay
from forebay.optim.packed import Packed
from support.dist.models import (
    SMALL,
    assert_same_bits,
    full,
    groups,
    inner,
    make,
    parameters_of,
    shard,
    state_of,
    train,
)
from support.dist.registry import case, shared_folder
from support.formats import BF16, BLOCKS, format_for, kept

RING = {**SMALL, "chunk_bytes": 6 << 10}
KINDS: dict[str, dict[str, Any]] = {
    "8bit": {"state_dtype": BLOCKS, "stochastic_rounding": True},
    "bf16": {"state_dtype": BF16, "stochastic_rounding": True, "rounding_seed": 3},
}
WAYS = ("save", "async_save", "whole")


def build(kind: str, is_sharded: bool = True) -> tuple[Any, Any]:
    """Return a model with its optimizer."""
    net = make(BF16)
    net = shard(net) if is_sharded else net
    return net, forebay.AdamW(groups(net), master_weights="compact", **KINDS[kind], **RING)


def place(kind: str, way: str, ranks: int) -> Any:
    """Return where so many ranks save."""
    return shared_folder() / f"native-{kind}-{way}-{ranks}"


def values(net: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return parameters and state."""
    return {**dict(net.named_parameters()), **state_of(net, optimizer)}


def parts(net: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return this rank's packed columns as they are kept."""
    optimizer.synchronize()
    return {
        f"{name}.{column}.{part}": tensor.clone()
        for name, parameter in net.named_parameters()
        for column, value in dict.items(dict.get(optimizer.state, parameter, {}))
        if isinstance(value, Packed)
        for part, tensor in value.items()
    }


def step_alone(net: Any, optimizer: Any, step: int) -> None:
    """Take a step whose gradients are the same on every rank."""
    for parameter in net.parameters():
        generator = torch.Generator().manual_seed(1000 * step + parameter.numel())
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()


@case(1, 2, 3)
def native_state_is_saved() -> None:
    ranks = dist.get_world_size()
    for kind in KINDS:
        for way in WAYS:
            net, optimizer = build(kind, is_sharded=way != "whole")
            if way == "whole":
                for step in range(3):
                    step_alone(net, optimizer, step)
            else:
                train(net, optimizer)
            wholes = {name: full(value).clone() for name, value in values(net, optimizer).items()}
            mine = parts(net, optimizer)
            path = place(kind, way, ranks)
            if way == "async_save":
                handle = forebay.checkpoint.async_save(path, net, optimizer, native=True)
                train(net, optimizer, range(4, 6))
                handle.result()
            else:
                forebay.checkpoint.save(path, net, optimizer, native=True)
            if dist.get_rank() == 0:
                torch.save(wholes, path / "wholes.pt")
            torch.save(mine, path / f"{dist.get_rank()}.pt")


def expected(net: Any, optimizer: Any, wholes: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """Return this rank's part of whole values, as this optimizer keeps it."""
    found = {}
    for name, value in values(net, optimizer).items():
        whole = wholes[name]
        if isinstance(value, DTensor):
            rows = whole.chunk(dist.get_world_size())
            whole = rows[dist.get_rank()] if dist.get_rank() < len(rows) else whole[:0]
        column = name.rsplit(".", 1)[-1]
        if column in ("exp_avg", "exp_avg_sq"):
            of = format_for(KINDS[kind]["state_dtype"], whole.numel())
            whole = kept(net.get_parameter(name.rsplit(".", 1)[0]), whole, of, signed=column == "exp_avg")
        found[name] = whole
    return found


class Said(logging.Handler):
    """What the package's logger says."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a text."""
        self.texts.append(record.getMessage())


@case(1, 2, 3)
def every_rank_finds_its_part_of_native_state() -> None:
    ranks = dist.get_world_size()
    logger = logging.getLogger("forebay")
    before, handler = logger.level, Said()
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        for kind in KINDS:
            for way in WAYS:
                for source in (1, 2, 3):
                    path = place(kind, way, source)
                    wholes = torch.load(path / "wholes.pt")
                    net, optimizer = build(kind, is_sharded=way != "whole")
                    step_alone(net, optimizer, 77) if way == "whole" else train(net, optimizer, range(70, 71))
                    handler.texts.clear()
                    forebay.checkpoint.load(path, net, optimizer)
                    said = [text for text in handler.texts if "encoded again" in text]
                    found = {name: inner(value) for name, value in values(net, optimizer).items()}
                    assert_same_bits(found, expected(net, optimizer, wholes, kind))
                    if source == ranks or way == "whole":
                        assert not said, said
                        number = 0 if way == "whole" else dist.get_rank()
                        assert_same_bits(parts(net, optimizer), torch.load(path / f"{number}.pt"))
                    else:
                        assert len(said) == 1, said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@case(2, 3)
def a_restart_over_ranks_has_the_bits_of_no_restart() -> None:
    for kind in KINDS:
        net, optimizer = build(kind)
        train(net, optimizer)
        train(net, optimizer, range(4, 6))
        again, restored = build(kind)
        forebay.checkpoint.load(place(kind, "async_save", dist.get_world_size()), again, restored)
        train(again, restored, range(4, 6))
        assert_same_bits(parameters_of(again), parameters_of(net))
        assert_same_bits(state_of(again, restored), state_of(net, optimizer))
        assert_same_bits(parts(again, restored), parts(net, optimizer))
