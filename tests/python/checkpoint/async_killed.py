"""The parent of children that are killed while they train and save beside it. Run as a program: path, kills, seed.

It has imported torch and opened no engine, so a forked child is ready within milliseconds. A child loads what the one
before it left and checks it; then it steps without a pause and saves again and again. Every element of a state after
step n is what one element alone becomes in n steps, so a mixture of two moments shows.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import time
from pathlib import Path

import torch
from ckpt_killed import read, tell

import forebay
from forebay import checkpoint

LOADED, BEGUN, SAVED = 1, 2, 3
SIZES = ((700, 1000), (3,), (300, 70), ())
"""One page of state and a bit, of each kind."""


def check(model: torch.nn.Module, optimizer: forebay.AdamW, number: int) -> None:
    """Fail where an element is not that of its moment: all of them had the same gradients."""
    for i, parameter in enumerate(model.parameters()):
        state = optimizer.state[parameter]
        assert int(state["step"]) == number, f"{int(state['step'])} steps in a save of {number}"
        for what, tensor in (("weight", parameter), *((k, state[k]) for k in ("exp_avg", "exp_avg_sq"))):
            flat = tensor.detach().reshape(-1)
            assert bool((flat == flat[0]).all()), f"{what} {i} of save {number} is of several moments"
            first = next(iter(model.parameters())).detach().reshape(-1)[0] if what == "weight" else None
            assert first is None or bool(first == flat[0]), f"weight {i} of save {number} is of another moment"


def step(model: torch.nn.Module, optimizer: forebay.AdamW) -> None:
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()


def child(path: Path, pipe: int, budget: int | None) -> None:
    """Load, check, tell; then train and save for ever."""
    model = torch.nn.ParameterList([torch.zeros(size) for size in SIZES])
    optimizer = forebay.AdamW(model.parameters())
    number = 0
    if any(path.glob("*/manifest.json")):
        extra = checkpoint.load(path, model, optimizer)
        assert extra is not None
        number = extra["number"]
        check(model, optimizer, number)
    tell(pipe, LOADED, number)
    while True:
        number += 1
        step(model, optimizer)
        handle = checkpoint.async_save(
            path, model, optimizer, extra={"number": number}, keep_last=2, snapshot_budget_bytes=budget
        )
        saved = number
        tell(pipe, BEGUN, saved)
        while not handle.done():
            number += 1
            step(model, optimizer)
        handle.result()
        tell(pipe, SAVED, saved)


def warm_up(path: Path) -> None:
    """Import what torch imports at first use, without an engine: torch's own optimizer has none."""
    model = torch.nn.ParameterList([torch.zeros(3)])
    forebay.AdamW(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.async_save(path, model, optimizer, extra={}).result()
    checkpoint._earlier.clear()
    checkpoint.load(path, model, optimizer)


def main(path: Path, kills: int, seed: int) -> None:
    """Kill so many children; after each, the next one finds the last save that was reported, or a later one."""
    torch.set_num_threads(1)
    warm_up(path.parent / f"{path.name}-warm")
    choose = random.Random(seed)
    reported, within, inside = 0, 0.05, 0
    for kill in range(kills + 1):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            try:
                child(path, writer, choose.choice([None, 0, 8 << 20]))
            except BaseException as failure:
                sys.stderr.write(f"after {kill} kills: {type(failure).__name__}: {failure}\n")
                sys.stderr.flush()
            os._exit(1)
        os.close(writer)
        last = LOADED
        try:
            word = read(reader)
            assert word is not None, f"after {kill} kills the checkpoint does not load"
            assert word[0] == LOADED
            assert word[1] >= reported, f"after {kill} kills {word[1]} is the last, {reported} was reported as done"
            reported = word[1]
            if kill == 0:
                # How long a save takes here: moments are chosen within the time of about one and a half.
                read(reader)
                start = time.perf_counter()
                for _ in range(4):
                    word = read(reader)
                within = max((time.perf_counter() - start) / 2 * 1.5, 0.02)
            moment = time.perf_counter() + choose.random() * within
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
    sys.stdout.write(f"{kills} {inside} {reported} {within:.4f}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
