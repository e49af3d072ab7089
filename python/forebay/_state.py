"""The ``state`` of an optimizer whose state the device may still be writing."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, ItemsView, ValuesView

    import torch


class State(defaultdict["torch.Tensor", dict[str, Any]]):
    """A parameter's state by parameter, as in ``torch.optim``, read only after its bytes have arrived.

    Looking up one parameter waits for the stores into that parameter's state and for nothing else; going through all
    of them waits for all stores. Tensors that were looked up before a step are overwritten by that step: look them up
    again, or call ``synchronize``.
    """

    def __init__(self, settle: Callable[[Any], None]) -> None:
        super().__init__(dict)
        self._settle = settle

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        self._settle(parameter)
        return super().__getitem__(parameter)

    def get(self, parameter: torch.Tensor, default: Any = None) -> Any:
        """Return a parameter's state, or the default."""
        self._settle(parameter)
        return super().get(parameter, default)

    def items(self) -> ItemsView[torch.Tensor, dict[str, Any]]:  # type: ignore[override]
        """Go through all parameters and their state."""
        self._settle(None)
        return super().items()

    def values(self) -> ValuesView[dict[str, Any]]:  # type: ignore[override]
        """Go through the state of all parameters."""
        self._settle(None)
        return super().values()

    def __reduce__(self) -> Any:
        # A copy belongs to no engine: it is what torch's own optimizers have.
        plain: defaultdict[Any, Any] = defaultdict(dict)
        plain.update(self.items())
        return plain.__reduce__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        import copy

        plain: defaultdict[Any, Any] = defaultdict(dict)
        plain.update(self.items())
        return copy.deepcopy(plain, memo)
