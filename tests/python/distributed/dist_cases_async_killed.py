"""A case that kills a rank during a save beside training; it comes last, since no other can follow."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import torch.distributed as dist

from forebay.checkpoint import async_save, load
from support.dist.checkpoints import SAVED, build, check, optimizer_of, reference, refused, train
from support.dist.models import make
from support.dist.registry import SurvivedError, case, shared_folder
from support.dist.saves import complete, writer


@case(2, killed=(1,))
def a_rank_that_is_killed_while_it_writes_fails_the_save_of_the_other() -> None:
    path = shared_folder() / "killed"
    net, optimizer = build("f32")
    train(net, optimizer, *range(SAVED))
    async_save(path, net, optimizer, extra={"steps": SAVED}).result()
    train(net, optimizer, SAVED)
    dist.barrier()

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with writer(1, die):
        handle = async_save(path, net, optimizer, keep_last=1)
        with contextlib.suppress(Exception):
            handle.result(timeout=9)
        assert handle.done(), "it must not wait for the dead"
        assert refused(handle.result) is not None
    # Training's own state is whole, and the old checkpoint loads, alone too.
    check(net, optimizer, reference("f32", SAVED + 1))
    assert complete(path) == ["00000001"]
    dist.destroy_process_group()
    alone = make()
    optimizer = optimizer_of(alone)
    assert load(path, alone, optimizer) == {"steps": SAVED}
    check(alone, optimizer, reference("f32"))
    async_save(path, alone, optimizer, keep_last=1).result()
    assert complete(path) == ["00000003"]
    raise SurvivedError
