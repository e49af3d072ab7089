"""``forebay.publish`` and ``forebay top``: figures go through a private file, and nothing else is opened."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import forebay
from forebay.errors import OptionError, StorageError
from support.optim import make, train
from support.processes import environment, in_child
from support.saves import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

TOP = [sys.executable, "-m", "forebay", "top"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Name a folder to publish in; nothing is published after the test."""
    yield tmp_path / "published"
    forebay.publish(False)


def top(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TOP, "--folder", str(folder), *options], capture_output=True, text=True, timeout=60)


def shown(folder: Path) -> list[dict[str, Any]]:
    done = top(folder, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found: list[dict[str, Any]] = json.loads(done.stdout)["processes"]
    return found


def test_top_shows_what_is_published(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py", "--key", "secret"])
    parameters = make(((300, 70),))
    optimizer = forebay.AdamW(parameters)
    train(optimizer, parameters, 2)
    forebay.publish(every_s=3600, folder=folder)
    (mine,) = shown(folder)
    now = forebay.stats()
    assert mine["pid"] == os.getpid()
    assert mine["command"] == "train.py"
    assert (mine["rank"], mine["saves"]) == (now["rank"], 0)
    assert mine["device"] == now["optimizers"][0]["device"]
    assert mine["pinned_bytes"] == now["pinned_bytes"]["total"] > 0
    assert mine["ring_bytes"] == now["ring_bytes"]
    assert mine["stalls"] == now["stalls"]["total"]["count"]
    text = top(folder, "--once").stdout
    assert str(os.getpid()) in text.splitlines()[1]
    forebay.publish(False)
    assert list(folder.iterdir()) == []
    assert "call forebay.publish()" in top(folder, "--once").stdout


def test_the_file_is_private_and_has_no_paths(folder: Path) -> None:
    old = os.umask(0)
    try:
        forebay.publish(every_s=3600, folder=folder)
    finally:
        os.umask(old)
    (file,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = json.loads(file.read_text())
    assert not [value for value in found.values() if isinstance(value, str) and "/" in value]
    assert len(file.read_bytes()) < 4096


def test_the_file_is_replaced_while_the_process_runs(folder: Path) -> None:
    forebay.publish(every_s=0.1, folder=folder)
    (file,) = folder.glob("*.json")
    first = json.loads(file.read_text())["unix_s"]
    # It is whole at every moment.
    assert eventually(lambda: json.loads(file.read_text())["unix_s"] > first)
    forebay.publish(every_s=3600, folder=folder)
    assert len(list(folder.iterdir())) == 1, "publishing again goes on with the new arguments"


PUBLISHING = """
import sys, time, forebay
forebay.publish(every_s=0.1, folder=sys.argv[1])
print("published", flush=True)
if sys.argv[2] == "wait":
    time.sleep(100)
"""


def publishing(folder: Path, what: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", PUBLISHING, str(folder), what], env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == "published\n"
    return child


def test_a_process_that_ends_removes_its_file(folder: Path) -> None:
    assert publishing(folder, "end").wait(30) == 0
    assert list(folder.iterdir()) == []


def test_what_a_killed_process_left_is_ignored_and_removed(folder: Path) -> None:
    child = publishing(folder, "wait")
    try:
        assert [one["pid"] for one in shown(folder)] == [child.pid]
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(30)
    assert (folder / f"{child.pid}.json").exists()
    assert shown(folder) == []
    assert list(folder.iterdir()) == []


def test_a_forked_child_publishes_nothing_and_leaves_the_file(folder: Path) -> None:
    forebay.publish(every_s=3600, folder=folder)
    before = list(folder.iterdir())

    def child() -> object:
        from forebay.monitor import publisher

        forebay.publish(False)
        publisher._end()
        return len(publisher._publisher)

    assert in_child(child, computes=False) == "0"
    assert list(folder.iterdir()) == before
    assert in_child(lambda: forebay.publish(every_s=3600, folder=folder), computes=False) == "None"
    assert len(list(folder.iterdir())) == 2


def test_folders_that_others_can_enter_are_refused(folder: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    with pytest.raises(
        StorageError, match=r"is not this user's alone: owner \d+, mode 755; remove it, or give another"
    ):
        forebay.publish(folder=shared)
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(private)
    for place in (tmp_path / "link", tmp_path / "nothing" / "there", Path(__file__)):
        with pytest.raises(StorageError, match=r"cannot be published in .*; give a folder"):
            forebay.publish(folder=place)
    assert list(private.iterdir()) == []
    forebay.publish(folder=folder)
    with pytest.raises(StorageError):
        forebay.publish(folder=shared)
    assert list(folder.iterdir()) == [], "what was published before has ended"


def test_wrong_arguments_are_refused(folder: Path) -> None:
    for period in (0, -1, 0.01, 1e9, float("nan"), "1", True):
        with pytest.raises(OptionError, match=r"invalid every_s: .*; give seconds from 0\.1 to 3600"):
            forebay.publish(every_s=period, folder=folder)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="invalid enabled: 'on'; use True or False"):
        forebay.publish("on", folder=folder)  # type: ignore[arg-type]
    assert not folder.exists()


def test_the_default_folder_is_one_that_top_looks_at() -> None:
    from forebay.monitor.publisher import _default_folder

    source = (Path(__file__).parents[3] / "crates/cli/src/top/published.rs").read_text()
    looked_at = [one.replace("{user}", str(os.geteuid())) for one in re.findall(r'format!\("(/[^"]+)"\)', source)]
    assert str(_default_folder()) in looked_at
    forebay.publish(every_s=3600)
    try:
        done = subprocess.run([*TOP, "--json"], capture_output=True, text=True, timeout=60)
        assert os.getpid() in [one["pid"] for one in json.loads(done.stdout)["processes"]]
    finally:
        forebay.publish(False)


class Screen:
    """``forebay top`` in a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        self.child, self.terminal = pty.fork()
        if self.child == 0:
            os.execve(TOP[0], [*TOP, "--every", "0.1", "--folder", str(folder)], {**environment(), "TERM": "xterm"})
        self.text = ""

    def read_until(self, wanted: str, after: int = 0) -> None:
        """Read what is drawn until a text has come."""
        until = time.monotonic() + 50
        while wanted not in self.text[after:]:
            assert time.monotonic() < until, self.text
            if select.select([self.terminal], [], [], 1)[0]:
                self.text += os.read(self.terminal, 65536).decode()

    def end(self) -> int:
        """Press Ctrl-C; return the status."""
        os.write(self.terminal, b"\x03")
        status = os.waitpid(self.child, 0)[1]
        os.close(self.terminal)
        return status


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_in_a_terminal_the_picture_is_replaced(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    screen = Screen(folder)
    screen.read_until("call forebay.publish()")
    forebay.publish(every_s=0.1, folder=folder)
    screen.read_until(f"{os.getpid()}  ")
    assert "\x1b[2A" in screen.text, "it moves up over the two lines that it has drawn"
    here = len(screen.text)
    forebay.publish(False)
    screen.read_until("no process", here)
    # As a program that takes no notice of it ends.
    assert os.WTERMSIG(screen.end()) == signal.SIGINT
