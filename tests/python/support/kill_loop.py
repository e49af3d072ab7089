"""A parent whose children are killed while they save; each child checks what the one before it left.

The parent has imported torch and opened no engine, so a forked child is ready within milliseconds. A child loads the
last checkpoint, checks it, and tells the parent; then it saves again and again, and is killed at a random moment.
"""

from __future__ import annotations

import gc
import os
import random
import select
import signal
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

import forebay
from forebay import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

LOADED, BEGUN, SAVED = 1, 2, 3
RECORD = struct.Struct("<qq")


class Job(Protocol):
    """What a child does."""

    sizes: Iterable[tuple[int, ...]]
    choices: Sequence[Any]
    """Of which each child gets one."""
    spread: float
    """Moments are chosen within the time of so many saves."""
    longest_s: float
    """And no later than this."""

    def make(self) -> tuple[torch.nn.Module, forebay.AdamW]:
        """Return a model with its optimizer."""

    def check(self, model: torch.nn.Module, optimizer: forebay.AdamW, number: int) -> None:
        """Fail where the state is not that of this number."""

    def save(self, path: Path, model: torch.nn.Module, optimizer: Any, **options: Any) -> None:
        """Save once, and wait for it."""

    def go_on(
        self,
        path: Path,
        model: torch.nn.Module,
        optimizer: forebay.AdamW,
        number: int,
        choice: Any,
        tell: Callable[[int, int], None],
    ) -> None:
        """Change the state and save it, for ever; ``tell`` says that a save has begun, and that it is complete."""


def plain(sizes: Iterable[tuple[int, ...]]) -> tuple[torch.nn.Module, forebay.AdamW]:
    """Return a model with f32 parameters of these sizes, and its optimizer."""
    model = torch.nn.ParameterList([torch.zeros(size) for size in sizes])
    return model, forebay.AdamW(model.parameters())


def child(job: Job, path: Path, pipe: int, choice: Any) -> None:
    """Load, check, tell; then save for ever."""

    def tell(what: int, number: int) -> None:
        os.write(pipe, RECORD.pack(what, number))

    model, optimizer = job.make()
    optimizer.prepare()
    number = 0
    if any(path.glob("*/manifest.json")):
        extra = checkpoint.load(path, model, optimizer)
        assert extra is not None
        number = extra["number"]
        job.check(model, optimizer, number)
    tell(LOADED, number)
    job.go_on(path, model, optimizer, number, choice, tell)


def warm_up(job: Job, path: Path) -> None:
    """Import what torch imports at first use, without an engine: torch's own optimizer has none."""
    model = torch.nn.ParameterList([torch.zeros(3)])
    forebay.AdamW(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    job.save(path, model, optimizer, extra={})
    checkpoint.handle.current.clear()
    checkpoint.load(path, model, optimizer)


def read(pipe: int) -> tuple[int, int] | None:
    """Return the next word of a child; None when it has ended."""
    record = b""
    while len(record) < RECORD.size:
        part = os.read(pipe, RECORD.size - len(record))
        if not part:
            return None
        record += part
    what, number = RECORD.unpack(record)
    return what, number


def fork(job: Job, path: Path, choice: Any, kill: int) -> tuple[int, int]:
    """Return a child, and where it tells how far it is."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            child(job, path, writer, choice)
        except BaseException as failure:
            sys.stderr.write(f"after {kill} kills: {type(failure).__name__}: {failure}\n")
            sys.stderr.flush()
        os._exit(1)
    os.close(writer)
    return pid, reader


def main(job: Job, path: Path, kills: int, seed: int) -> None:
    """Kill so many children; after each, the next one finds the last save that was reported, or a later one."""
    torch.set_num_threads(1)
    warm_up(job, path.parent / f"{path.name}-warm")
    # A collection in a child would touch, and so copy, every page that it shares with its parent.
    gc.disable()
    gc.freeze()
    choose = random.Random(seed)
    reported, within_s, inside = 0, 0.05, 0
    for kill in range(kills + 1):
        pid, reader = fork(job, path, choose.choice(job.choices), kill)
        last = LOADED
        try:
            word = read(reader)
            assert word is not None, f"after {kill} kills the checkpoint does not load"
            assert word[0] == LOADED
            assert word[1] >= reported, f"after {kill} kills {word[1]} is the last, {reported} was reported as done"
            reported = word[1]
            if kill == 0:
                # How long a save takes here, from the first word of one to that of the next but one.
                read(reader)
                start = time.perf_counter()
                for _ in range(4):
                    word = read(reader)
                within_s = min(max((time.perf_counter() - start) / 2 * job.spread, 0.02), job.longest_s)
            moment = time.perf_counter() + choose.random() * within_s
            while (left := moment - time.perf_counter()) > 0:
                if select.select([reader], [], [], left)[0]:
                    word = read(reader)
                    assert word is not None, "a save failed"
                    last = word[0]
                    reported = word[1] if last == SAVED else reported
        finally:
            os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
        assert os.WIFSIGNALED(status), f"after {kill} kills a save failed"
        while (word := read(reader)) is not None:
            last = word[0]
            reported = word[1] if last == SAVED else reported
        inside += last == BEGUN
        os.close(reader)
    sys.stdout.write(f"{kills} {inside} {reported}\n")
