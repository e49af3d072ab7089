"""What the documents name exists: files, functions and tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "bench/README.md"]
SOURCES = [*ROOT.glob("crates/**/*.rs"), *ROOT.glob("crates/**/*.cu*"), *ROOT.glob("python/**/*.py")]
TESTS = [*ROOT.glob("crates/**/*.rs"), *ROOT.glob("tests/python/**/*.py"), *ROOT.glob("tests/accelerator/*.py")]

DEFINITION = re.compile(
    r"\b(?:fn|def|class|struct|enum|trait|static|const|mod|__global__ \w+)\s+(?:[\w<>]+::)?(\w+)|^([A-Z_]+)\b[ :]", re.M
)


def defined(files: list[Path]) -> set[str]:
    """Return all names that files define."""
    found = (pair for path in files for pair in DEFINITION.findall(path.read_text()))
    return {name for pair in found for name in pair if name}


def section(title: str) -> str:
    """Return a section of ARCHITECTURE.md."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    return text[text.index(f"\n## {title}\n") :].split("\n## ", 2)[1]


def test_links_lead_to_files() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_tour_names_functions_that_exist() -> None:
    known = defined(SOURCES)
    named = re.findall(r"`(?:[A-Z]\w*(?:::|\.))?([A-Za-z_]\w*)`", section("A guided tour"))
    assert len(named) > 80
    assert [name for name in named if name not in known] == []


def test_the_tour_names_files_that_exist() -> None:
    files = {str(path.relative_to(ROOT)) for path in SOURCES}
    named = re.findall(r"`([\w/]+\.(?:rs|py|cu))`", section("A guided tour") + section("The rooms"))
    assert len(named) > 60
    assert [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in files)] == []


@pytest.mark.parametrize("title", ["Invariants", "Testing"])
def test_the_tests_that_show_an_invariant_exist(title: str) -> None:
    known = defined(TESTS)
    wanted = re.findall(r"`((?:test_)?[a-z]+(?:_[a-z0-9]+){2,}\*?)`", section(title))
    lints = {"undocumented_unsafe_blocks", "unsafe_op_in_unsafe_fn"}
    for name in set(wanted) - lints:
        begins = name.rstrip("*")
        assert any(one == name or (name.endswith("*") and one.startswith(begins)) for one in known), name
