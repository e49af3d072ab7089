"""Figures are logged once for each step: as lines of JSON, in TensorBoard's own files, and in a run of wandb."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
from forebay.errors import OptionError
from forebay.monitor import scalars
from support.optim import TINY, make, run, train
from support.processes import environment
from support.tensors import assert_same


@pytest.fixture
def board() -> Any:
    """Import TensorBoard's reader of event files, and torch's writer. It is not on every machine with a GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        return reader, importlib.import_module("torch.utils.tensorboard")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def optimizer_of(**options: Any) -> tuple[Any, list[Any]]:
    parameters = make(((40, 7),))
    return forebay.AdamW(parameters, **options), parameters


@pytest.mark.parametrize("every", [1, 2, 3])
def test_each_line_is_the_record_of_a_step(tmp_path: Path, every: int) -> None:
    optimizer, parameters = optimizer_of()
    path = tmp_path / "new" / "figures.jsonl"
    with forebay.log_stats(path, every=every, optimizer=optimizer):
        train(optimizer, parameters, 7)
    train(optimizer, parameters, 2)
    found = lines(path)
    assert [one["step"] for one in found] == list(range(every, 8, every))
    assert all({"step", *forebay.stats()} == one.keys() for one in found)
    assert [one["seconds"] for one in found] == sorted(one["seconds"] for one in found)
    for before, after in itertools.pairwise(found):
        assert after["wire"]["seconds"] == after["seconds"] - before["seconds"], "rates are those between two lines"


def test_lines_are_added_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    for _ in range(2):
        with forebay.StatsLogger(str(path)) as logger:
            logger.log(7)
    assert [one["step"] for one in lines(path)] == [7, 7]


def test_without_an_optimizer_the_first_that_steps_counts(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    first, of_first = optimizer_of()
    second = torch.optim.SGD(of_second := make(((5,),)))
    with forebay.log_stats(path):
        for step in range(3):
            train(first, of_first, range(step, step + 1))
            train(second, of_second, range(step, step + 1))
    assert [one["step"] for one in lines(path)] == [1, 2, 3]


def test_an_optimizer_in_a_wrapper_counts(tmp_path: Path) -> None:
    optimizer, parameters = optimizer_of()

    class Wrapper:
        def __init__(self, inner: Any) -> None:
            self.optimizer = inner

        def step(self) -> None:
            self.optimizer.step()

    with forebay.log_stats(tmp_path / "a.jsonl", optimizer=Wrapper(optimizer)):
        train(optimizer, parameters, 2)
    assert len(lines(tmp_path / "a.jsonl")) == 2


def test_logging_changes_no_bit(board: Any, tmp_path: Path) -> None:
    plain = run(device="cpu", steps=5, chunk_bytes=TINY, max_grad_norm=0.5)
    with forebay.log_stats(tmp_path / "a.jsonl"), forebay.log_stats(tmp_path / "board"):
        logged = run(device="cpu", steps=5, chunk_bytes=TINY, max_grad_norm=0.5)
    for expected, found in zip(plain, logged, strict=True):
        assert_same(found, expected)
    assert len(lines(tmp_path / "a.jsonl")) == 5


def events(reader: Any, folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard reads from a folder: for each name, steps and values."""
    read = reader.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return {name: [(one.step, one.value) for one in read.Scalars(name)] for name in read.Tags()["scalars"]}


@pytest.mark.parametrize("by_folder", [True, False], ids=["folder", "writer"])
def test_tensorboard_reads_the_scalars(board: Any, tmp_path: Path, by_folder: bool) -> None:
    reader, writing = board
    optimizer, parameters = optimizer_of()
    train(optimizer, parameters, 1)
    to = str(tmp_path) if by_folder else writing.SummaryWriter(str(tmp_path))
    with forebay.log_stats(to, every=2, optimizer=optimizer), forebay.log_stats(tmp_path / "a.jsonl", every=2):
        train(optimizer, parameters, range(1, 5))
    if not by_folder:
        to.add_scalar("loss", 1.0, 3)  # type: ignore[attr-defined]
        to.close()  # type: ignore[attr-defined]
    found = events(reader, tmp_path)
    wanted = {f"forebay/{name}" for name in scalars(forebay.stats())}
    assert found.keys() == (wanted if by_folder else wanted | {"loss"})
    assert all([step for step, _ in found[name]] == [2, 4] for name in wanted)
    pinned = [(one["step"], float(one["pinned_bytes"]["total"])) for one in lines(tmp_path / "a.jsonl")]
    assert found["forebay/pinned_bytes/total"] == pinned


class Run:
    """Takes what ``wandb.Run`` takes; ``tests/integrations/test_wandb.py`` uses the real one, and compares."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.metrics: list[tuple[str, Any]] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        """Note a metric and the metric that counts its steps."""
        self.metrics.append((name, step_metric))

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        """Note a row; only rows that the program writes may advance its steps."""
        assert step is None
        assert commit is False
        self.rows.append(data)


def test_a_run_gets_the_scalars_for_its_next_row() -> None:
    optimizer, parameters = optimizer_of()
    to = Run()
    with forebay.log_stats(to, optimizer=optimizer):
        train(optimizer, parameters, 3)
    assert to.metrics == [("forebay/*", "forebay/step")]
    assert [row["forebay/step"] for row in to.rows] == [1, 2, 3]
    assert to.rows[0].keys() == {"forebay/step", *(f"forebay/{name}" for name in scalars(forebay.stats()))}


KILLED = """
import os, sys, torch, forebay
model = torch.nn.Linear(8, 8)
optimizer = forebay.AdamW(model.parameters())
forebay.log_stats(sys.argv[1])
for step in range(10**9):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    if step == 5:
        print("stepped", flush=True)
"""


def test_lines_survive_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == "stepped\n"
        child.send_signal(signal.SIGKILL)
    assert child.wait(30) == -signal.SIGKILL
    text = path.read_text()
    assert text.endswith("}\n")
    assert [json.loads(line)["step"] for line in text.splitlines()][:5] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("all_ranks", [False, True])
def test_other_ranks_write_nothing_or_a_file_of_their_own(
    board: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_ranks: bool
) -> None:
    monkeypatch.setenv("RANK", "3")
    optimizer, parameters = optimizer_of()
    with (
        forebay.log_stats(tmp_path / "a.jsonl", all_ranks=all_ranks),
        forebay.log_stats(tmp_path / "board", all_ranks=all_ranks),
    ):
        train(optimizer, parameters, 2)
    written = sorted(os.fspath(path.relative_to(tmp_path)) for path in tmp_path.iterdir())
    assert written == (["a.rank3.jsonl", "board"] if all_ranks else [])
    if all_ranks:
        assert [one["rank"] for one in lines(tmp_path / "a.rank3.jsonl")] == [3, 3]
        assert [path.name for path in (tmp_path / "board").iterdir()] == ["rank3"]


def test_a_sink_that_fails_ends_the_log_and_not_the_training(tmp_path: Path) -> None:
    class Broken(Run):
        def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
            raise OSError("No space left on device")

    optimizer, parameters = optimizer_of()
    with forebay.log_stats(Broken(), optimizer=optimizer):
        with pytest.warns(UserWarning, match="no longer logged: OSError: No space left on device; make room"):
            train(optimizer, parameters, 1)
        train(optimizer, parameters, 2)
    with pytest.raises(OSError, match="No space left"):
        forebay.StatsLogger(Broken()).log()


def test_what_cannot_be_a_sink_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (3, None, object(), Run):
        with pytest.raises(OptionError, match=r"cannot be written to .*; give a path that ends in \.jsonl, a folder"):
            forebay.StatsLogger(wrong)
    for every in (0, -1, 1.5, True, "2"):
        with pytest.raises(OptionError, match="invalid every"):
            forebay.StatsLogger(Run(), every=every)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"invalid optimizer: int; give a torch\.optim\.Optimizer"):
        forebay.log_stats(Run(), optimizer=3)
    with forebay.log_stats(Run()) as logger, pytest.raises(OptionError, match="started already"):
        logger.start()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(OptionError, match="the package tensorboard is not installed; install it, or give a path"):
        forebay.log_stats(tmp_path)


def test_log_stats_takes_what_the_class_takes() -> None:
    own = list(inspect.signature(forebay.log_stats).parameters.values())
    assert own == list(inspect.signature(forebay.StatsLogger).parameters.values())
