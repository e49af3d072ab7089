"""Imports single modules of a project whose package as a whole needs more than is installed."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def hollow(*names: str) -> None:
    """Make packages of the checkout importable without running their ``__init__``; parents come first."""
    for name in names:
        module = ModuleType(name)
        module.__path__ = [str(Path.cwd().joinpath(*name.split(".")))]
        put(name, module)


def put(name: str, module: ModuleType) -> ModuleType:
    """Make a module the one that ``import`` finds under this name."""
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
    return module


def module(name: str, **contents: Any) -> ModuleType:
    """Make a module with these names in it; missing parents are empty."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        parent = ".".join(parts[:end])
        if parent not in sys.modules:
            package = ModuleType(parent)
            package.__path__ = []
            put(parent, package)
    made = ModuleType(name)
    vars(made).update(contents)
    return put(name, made)


def absent(*names: str) -> None:
    """Let imports of packages that are not installed succeed; nothing in them works."""
    missing = {name for name in names if name not in sys.modules and importlib.util.find_spec(name) is None}
    if missing:
        sys.meta_path.append(_Finder(missing))


def empty(*names: str) -> None:
    """Do the same for packages that may be there, and whose contents the tests do not use."""
    sys.meta_path.insert(0, _Finder(set(names)))


class _Empty(ModuleType):
    """A module that has every name: a class that can be a base class, a decorator or an annotation."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda self, *_, **__: None, "__call__": lambda self, given, *_: given})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots: set[str]) -> None:
        self._roots = roots

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self._roots:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: an empty module has no code."""
