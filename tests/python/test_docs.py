"""What the documents name exists: files, functions and tests. Their programs run, and their commands have the options.

A block of Python after the line ``<!-- run -->`` is run here, on the CPU, after the other such blocks of its page.
"""

from __future__ import annotations

import ast
import inspect
import logging
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import forebay
from forebay import checkpoint
from forebay.optim.units.options import UnitKeywords
from support import messages

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md"), ROOT / "bench/README.md"]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
SOURCES = [*ROOT.glob("crates/**/*.rs"), *ROOT.glob("crates/**/*.cu*"), *ROOT.glob("python/**/*.py")]
TESTS = [*ROOT.glob("crates/**/*.rs"), *ROOT.glob("tests/python/**/*.py"), *ROOT.glob("tests/accelerator/*.py")]
TESTS += ROOT.glob("tests/report/*.py")

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


def blocks(page: Path, language: str) -> Iterator[tuple[bool, str]]:
    """Yield the fenced blocks of a page in a language, and whether each one is to be run."""
    fences = re.finditer(rf"(<!-- run -->\n)?^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)
    for fence in fences:
        yield fence[1] is not None, fence[2]


def slug(heading: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_anchors_lead_to_headings() -> None:
    for document in DOCUMENTS:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", document.read_text()):
            there = (document.parent / target).resolve() if target else document
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.M)
            assert anchor in map(slug, headings), f"{document.name}: {target}#{anchor}"


def test_every_page_is_in_the_contents() -> None:
    index = (ROOT / "docs/index.md").read_text()
    for page in ROOT.glob("docs/*.md"):
        # The guide is a list of pages for readers of the source tree.
        assert page.stem in ("index", "guide") or re.search(rf"^{page.stem}$", index, re.M), page.name
    for page in ROOT.glob("docs/integrations/*.md"):
        assert "integrations/[a-z]*" in index or page.stem in index


def test_pictures_are_whole_and_fetch_nothing() -> None:
    pictures = list(ROOT.glob("docs/pictures/*.svg"))
    assert pictures
    pages = "".join(page.read_text() for page in PAGES)
    for picture in pictures:
        assert ET.fromstring(picture.read_text()).find("{http://www.w3.org/2000/svg}title") is not None
        assert not re.search(r"href|url\((?!#)|@import|<script", picture.read_text()), picture.name
        assert f"pictures/{picture.name}" in pages, f"{picture.name} is on no page"
        assert picture.stat().st_size < 10_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_programs_name_what_exists(page: Path) -> None:
    for _, code in blocks(page, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Call):
                check_call(node, f"{page.name}: {ast.unparse(node)}")
            elif isinstance(node, ast.Attribute):
                find(node)


def find(node: ast.expr) -> Any:
    """Return what a dotted name of forebay's stands for; None for other expressions. Raise if there is no such name."""
    if isinstance(node, ast.Name):
        return {"forebay": forebay, "checkpoint": checkpoint}.get(node.id)
    if isinstance(node, ast.Attribute) and inspect.ismodule(owner := find(node.value)):
        if owner is forebay and node.attr == "integrations":
            return None  # it needs the frameworks
        return getattr(owner, node.attr)
    return None


def check_call(node: ast.Call, shown: str) -> None:
    """Raise if a call of a function or class of forebay's gives an argument that it does not take."""
    called = find(node.func)
    if called is None or any(keyword.arg is None for keyword in node.keywords):
        return
    signature = inspect.signature(called)
    # Options that are refused by name are accepted by the signature.
    named = [one for one in signature.parameters.values() if one.kind != inspect.Parameter.VAR_KEYWORD]
    signature = signature.replace(parameters=[*named, *more_keywords(called)])
    starred = any(isinstance(argument, (ast.Starred, ast.Constant)) and is_dots(argument) for argument in node.args)
    keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg is not None}
    try:
        (signature.bind_partial if starred else signature.bind)(*node.args, **keywords)
    except TypeError as error:
        raise AssertionError(f"{shown}: {error}") from error


def more_keywords(called: Any) -> Iterator[inspect.Parameter]:
    """Yield the options of a function that takes those of a typed dict."""
    if called is forebay.offload:
        for name in sorted(UnitKeywords.__required_keys__ | UnitKeywords.__optional_keys__):
            yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)


def is_dots(argument: ast.expr) -> bool:
    return isinstance(argument, ast.Starred) or (isinstance(argument, ast.Constant) and argument.value is ...)


RUN = [page for page in PAGES if any(run for run, _ in blocks(page, "python"))]


@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_programs_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_save_is_left: None) -> None:
    program = "\n".join(code for run, code in blocks(page, "python") if run)
    monkeypatch.chdir(tmp_path)
    logger = logging.getLogger()
    monkeypatch.setattr(logger, "handlers", [*logger.handlers])
    monkeypatch.setattr(logging.getLogger("forebay"), "level", logging.NOTSET)
    exec(compile(program, page.name, "exec"), {"__name__": "__main__"})


def test_pages_that_teach_are_run() -> None:
    assert {"README.md", "quickstart.md", "checkpoints.md", "checkpoint_format.md"} <= {page.name for page in RUN}


def test_commands_have_the_options() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    script = Path(sys.executable).with_name("forebay")
    helps: dict[tuple[str, ...], str] = {}
    seen = 0
    for page in PAGES:
        for line in "".join(code for _, code in blocks(page, "sh")).splitlines():
            words = line.split("#")[0].split()
            if words[:1] == ["make"]:
                assert words[1] in targets, f"{page.name}: {line}"
            if words[:1] != ["forebay"] or "--version" in words:
                continue
            command = tuple(words[1:3] if words[1] in ("plan", "bench") else words[1:2])
            if command not in helps:
                asked = subprocess.run([script, *command, "--help"], capture_output=True, text=True, check=False)
                assert asked.returncode == 0, f"{page.name}: {line}"
                helps[command] = asked.stdout
            for word in words:
                assert not word.startswith("--") or f"{word} " in helps[command].replace("\n", " \n"), f"{line}: {word}"
            seen += 1
    assert seen > 5


def test_troubleshooting_has_the_words_of_the_messages() -> None:
    sources = [*ROOT.glob("python/**/*.py"), *ROOT.glob("crates/**/src/**/*.rs")]
    text = "\n".join(path.read_text() for path in sources)
    # Long texts are cut into several literals.
    text = re.sub(r'"\s*\n\s*f?r?"', "", text)
    text = re.sub(r"\\\n\s*", "", text)
    others = {"one of the variables needed for gradient computation has been modified", "No space left on device"}
    page = (ROOT / "docs/troubleshooting.md").read_text().split("## It is slow")[0]
    known = re.findall(r"^\| `([^`]+)` \|", page, re.M)
    others |= {f"forebay.{name}" for name in forebay.errors.__all__}
    assert len(known) > 50
    assert [words for words in known if words not in text and words not in others] == []


def described() -> list[str]:
    """Return the words that the page on troubleshooting knows messages by."""
    return re.findall(r"^\| `([^`]+)`", (ROOT / "docs/troubleshooting.md").read_text(), re.M)


FORWARDED = {"{}", "layer {} {}"}
"""Warnings whose text is that of another call."""


def test_troubleshooting_has_every_warning() -> None:
    warned = [one for one in messages.of_python() if one.kind == "warning" and one.text not in FORWARDED]
    assert len(warned) > 15
    known = described()
    assert [one for one in warned if not any(words in one.text for words in known)] == []


def test_troubleshooting_has_every_error_class_and_every_error_of_the_core() -> None:
    known = described()
    assert [name for name in forebay.errors.__all__ if f"forebay.{name}" not in known] == []
    # A checkpoint's error is a file and a reason, and has no words of its own.
    core = [one for one in messages.of_rust() if one.text != "{}: {}"]
    assert len(core) > 15
    assert [one for one in core if not any(words in one.text for words in known)] == []


THE_CALLERS_WORDS = re.compile(
    r"(\{\}|module .*|Tensor lr must be 1-element|Invalid .*"  # as torch and Python say it
    r"|.*got an unexpected keyword argument \{\}\{\}"  # ends with the name that is nearest
    r"|(\{\} )?failed( on rank \{\})?: \{\})"  # ends with the error of another rank
)


def test_messages_name_a_remedy() -> None:
    classes = {*forebay.errors.__all__, "warning", "Rust"}
    found = [one for one in (*messages.of_python(), *messages.of_rust()) if one.kind in classes]
    assert len(found) > 250
    without = [one for one in found if "; " not in one.text and not THE_CALLERS_WORDS.fullmatch(one.text)]
    known = {
        # The engine adds the remedy.
        "device {} is not available: {}",
        "device {} is not available: there are {} of type {}",
        # What is open has it.
        "forebay has no update rule for {}, so {}={} does not apply: {}",
        "{}: {}",
        "layer {} {}",
        # It is the remedy.
        "give {}: it names the rule",
    }
    assert [one for one in without if one.text not in known] == []


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs/reference.md").read_text()
    for name in forebay.__all__:
        value = getattr(forebay, name)
        if inspect.ismodule(value) or name in ("__version__", "version"):
            continue
        assert re.search(rf"forebay\.{name}$", page, re.M), name
    listed = re.search(r"automodule:: forebay.checkpoint\n   :members: (.*)", page)
    assert listed is not None
    assert sorted(listed[1].split(", ")) == sorted(checkpoint.__all__)
