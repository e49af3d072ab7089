"""The messages of the package, as its sources have them: what a program may get, with names and numbers left open."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
OPEN = "{}"
"""What stands for a name or a number."""


class Message(NamedTuple):
    """One message, and where it is."""

    where: str
    kind: str
    text: str


def _text(node: ast.expr, names: dict[str, ast.expr]) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, {}) if isinstance(part, ast.Constant) else OPEN for part in node.values)
    if isinstance(node, ast.Name) and node.id in names:
        return _text(names[node.id], {})
    return OPEN


def of_python() -> list[Message]:
    """Return the messages of exceptions and warnings in the Python package."""
    found = []
    for path in sorted((ROOT / "python/forebay").rglob("*.py")):
        tree = ast.parse(path.read_text())
        assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
        names = {node.targets[0].id: node.value for node in assigned if isinstance(node.targets[0], ast.Name)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = ast.unparse(node.func).rpartition(".")[2]
            if called.endswith("Error") or called in ("warn", "warn_once"):
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                found.append(
                    Message(where, "warning" if called.startswith("warn") else called, _text(node.args[0], names))
                )
    return found


def of_rust() -> list[Message]:
    """Return the messages of the error enums of the library crates."""
    found = []
    for crate in ("device", "engine"):
        text = (ROOT / f"crates/{crate}/src/error.rs").read_text()
        for written, variant in re.findall(r'#\[error\(\s*"((?:[^"\\]|\\.|\\\n)*)".*?\)\]\s*(\w+)', text, re.S):
            plain = re.sub(r"\\\n\s*", "", written)
            found.append(Message(f"{crate}: {variant}", "Rust", re.sub(r"\{[^}]*\}", OPEN, plain)))
    return found
