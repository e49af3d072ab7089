"""Cases in which a rank is killed in the middle of a save: first the last one, then the coordinator.

They come last of their group of processes, which goes on with the ranks that are left.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

import forebay
from forebay import _core
from forebay.checkpoint import Writer
from support.dist.checkpoints import SAVED, build, check, optimizer_of, reference, refused, train
from support.dist.models import make
from support.dist.registry import SurvivedError, case, shared_folder

WRITE = _core.write_checkpoint


def die(*_: Any, **__: Any) -> None:
    """End as the kernel ends a process that used too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_writing(*arguments: Any) -> Any:
    """Write, and die with the last file cut off."""
    for name, length, *_ in WRITE(*arguments):
        os.truncate(Path(arguments[0]) / name, length // 2)
    die()


def names(path: Path) -> list[str]:
    """Return the checkpoints of a path, complete or not."""
    return sorted(folder.name for folder in path.iterdir() if folder.is_dir())


@case(3, killed=(2,))
def the_last_rank_dies_while_it_writes() -> None:
    path = shared_folder() / "killed"
    net, optimizer = build("f32")
    train(net, optimizer, *range(SAVED))
    forebay.checkpoint.save(path, net, optimizer, extra={"steps": SAVED})
    train(net, optimizer, SAVED)
    with mock.patch.object(_core, "write_checkpoint", die_writing if dist.get_rank() == 2 else WRITE):
        # The group's error or DCP's, whatever comes first; what counts is that it comes.
        refused(forebay.checkpoint.save, path, net, optimizer)
    check(net, optimizer, reference("f32", SAVED + 1))
    assert not (path / "00000002" / "manifest.json").exists()
    raise SurvivedError


@case(2, killed=(0, 2))
def the_old_checkpoint_loads_and_then_the_coordinator_dies_before_the_commit() -> None:
    path = shared_folder() / "killed"
    assert names(path) == ["00000001", "00000002"]
    net, optimizer = build("f32")
    assert forebay.checkpoint.load(path, net, optimizer) == {"steps": SAVED}
    check(net, optimizer, reference("f32"))
    train(net, optimizer, SAVED)
    forebay.checkpoint.save(path, net, optimizer, extra={"steps": SAVED + 1})
    assert names(path) == ["00000001", "00000003"]
    train(net, optimizer, SAVED + 1)
    dist.barrier()
    with mock.patch.object(Writer, "finish", side_effect=die):
        refused(forebay.checkpoint.save, path, net, optimizer)
    assert dist.get_rank() == 1
    assert names(path) == ["00000001", "00000003", "00000004"]
    assert not (path / "00000004" / "manifest.json").exists()
    dist.destroy_process_group()
    alone = make()
    optimizer = optimizer_of(alone)
    assert forebay.checkpoint.load(path, alone, optimizer) == {"steps": SAVED + 1}
    check(alone, optimizer, reference("f32", SAVED + 1))
    # The lock of the dead is nobody's, and what it left is taken away.
    forebay.checkpoint.save(path, alone, optimizer, keep_last=1)
    assert names(path) == ["00000005"]
    raise SurvivedError
