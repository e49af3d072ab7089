"""Weights & Biases: a real run, offline, takes the live figures and keeps the program's own steps."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch

import forebay
from forebay.monitor import scalars

if TYPE_CHECKING:
    from pathlib import Path

wandb: Any = pytest.importorskip("wandb")


def test_a_run_keeps_its_steps_and_has_the_figures(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = forebay.AdamW(model.parameters())
    settings = wandb.Settings(silent=True, disable_git=True, console="off")
    run = wandb.init(project="live", dir=str(tmp_path), mode="offline", settings=settings)
    try:
        with forebay.log_stats(run, every=2, optimizer=optimizer):
            for step in range(6):
                model(torch.ones(4, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log({"loss": float(step)}, step=step)
                assert run.step == step, "the figures do not advance the run"
        run.log({})
        found = dict(run.summary)
    finally:
        run.finish()
    assert found["loss"] == 5.0
    assert found["forebay/step"] == 6
    assert {f"forebay/{name}" for name in scalars(forebay.stats())} <= found.keys()
    assert found["forebay/pinned_bytes/total"] == forebay.stats()["pinned_bytes"]["total"]


def test_the_calls_are_those_of_a_run() -> None:
    run = wandb.Run
    inspect.signature(run.log).bind(None, {"a": 1}, commit=False)
    inspect.signature(run.define_metric).bind(None, "forebay/*", step_metric="forebay/step")
