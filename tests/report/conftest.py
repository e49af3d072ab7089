"""Fixtures: one browser for all tests, and pages made by the installed command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import traces
from browser import Browser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Path]:
    """Return a function that makes the page of a trace."""

    def page(trace: dict[str, Any]) -> Path:
        folder = tmp_path_factory.mktemp("page")
        (folder / "run.json").write_text(json.dumps(trace))
        command = [
            Path(sys.executable).with_name("forebay"),
            "report",
            folder / "run.json",
            "-o",
            folder / "report.html",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return folder / "report.html"

    return page


@pytest.fixture(scope="session")
def plain(make: Callable[[dict[str, Any]], Path]) -> Path:
    """Return the page of one rank."""
    return make(traces.plain())


@pytest.fixture(scope="session")
def merged(make: Callable[[dict[str, Any]], Path]) -> Path:
    """Return the page of two ranks, of which the second is slower."""
    return make(traces.merged([traces.plain(0), traces.plain(1, slow=1.2)]))


@pytest.fixture
def page(browser: Browser, plain: Path) -> Browser:
    """Return a browser that shows the page of one rank."""
    browser.open(plain)
    return browser
