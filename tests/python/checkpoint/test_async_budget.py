"""What a save beside training copies and what it reads where it lies; who waits for that, and how it is counted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch
from async_helpers import (
    PAGE,
    assert_same,
    build,
    end_of_saves,
    eventually,
    held,
    train,
    values,
)

import forebay
from forebay import _core, _snapshot, checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def no_save_is_left() -> Iterator[None]:
    yield
    end_of_saves()


def test_many_small_optimizers_share_memory_and_threads(tmp_path: Path) -> None:
    model, _ = build(sizes=((16, 16),) * 12)
    optimizers: list[torch.optim.Optimizer] = [forebay.AdamW([parameter]) for parameter in model.parameters()]
    train(model, optimizers, 0)
    kept = values(model, optimizers)
    with held():
        handle = checkpoint.async_save(tmp_path, model, optimizers)
        train(model, optimizers, 1)
        assert handle.progress()["stalls"] == 0
    handle.result()
    assert handle.progress()["copy_memory_bytes"] <= sum(value.nbytes for value in kept.values()) + PAGE
    checkpoint.load(tmp_path, model, optimizers)
    assert_same(values(model, optimizers), kept)


@pytest.mark.parametrize("budget", [None, 64 << 20])
def test_a_small_optimizer_beside_a_large_one_waits_for_nobody(budget: int | None, tmp_path: Path) -> None:
    model, _ = build(sizes=((1500, 1500), (4,)))
    large, small = model.parameters()
    optimizers: list[torch.optim.Optimizer] = [forebay.AdamW([large]), forebay.AdamW([small])]
    train(model, optimizers, 0)
    with held() as gate:
        handle = checkpoint.async_save(tmp_path, model, optimizers, snapshot_budget_bytes=budget)
        # Only for a step that does wait.
        gate.open(after_s=5)
        train(model, optimizers, 1)
        assert not gate.opened.is_set()
        gate.open()
        handle.result()
    assert handle.progress()["stalls"] == 0


def test_memory_is_kept_for_the_next_save_of_several_optimizers(tmp_path: Path) -> None:
    model, _ = build(sizes=((1500, 1500), (4,)))
    optimizers: list[torch.optim.Optimizer] = [forebay.AdamW([parameter]) for parameter in model.parameters()]
    train(model, optimizers, 0)
    checkpoint.release()
    with held():
        handle = checkpoint.async_save(tmp_path, model, optimizers)
        train(model, optimizers, 1)
    handle.result()
    assert eventually(lambda: _core.kept_copy_bytes() >= 8 * 1500 * 1500)
    kept = _core.kept_copy_bytes()
    with held(), mock.patch.object(_snapshot.Snapshot, "copy_ahead"):
        checkpoint.async_save(tmp_path, model, optimizers)
        assert _core.kept_copy_bytes() == kept
    checkpoint.release()
    assert eventually(lambda: _core.kept_copy_bytes() == 0)
