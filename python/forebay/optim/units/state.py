"""The ``state`` of an optimizer that runs in units: the optimizer's own dicts, with tensors on the host."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, ItemsView, ValuesView


class UnitState(defaultdict["torch.Tensor", Any]):
    """The state of each parameter, as in ``torch.optim``. Reading waits until the bytes have arrived.

    Looking up one parameter waits for the stores of its unit, and iterating for all. A step overwrites tensors that
    were looked up before it: look them up again after the step, or call ``synchronize``.

    Parameters
    ----------
    settle
        Waits for the state of a parameter; with None for all state.
    """

    def __init__(self, settle: Callable[[Any], None]) -> None:
        super().__init__(dict)
        self._settle = settle

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        self._settle(parameter)
        return super().__getitem__(parameter)

    def get(self, parameter: torch.Tensor, default: Any = None) -> Any:
        """Return a parameter's state, or the default."""
        self._settle(parameter)
        return super().get(parameter, default)

    def items(self) -> ItemsView[torch.Tensor, Any]:  # type: ignore[override]
        """Return all parameters with their state."""
        self._settle(None)
        return super().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """Return the state of all parameters."""
        self._settle(None)
        return super().values()

    def pop(self, parameter: torch.Tensor, *default: Any) -> Any:
        """Remove a parameter's state and return it."""
        self._settle(parameter)
        return super().pop(parameter, *default)

    def popitem(self) -> tuple[torch.Tensor, Any]:
        """Remove the last parameter's state and return both."""
        self._settle(None)
        return super().popitem()

    def plain(self) -> defaultdict[Any, Any]:
        """Return the state as a dict of torch's kind, with the same values."""
        found: defaultdict[Any, Any] = defaultdict(dict)
        found.update(self.items())
        return found

    def __reduce__(self) -> Any:
        return self.plain().__reduce__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.plain(), memo)

    def __copy__(self) -> Any:
        return self.plain()

    copy = __copy__
