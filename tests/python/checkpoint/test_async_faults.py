"""What can go wrong with a save beside training, and what may be done while one is under way."""

from __future__ import annotations

import gc
import queue
import shutil
import threading
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

import forebay
from forebay import _core, checkpoint
from forebay.checkpoint import contents, ranks
from forebay.checkpoint import snapshot as _snapshot
from forebay.optim.options import check_options
from support.processes import python
from support.saves import ELEMENTS, PAGE, assert_holds, build, end_of_saves, held, train, values
from support.tensors import assert_same

pytestmark = pytest.mark.usefixtures("no_save_is_left")


def saved_once(path: Path) -> tuple[torch.nn.ParameterList, Any, dict[str, torch.Tensor]]:
    """Return a run that was saved after a step and has taken another since, and what it was when saved."""
    model, optimizers = build()
    train(model, optimizers, 0)
    checkpoint.save(path, model, optimizers)
    kept = values(model, optimizers)
    train(model, optimizers, 1)
    return model, optimizers, kept


def broken(path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Let the folder of a save vanish before this method of the writer."""
    original = getattr(checkpoint.Writer, moment)

    def vanish(self: checkpoint.Writer, *arguments: object, **named: object) -> object:
        shutil.rmtree(path / "00000002")
        return original(self, *arguments, **named)

    monkeypatch.setattr(checkpoint.Writer, moment, vanish)


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("moment", ["write_data", "finish"])
def test_an_error_comes_with_the_result(
    moment: str, budget: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizers, kept = saved_once(tmp_path)
    with monkeypatch.context() as patch:
        broken(tmp_path, patch, moment)
        handle = checkpoint.async_save(tmp_path, model, optimizers, keep_last=1, snapshot_budget_bytes=budget)
        train(model, optimizers, 2)
        for _ in range(2):
            with pytest.raises(forebay.StorageError, match=f"cannot (write|find) {tmp_path}/00000002"):
                handle.result()
    assert handle.done()
    assert_holds(tmp_path, "f32", kept)
    # It was told once, so the next save is only a save.
    kept = values(model, optimizers)
    checkpoint.async_save(tmp_path, model, optimizers).result()
    assert_holds(tmp_path, "f32", kept)
    twin, its = build()
    train(twin, its, 0, 1, 2)
    assert_same(values(model, optimizers), values(twin, its))


@pytest.mark.parametrize("following", ["async_save", "save"])
def test_an_error_nobody_asked_for_comes_with_the_next_save(
    following: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizers, kept = saved_once(tmp_path)
    with monkeypatch.context() as patch:
        broken(tmp_path, patch, "write_data")
        checkpoint.async_save(tmp_path, model, optimizers)._done.wait(20)
    save = getattr(checkpoint, following)
    with pytest.raises(forebay.StorageError, match="00000002"):
        save(tmp_path, model, optimizers)
    assert_holds(tmp_path, "f32", kept)
    save(tmp_path, model, optimizers)
    end_of_saves()
    assert_holds(tmp_path, "f32", values(model, optimizers))


class Caller:
    """A thread that does what it is told."""

    def __init__(self) -> None:
        self._tasks: queue.Queue[Any] = queue.Queue()
        self._outcomes: queue.Queue[Any] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                self._outcomes.put(task())
            except Exception as error:
                self._outcomes.put(error)

    def run(self, task: Any) -> Any:
        """Return what a function returns in the thread, or what it raises there."""
        self._tasks.put(task)
        return self._outcomes.get(timeout=50)

    def end(self) -> None:
        """End the thread."""
        self._tasks.put(None)
        self._thread.join(20)


def failed_elsewhere(tmp_path: Path, model: torch.nn.Module) -> Caller:
    """Return a thread whose save to a path that is a file has failed, and was not asked about."""
    (tmp_path / "file").touch()
    caller = Caller()
    assert caller.run(lambda: checkpoint.async_save(tmp_path / "file", model)._done.wait(20)) is True
    return caller


@pytest.mark.parametrize("following", ["save", "async_save"])
@pytest.mark.parametrize("other", ["save", "async_save"])
def test_a_failure_is_raised_in_the_thread_that_saved(following: str, other: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    caller = failed_elsewhere(tmp_path, model)
    # Another run in another thread, which has nothing to do with it.
    for _ in range(2):
        getattr(checkpoint, other)(tmp_path / "other", model)
    error = caller.run(lambda: getattr(checkpoint, following)(tmp_path / "next", model))
    assert isinstance(error, forebay.StorageError)
    assert "file" in str(error)
    assert not isinstance(caller.run(lambda: checkpoint.save(tmp_path / "next", model)), Exception)
    caller.end()
    end_of_saves()
    assert len(list((tmp_path / "other").glob("*/manifest.json"))) == 2


def test_a_failure_is_raised_by_the_next_save_to_its_path(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    caller = failed_elsewhere(tmp_path, model)
    # A program may start a new thread for each save.
    caller.end()
    (tmp_path / "file").unlink()
    with pytest.raises(forebay.StorageError, match="file"):
        checkpoint.save(tmp_path / "file", model)
    checkpoint.save(tmp_path / "file", model)


def test_a_failure_that_no_save_could_raise_is_printed_at_exit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(2, 2)
    failed_elsewhere(tmp_path, model).end()
    checkpoint.async_save(tmp_path / "other", model).result()
    checkpoint.handle.print_failures()
    printed = capsys.readouterr().err
    assert printed.startswith("forebay: an earlier checkpoint was not saved: StorageError: cannot create ")
    assert printed.count("\n") == 1
    end_of_saves()


def test_an_error_that_is_kept_holds_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizers, _ = saved_once(tmp_path)
    extra = torch.zeros(1000)
    with held() as gate:
        broken(tmp_path, monkeypatch, "finish")
        handle = checkpoint.async_save(tmp_path, model, optimizers, extra={"much": extra})
        copies = [weakref.ref(tensor) for tensor in handle._snapshot.state["model"].values()]
        assert all(copy() is not None for copy in copies)
        gate.open()
        handle._done.wait(20)
    gate.manners.clear()
    gc.collect()
    assert all(copy() is None for copy in copies)
    with pytest.raises(forebay.StorageError):
        handle.result()


DISK = """
import resource, signal, sys
from support.saves import *
path = Path(sys.argv[1])
model, optimizers = build()
train(model, optimizers, 0)
checkpoint.async_save(path, model, optimizers, extra={"step": 1}).result()
kept = values(model, optimizers)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, resource.RLIM_INFINITY))
for budget in (None, 0, 6 << 20):
    handle = checkpoint.async_save(path, model, optimizers, keep_last=1, snapshot_budget_bytes=budget)
    train(model, optimizers, 1, 2)
    try:
        handle.result()
    except forebay.StorageError as error:
        print(error.errno, str(path) in str(error))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert_holds(path, "f32", kept, {"step": 1})
now = values(model, optimizers)
checkpoint.async_save(path, model, optimizers, keep_last=1).result()
assert_holds(path, "f32", now)
print(sorted(entry.name for entry in path.iterdir() if entry.is_dir()))
"""


def test_a_disk_that_is_full_in_the_middle(tmp_path: Path) -> None:
    done = python(DISK, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "27 True\n" * 3 + "['00000002']\n"


# Another save while one is under way.


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    model, optimizers = build()
    train(model, optimizers, 0)
    first = values(model, optimizers)
    with held() as gate:
        one = checkpoint.async_save(tmp_path, model, optimizers)
        train(model, optimizers, 1)
        second = values(model, optimizers)
        gate.open(after_s=0.1)
        other = checkpoint.async_save(tmp_path, model, optimizers)
        assert one.done()
        train(model, optimizers, 2)
        other.result()
    assert_holds(tmp_path / "00000001", "f32", first)
    assert_holds(tmp_path / "00000002", "f32", second)


def test_a_second_save_is_refused_if_asked(tmp_path: Path) -> None:
    model, optimizers = build()
    train(model, optimizers, 0)
    kept = values(model, optimizers)
    with held() as gate:
        handle = checkpoint.async_save(tmp_path, model, optimizers, when_busy="refuse")
        train(model, optimizers, 1)
        with pytest.raises(forebay.CheckpointError, match=r"an earlier save is running: .*written_bytes"):
            checkpoint.async_save(tmp_path, model, optimizers, when_busy="refuse")
        gate.open()
        handle.result()
        assert_holds(tmp_path, "f32", kept)
        checkpoint.async_save(tmp_path, model, optimizers, when_busy="refuse").result()


def test_a_plain_save_waits_for_the_first(tmp_path: Path) -> None:
    model, optimizers = build()
    train(model, optimizers, 0)
    first = values(model, optimizers)
    with held() as gate:
        handle = checkpoint.async_save(tmp_path, model, optimizers, snapshot_budget_bytes=0)
        gate.open(after_s=0.1)
        train(model, optimizers, 1)
        checkpoint.save(tmp_path, model, optimizers)
        assert handle.done()
    assert_holds(tmp_path / "00000001", "f32", first)
    assert_holds(tmp_path / "00000002", "f32", values(model, optimizers))


# Other changes while one is under way.


def close(path: Path, model: Any, optimizer: Any) -> Any:
    return optimizer.close


def load_state_dict(path: Path, model: Any, optimizer: Any) -> Any:
    other, (its,) = build("masters")
    train(other, [its], 30)
    state = its.state_dict()
    return lambda: optimizer.load_state_dict(state)


def load_without_masters(path: Path, model: Any, optimizer: Any) -> Any:
    other, (its,) = build("masters")
    train(other, [its], 30)
    state = its.state_dict()
    for kinds in state["state"].values():
        kinds.pop("master_param")
    # Reading makes the masters.
    return lambda: (optimizer.load_state_dict(state), values(model, [optimizer]))


def load_checkpoint(path: Path, model: Any, optimizer: Any) -> Any:
    def load() -> None:
        # By DCP, straight into weights and state; `checkpoint.load` would wait for the save first.
        with ranks.quietly(), ExitStack() as laid_out:
            state = contents.contents_of(model, [optimizer], laid_out, whole=True)
            dcp.load(state, storage_reader=checkpoint.Reader(path / "other"))

    return load


def refresh(path: Path, model: Any, optimizer: Any) -> Any:
    def change() -> None:
        # The weights are copied, or written first; only then may this change them.
        assert checkpoint.handle.current[0]._snapshot.live.written.wait(20)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        optimizer.refresh_master_weights()

    return change


def add_param_group(path: Path, model: Any, optimizer: Any) -> Any:
    extra = torch.nn.Parameter(torch.ones(400, 700, dtype=torch.bfloat16))
    extra.grad = torch.ones_like(extra)
    return lambda: (optimizer.add_param_group({"params": [extra]}), optimizer.step())


def step(path: Path, model: Any, optimizer: Any) -> Any:
    return lambda: train(model, [optimizer], 3, 4)


CHANGES = (close, load_state_dict, load_without_masters, load_checkpoint, refresh, add_param_group, step)


@pytest.mark.parametrize("budget", [None, 2 * ELEMENTS + PAGE, 0])
@pytest.mark.parametrize("prepare", CHANGES)
def test_a_change_during_a_save(prepare: Any, budget: int | None, tmp_path: Path) -> None:
    during_a_save(prepare, "masters", budget, tmp_path)


def test_a_load_during_a_save_of_torchs_optimizer(tmp_path: Path) -> None:
    during_a_save(load_checkpoint, "torch", 0, tmp_path)


def during_a_save(prepare: Any, kind: str, budget: int | None, path: Path) -> None:
    model, optimizers = build(kind)
    train(model, optimizers, 0, 9)
    if prepare is load_checkpoint:
        checkpoint.save(path / "other", model, optimizers)
    train(model, optimizers, 1)
    kept = values(model, optimizers)
    change = prepare(path, model, optimizers[0])
    # Without copiers, which would make everything safe before the change begins; nothing is written before it either.
    with held() as gate, mock.patch.object(_snapshot.Snapshot, "copy_ahead"):
        handle = checkpoint.async_save(path / "run", model, optimizers, snapshot_budget_bytes=budget)
        gate.open(after_s=0.3)
        change()
        handle.result()
    assert_holds(path / "run", kind, kept)


def test_a_closed_optimizer_is_refused_as_a_plain_save_refuses_it(tmp_path: Path) -> None:
    model, optimizers = build()
    train(model, optimizers, 0)
    optimizers[0].close()  # type: ignore[attr-defined]
    for save in (checkpoint.save, checkpoint.async_save):
        with pytest.raises(forebay.OptionError, match="closed"):
            save(tmp_path / "run", model, optimizers)
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_trusted_at_the_call_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizers, kept = saved_once(tmp_path)
    mended = threading.Event()
    prepare = checkpoint.Writer.prepare_local_plan

    def later(self: checkpoint.Writer, plan: Any) -> Any:
        assert mended.wait(20)
        return prepare(self, plan)

    monkeypatch.setattr(checkpoint.Writer, "prepare_local_plan", later)
    optimizers[0].distrust("half of it was read")
    handle = checkpoint.async_save(tmp_path, model, optimizers)
    # Mended from here on, but not what was saved. `checkpoint.load` would wait for the save.
    optimizers[0].load_state_dict(optimizers[0].state_dict())
    optimizers[0].check_trusted("stepped")
    mended.set()
    with pytest.raises(forebay.CheckpointError, match="half of it was read"):
        handle.result()
    assert_holds(tmp_path, "f32", kept)


def test_a_copy_for_which_there_is_no_memory_fails_the_save_and_not_the_step(tmp_path: Path) -> None:
    done = python(
        """
import resource, sys
from support.saves import *
path = Path(sys.argv[1])
model, optimizers = build(sizes=((4000, 4000),))
train(model, optimizers, 0)
with held() as gate:
    handle = checkpoint.async_save(path, model, optimizers)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (16 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    model[0].grad.zero_()
    optimizers[0].step()
    optimizers[0].synchronize()
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    gate.open()
    try:
        handle.result()
    except forebay.CheckpointError as error:
        print(error)
assert not list(path.glob("*/manifest.json"))
optimizers[0].step()
checkpoint.async_save(path, model, optimizers).result()
print("saved")
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "given up before all of it was written" in done.stdout, done.stdout
    assert done.stdout.endswith("saved\n")


def test_a_snapshot_of_an_engine_without_state() -> None:
    engine = _core.Optimizer("cpu", "adamw", check_options(forebay.AdamW, {"chunk_bytes": 1 << 16}))
    snapshot = _core.Snapshot([engine], 0)
    assert snapshot.is_safe()
    assert snapshot.stats() == (0, 0, 0, 0, 0)
