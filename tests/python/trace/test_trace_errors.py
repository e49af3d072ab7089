"""What a trace refuses, and what it does when something goes wrong around it."""

from __future__ import annotations

import pytest
import torch

import forebay
from forebay import _trace
from forebay.errors import OptionError
from support.processes import in_child, python
from support.trace import blocks, read, steps


def test_an_error_in_the_block_goes_on_and_the_file_is_there(tmp_path):
    path = tmp_path / "run.json"
    model = blocks(torch.device("cpu"))
    optimizer = forebay.AdamW(model.parameters(), chunk_bytes=1 << 14)

    def broken() -> None:
        with forebay.trace(path):
            steps(model, optimizer, 1)
            raise KeyError("on purpose")

    with pytest.raises(KeyError, match="on purpose"):
        broken()
    assert read(path).names("pass") == ["forward", "backward", "step"]
    assert _trace.current is None
    with forebay.trace(path):
        pass
    assert read(path).spans("pass") == []


def test_a_process_has_one_trace_at_a_time(tmp_path):
    with forebay.trace(tmp_path / "first.json") as first:
        with pytest.raises(OptionError, match="one is being recorded already"), forebay.trace(tmp_path / "second.json"):
            pass
        with pytest.raises(OptionError, match="used already"), first:
            pass
    assert not (tmp_path / "second.json").exists()
    read(tmp_path / "first.json")
    with pytest.raises(OptionError, match="used already"), first:
        pass


@pytest.mark.parametrize("name", ["absent/run.json", "."])
def test_a_path_that_cannot_be_written_is_refused_at_entry(tmp_path, name):
    entered = False
    with pytest.raises(forebay.Error, match="cannot write"), forebay.trace(tmp_path / name):
        entered = True
    assert not entered
    assert _trace.current is None
    # Nothing is left of it: the next one begins.
    with forebay.trace(tmp_path / "run.json"):
        pass
    read(tmp_path / "run.json")


def test_an_older_file_stays_until_the_new_one_is_written(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("an older file" * 10_000)
    with forebay.trace(path):
        assert path.read_text().startswith("an older file")
    read(path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": 3}, "invalid path: 3"),
        ({"path": b"run.json"}, "invalid path"),
        ({"path": "x", "capacity": 0}, "invalid capacity: 0"),
        ({"path": "x", "capacity": 1.5}, "invalid capacity: 1.5"),
        ({"path": "x", "nvtx": "yes"}, "invalid nvtx"),
        ({"path": "x", "probe": 50.0}, "invalid probe: float; give what"),
        ({"path": "x", "probe": {"copies": []}}, "invalid probe: dict"),
    ],
)
def test_options_are_checked_when_it_is_made(options, words):
    with pytest.raises(OptionError, match=words):
        forebay.trace(**options)


def test_nvtx_needs_cuda(tmp_path):
    if torch.cuda.is_available():
        with forebay.trace(tmp_path / "run.json", nvtx=True):
            torch.nn.Linear(2, 2)(torch.ones(2))
        read(tmp_path / "run.json")
    else:
        with pytest.raises(OptionError, match="nvtx=True needs CUDA"):
            forebay.trace("x", nvtx=True)


def test_passes_are_nvtx_ranges_where_that_is_asked_for(tmp_path, monkeypatch):
    calls: list[object] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_start", lambda name: calls.append(name) or len(calls))
    monkeypatch.setattr(torch.cuda.nvtx, "range_end", calls.append)
    trace = forebay.trace(tmp_path / "run.json")
    trace._nvtx = True
    model = blocks(torch.device("cpu"))
    with trace:
        steps(model, torch.optim.SGD(model.parameters()), 1)
    assert calls == ["forward", 1, "backward", 3, "step", 5]


def test_a_forked_child_records_and_writes_nothing(tmp_path):
    path = tmp_path / "run.json"

    def train() -> str:
        model = blocks(torch.device("cpu"))
        optimizer = forebay.AdamW(model.parameters(), chunk_bytes=1 << 14)
        steps(model, optimizer, 1)
        trace.__exit__(None, None, None)
        with forebay.trace(tmp_path / "child.json"):
            steps(model, optimizer, 1)
        return str(_trace.current)

    with forebay.trace(path) as trace:
        # Torch's and forebay's threads begin after the fork.
        assert in_child(train) == "None"
        assert not path.read_bytes()
    assert read(path).spans("pass") == []
    assert read(tmp_path / "child.json").names("pass") == ["forward", "backward", "step"]


def test_without_a_trace_nothing_is_imported_or_listened_to():
    code = """
import sys, torch, forebay
model = torch.nn.Linear(8, 8)
optimizer = forebay.AdamW(model.parameters(), chunk_bytes=1536)
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
print("forebay.tracing" in sys.modules, len(torch.nn.modules.module._global_forward_pre_hooks))
"""
    done = python(code)
    assert done.stdout.split() == ["False", "0"], done.stderr


def test_each_rank_has_a_path_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert forebay.trace(tmp_path / "run.json").path == tmp_path / "run.rank2.json"
    assert forebay.trace(tmp_path / "run-{rank}.json").path == tmp_path / "run-2.json"
    with forebay.trace(tmp_path / "run.json"):
        pass
    header = read(tmp_path / "run.rank2.json").header
    assert (header["rank"], header["ranks"]) == (2, 4)
    monkeypatch.setenv("RANK", "0")
    assert forebay.trace(tmp_path / "run.json").path == tmp_path / "run.json"
    for rank, count in (("4", "4"), ("x", "4"), ("0", "")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", count)
        assert forebay.trace("run.json").path.name == "run.json"


def test_the_command_merges_and_refuses(tmp_path):
    for rank in range(2):
        with forebay.trace(tmp_path / f"{rank}.json"):
            pass
    assert (
        forebay._core.command(
            [
                "forebay",
                "trace",
                "merge",
                str(tmp_path / "0.json"),
                str(tmp_path / "1.json"),
                "-o",
                str(tmp_path / "all.json"),
            ],
            "a test",
        )
        == 1
    )
    assert not (tmp_path / "all.json").exists()
