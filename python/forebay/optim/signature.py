"""What ``help`` and ``inspect`` show of an optimizer: its own arguments, and the options that all optimizers take."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

from forebay.optim.options import Keywords, resolve

SECTION = "Other Parameters"


def describe(cls: Any, base: Any) -> None:
    """Give a class the options of its base class, in its docstring and in its signature."""
    options = inspect.signature(resolve).parameters.values()
    own = list(inspect.signature(cls.__init__).parameters.values())[1:]
    if own and own[-1].kind is inspect.Parameter.VAR_KEYWORD:
        # The types themselves: what a ``TypedDict`` keeps of annotations as text is not for readers.
        types = get_type_hints(Keywords)
        shown = [one.replace(annotation=types[one.name]) for one in options]
        cls.__signature__ = inspect.Signature([*own[:-1], *shown])
    doc, shared = inspect.cleandoc(cls.__doc__ or ""), inspect.cleandoc(base.__doc__ or "")
    if SECTION not in doc and SECTION in shared:
        cls.__doc__ = f"{doc}\n\n{shared[shared.index(SECTION) :]}"
