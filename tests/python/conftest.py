"""Fixtures that several folders use: where models are, where state is, and groups of processes."""

from __future__ import annotations

import gc
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch

from support import fake
from support.dist.launch import Outcome, launch
from support.saves import end_of_saves

if TYPE_CHECKING:
    from collections.abc import Iterator

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts jobs in the background so, and tests that press Ctrl-C would wait for ever. What a test starts
    # inherits this.
    signal.signal(signal.SIGINT, signal.default_int_handler)

STAY_TOGETHER = ("distributed/", "test_bench.py")
"""Where tests share what one of them starts: groups of processes, a benchmark's run."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give workers one test after the other, but whole files of those that stay together, and these first."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path, _, name = nodeid.partition("::")
            if not any(place in path for place in STAY_TOGETHER):
                return nodeid
            # Cases end with the number of processes, and each number is a group of its own.
            return f"{path}-{name.rpartition('-')[2]}" if path.endswith("test_dist_cases.py") else path

    return Scheduling(config, log)


IS_FAKE = os.environ.get("FOREBAY_TEST_DEVICE") == fake.NAME
"""Whether tests run on the fake accelerator, with delays in all its work."""
if IS_FAKE:
    fake.enable()
DEVICES = [fake.NAME] if IS_FAKE else ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where models and optimizers are: on the CPU, and on CUDA where there is one."""
    return torch.device("cpu") if request.param == "cpu" else torch.device(request.param, 0)


@pytest.fixture(autouse=IS_FAKE)
def delays() -> Iterator[None]:
    """Delay work of the fake accelerator."""
    with fake.delays(0.5):
        yield


@pytest.fixture(params=["stream", "resident", "host", "hybrid"])
def placement(request: pytest.FixtureRequest) -> str:
    """Where the optimizer's state is."""
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["eager", "lazy"])
def lazy(request: pytest.FixtureRequest) -> bool:
    """How a sleeper wakes."""
    return bool(request.param)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute small tensors on one thread: several would wait for each other on a machine that others use too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> None:
    """Leave what was imported out of later collections: tests ask for hundreds, and torch has a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_save_is_left() -> Iterator[None]:
    """End what a test has left under way."""
    yield
    end_of_saves()


class Groups:
    """Groups of processes that were started, by kind and number of processes."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._outcomes: dict[tuple[str, int], Outcome] = {}

    def outcome(self, kind: str, world: int) -> Outcome:
        """Start a group, unless it has run already, and return how its cases went."""
        if (kind, world) not in self._outcomes:
            folder = self._factory.mktemp(f"{kind}{world}-")
            self._outcomes[kind, world] = launch(kind, world, folder)
        return self._outcomes[kind, world]


@pytest.fixture(scope="session")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Groups:
    """Every group of processes, started once in a session."""
    return Groups(tmp_path_factory)
