"""Groups of processes for the tests in this folder, each started once in a session."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helper modules beside this file

from dist_launch import Outcome, launch


class Groups:
    """The groups that were started, by kind and number of processes."""

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
    return Groups(tmp_path_factory)
