"""The parent of children that are killed while they save. Run as a program: path, number of kills, seed.

It has imported torch and opened no engine, so a forked child is ready to save within milliseconds. A child first loads
what the one before it left, checks it, and tells the parent; then it saves again and again, and is killed at a random
moment. Every byte of a state is the number of its save.
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

import torch

import forebay
from forebay import checkpoint

LOADED, SAVED, FAILED = 1, 2, 3
SIZES = ((64, 1000), (3,), (300, 70), ())


def tell(pipe: int, what: int, number: int) -> None:
    os.write(pipe, struct.pack("<qq", what, number))


def fill(model: torch.nn.Module, optimizer: forebay.AdamW, number: int) -> None:
    """Make every byte of weights and moments the number."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.reshape(-1).view(torch.uint8).fill_(number % 251)
            for kind in ("exp_avg", "exp_avg_sq"):
                moment = optimizer.state[parameter][kind].reshape(-1)
                moment.view(torch.uint8).fill_(number % 251)


def check(model: torch.nn.Module, optimizer: forebay.AdamW, number: int) -> None:
    """Fail where a byte is not the number."""
    for parameter in model.parameters():
        for tensor in (parameter, optimizer.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg_sq"]):
            found = tensor.detach().reshape(-1).view(torch.uint8)
            assert bool((found == number % 251).all()), f"save {number} holds bytes of another"


def child(path: Path, pipe: int, keep_last: int | None) -> None:
    """Load, check, tell; then save for ever."""
    model = torch.nn.ParameterList([torch.zeros(size) for size in SIZES])
    optimizer = forebay.AdamW(model.parameters())
    optimizer.prepare()
    number = 0
    if any(path.glob("*/manifest.json")):
        extra = checkpoint.load(path, model, optimizer)
        assert extra is not None
        number = extra["number"]
        check(model, optimizer, number)
    tell(pipe, LOADED, number)
    while True:
        number += 1
        fill(model, optimizer, number)
        checkpoint.save(path, model, optimizer, extra={"number": number}, keep_last=keep_last)
        tell(pipe, SAVED, number)


def warm_up(path: Path) -> None:
    """Import what torch imports at first use, without an engine: torch's own optimizer has none."""
    model = torch.nn.ParameterList([torch.zeros(3)])
    forebay.AdamW(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.save(path, model, optimizer, extra={})
    checkpoint.load(path, model, optimizer)


def read(pipe: int) -> tuple[int, int] | None:
    """Return the next word of a child; None when it has ended."""
    record = b""
    while len(record) < 16:
        part = os.read(pipe, 16 - len(record))
        if not part:
            return None
        record += part
    what, number = struct.unpack("<qq", record)
    return what, number


def main(path: Path, kills: int, seed: int) -> None:
    """Kill so many children; after each, the next one finds the last save that was reported, or a later one."""
    torch.set_num_threads(1)
    warm_up(path.parent / f"{path.name}-warm")
    # A collection in a child would touch, and so copy, every page that it shares with its parent.
    gc.disable()
    gc.freeze()
    choose = random.Random(seed)
    reported, within, saves = 0, 0.02, 0
    for kill in range(kills + 1):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            try:
                child(path, writer, choose.choice([None, 1, 2]))
            except BaseException as failure:
                sys.stderr.write(f"after {kill} kills: {type(failure).__name__}: {failure}\n")
                sys.stderr.flush()
            os._exit(1)
        os.close(writer)
        try:
            word = read(reader)
            assert word is not None, f"after {kill} kills the checkpoint does not load"
            assert word[0] == LOADED
            assert word[1] >= reported, (
                f"after {kill} kills save {word[1]} is the last, {reported} was reported as done"
            )
            reported = word[1]
            if kill == 0:
                # How long a save takes here: moments are chosen within the time of about three.
                start = time.perf_counter()
                for _ in range(4):
                    word = read(reader)
                within = min(max((time.perf_counter() - start) / 4 * 3, 0.01), 0.1)
            moment = time.perf_counter() + choose.random() * within
            while (left := moment - time.perf_counter()) > 0:
                if select.select([reader], [], [], left)[0]:
                    word = read(reader)
                    assert word is not None, "a save failed"
                    reported, saves = word[1], saves + 1
        finally:
            os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
        assert os.WIFSIGNALED(status), f"after {kill} kills a save failed"
        while (word := read(reader)) is not None:
            reported, saves = word[1], saves + 1
        os.close(reader)
    sys.stdout.write(f"{kills} {saves} {reported} {within:.4f}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
