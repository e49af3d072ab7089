"""``publish``: a small file for ``forebay top``, replaced once a second.

The file is in a folder that only this user can enter, and only this user can read it. It has numbers, the program's
name and the device; no path, no argument and no name of a parameter. ``crates/cli/src/top`` reads it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import stat
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay._checks import is_number
from forebay._log import logger
from forebay.errors import OptionError, StorageError
from forebay.monitor.figures import stats

if TYPE_CHECKING:
    from forebay.monitor.schema import Stats

PUBLISHED_SCHEMA = 1
"""The version of the file."""
_NAME_LENGTH = 64


class Publisher:
    """Publishes this process's figures until it is closed, or the process ends.

    Parameters
    ----------
    every_s
        Seconds between two versions of the file.
    folder
        Where the file is written.
    """

    def __init__(self, every_s: float, folder: Path) -> None:
        self._every_s = every_s
        self._pid = os.getpid()
        self._began = _start_ticks()
        self._folder = _open_folder(folder)
        self.path = folder / f"{self._pid}.json"
        self._closing = threading.Event()
        self._warned = False
        try:
            self._last = self._write(None)
        except OSError as error:
            os.close(self._folder)
            raise _refused(folder, error) from error
        self._thread = threading.Thread(target=self._run, name="forebay-publish", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            try:
                self._last = self._write(self._last)
            except OSError as error:
                if not self._warned:
                    logger.warning("figures for forebay top were not written: %s", error)
                self._warned = True

    def _write(self, since: Stats | None) -> Stats:
        record = stats(since)
        text = json.dumps(self._published(record), allow_nan=False).encode()
        made, final = f".{self._pid}.new", self.path.name
        with contextlib.suppress(FileNotFoundError):
            os.unlink(made, dir_fd=self._folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(made, flags, 0o600, dir_fd=self._folder)
        try:
            os.write(file, text)
        finally:
            os.close(file)
        os.rename(made, final, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        return record

    def _published(self, record: Stats) -> dict[str, Any]:
        devices = [one["device"] for one in (*record["optimizers"], *record["units"])]
        return {
            "schema": PUBLISHED_SCHEMA,
            "pid": self._pid,
            "start_ticks": self._began,
            "command": _command(),
            "rank": record["rank"],
            "device": (devices or [""])[0],
            "unix_s": record["unix_s"],
            "pinned_bytes": record["pinned_bytes"]["total"],
            "ring_bytes": record["ring_bytes"],
            "fetch_gbps": record["wire"]["fetch_gbps"],
            "store_gbps": record["wire"]["store_gbps"],
            "stalls": record["stalls"]["total"]["count"],
            "stall_s": record["stalls"]["total"]["seconds"],
            "saves": len(record["saves"]),
        }

    def close(self) -> None:
        """Stop, and remove the file. May be called again."""
        # A forked child has a copy of this object, and the file is its parent's.
        if self._closing.is_set() or os.getpid() != self._pid:
            return
        self._closing.set()
        self._thread.join()
        for name in (f".{self._pid}.new", self.path.name):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._folder)
        os.close(self._folder)


_publisher: list[Publisher] = []
_changing = threading.Lock()


def publish(enabled: bool = True, *, every_s: float = 1.0, folder: str | os.PathLike[str] | None = None) -> None:
    """Publish this process's figures on this machine, so that ``forebay top`` shows it; or stop.

    A thread replaces one small file of this user's, in memory, every ``every_s`` seconds. No port is opened. The file
    is removed when the process ends; ``forebay top`` ignores and removes what a killed process has left.

    Parameters
    ----------
    enabled
        True to begin, or to go on with other arguments; False to stop.
    every_s
        Seconds between two versions of the file; at least 0.1.
    folder
        Where the file is written, for ``forebay top --folder``. By default a folder of this user's in ``/run/user``,
        or in ``/dev/shm`` or ``/tmp`` where there is none. It is made with mode 0700, and refused if other users own or
        can enter it.
    """
    if not isinstance(enabled, bool):
        raise OptionError(f"invalid enabled: {enabled!r}; use True or False")
    if not is_number(every_s) or not 0.1 <= every_s <= 3600:
        raise OptionError(f"invalid every_s: {every_s!r}; give seconds from 0.1 to 3600")
    with _changing:
        while _publisher:
            _publisher.pop().close()
        if enabled:
            where = _default_folder() if folder is None else Path(os.fsdecode(folder)).absolute()
            _publisher.append(Publisher(float(every_s), where))


@atexit.register
def _end() -> None:
    for publisher in _publisher:
        publisher.close()


def _begin_child() -> None:
    global _changing
    _changing = threading.Lock()
    # The thread is the parent's, and so is the file.
    _publisher.clear()


os.register_at_fork(after_in_child=_begin_child)


def _default_folder() -> Path:
    """Return the first of the places that ``forebay top`` looks at which can be used."""
    user = os.geteuid()
    own = Path(f"/run/user/{user}")
    if own.is_dir() and own.stat().st_uid == user and os.access(own, os.W_OK):
        return own / "forebay"
    shared = next((place for place in (Path("/dev/shm"), Path("/tmp")) if os.access(place, os.W_OK)), Path("/tmp"))
    return shared / f"forebay-{user}"


def _open_folder(folder: Path) -> int:
    """Make a folder if it is not there; return it open, once it is seen to be this user's alone."""
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _refused(folder, error) from error
    found = os.fstat(opened)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(opened)
        raise StorageError(
            f"{folder} is not this user's alone: owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}; remove "
            "it, or give another folder"
        )
    return opened


def _refused(folder: Path, error: OSError) -> StorageError:
    return StorageError(
        f"figures cannot be published in {folder}: {error.strerror}; give a folder that this user can write to",
        errno=error.errno,
    )


def _start_ticks() -> int:
    """Return when this process began, as the kernel counts it: with the pid it names one process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19])


def _command() -> str:
    """Return the name of the program, without its folder and its arguments."""
    name = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] not in ("", "-c", "-m") else "python"
    return "".join(letter if letter.isprintable() else "?" for letter in name)[:_NAME_LENGTH]
