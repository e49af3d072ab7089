"""What stands in ``parameter.grad`` for a gradient that an overlapped step has taken.

A gradient that was taken must not look like one that never was: ``clip_grad_norm_`` skips a gradient that is None, and
training would go on without clipping. So any use of this one raises an error that names what to do.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Self

import torch

from forebay.errors import OptionError
from forebay.optim.overlap.getters import GETTERS, METADATA

if TYPE_CHECKING:
    from forebay.optim.overlap.units import Steps

_ZERO = {torch.Tensor.zero_, torch._foreach_zero_}
"""What ``zero_grad(set_to_none=False)`` of a module and of an optimizer call."""

_PASSES: set[Any] = {
    *(getter for name, getter in GETTERS.items() if name not in ("data", "grad")),
    *METADATA,
    torch.Tensor.requires_grad_,
    torch.Tensor.detach_,
}
"""What needs no memory: ``zero_grad`` and torch's checks of gradients use these."""


class ConsumedGradient(torch.Tensor):
    """Has the shape, type and device of a gradient, and no memory."""

    # Weak: torch's gradient field is unknown to Python's collector, so a circle through it would never be freed.
    _overlap: weakref.ref[Steps]
    _parameter: weakref.ref[torch.Tensor]

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, overlap: weakref.ref[Any]) -> Self:
        """Return the stand-in for a parameter's gradient."""
        make: Any = torch.Tensor._make_wrapper_subclass
        made: Self = make(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        made._overlap, made._parameter = overlap, weakref.ref(parameter)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer questions about shape and type, become zeros for ``zero_grad``, and refuse everything else."""
        if func in _PASSES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _ZERO and not kwargs and _become_zeros(args[0]):
            return args[0]
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse everything that cannot have the gradient back; autograd comes here when it adds to a gradient."""
        if _are_back((args, kwargs)):
            return func(*_real(args), **_real(kwargs or {}))
        raise OptionError(_refusal(_first((args, kwargs)), func))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ConsumedGradient(shape={tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"

    @property
    def _local_tensor(self) -> torch.Tensor:
        # FSDP2 adds to this.
        if _are_back(self):
            inner: torch.Tensor = _real(self)._local_tensor
            return inner
        raise OptionError(_refusal(self, "_local_tensor"))


def is_consumed(gradient: torch.Tensor | None) -> bool:
    """Whether a gradient was taken by an overlapped step."""
    return type(gradient) is ConsumedGradient


def put_zeros(parameter: torch.Tensor) -> None:
    """Replace a gradient that a step has used by zeros, as ``zero_grad(set_to_none=False)`` leaves them."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.grad = torch.zeros_like(parameter, requires_grad=False)


def _become_zeros(gradients: Any) -> bool:
    """Do what ``zero_`` and ``_foreach_zero_`` do, if the step that took these gradients was taken."""
    several = list(gradients) if isinstance(gradients, (list, tuple)) else [gradients]
    consumed = [gradient for gradient in several if is_consumed(gradient)]
    for gradient in consumed:
        overlap, parameter = gradient._overlap(), gradient._parameter()
        if parameter is None or parameter.grad is not gradient or (overlap is not None and overlap.is_begun):
            return False
    for gradient in consumed:
        put_zeros(gradient._parameter())
    rest = [gradient for gradient in several if not is_consumed(gradient)]
    if rest:
        torch._foreach_zero_(rest)
    return True


def _are_back(value: Any) -> bool:
    """Have gradients in nested arguments given back, if the step that took them has only guessed."""
    consumed = _first(value)
    overlap = None if consumed is None else consumed._overlap()
    if consumed is None or overlap is None or torch._C._current_graph_task_id() != -1:
        return False
    return overlap.give_back() and _real(consumed) is not consumed


def _real(value: Any) -> Any:
    """Replace gradients of this kind in nested arguments by those that were given back."""
    if isinstance(value, ConsumedGradient):
        parameter = value._parameter()
        gradient = None if parameter is None else parameter.grad
        return value if gradient is None else gradient
    if isinstance(value, dict):
        return {key: _real(item) for key, item in value.items()}
    return type(value)(map(_real, value)) if type(value) in (list, tuple) else value


def _first(value: Any) -> ConsumedGradient | None:
    """Return the first gradient of this kind in nested arguments."""
    if isinstance(value, ConsumedGradient):
        return value
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return None
    return next((found for found in map(_first, value) if found is not None), None)


def _refusal(gradient: ConsumedGradient | None, func: Any) -> str:
    overlap = None if gradient is None else gradient._overlap()
    parameter = None if gradient is None else gradient._parameter()
    name = "a parameter" if overlap is None or parameter is None else overlap.name_of(parameter)
    used = f"the gradient of {name} was taken by the overlapped step"
    if torch._C._current_graph_task_id() != -1:
        return (
            f"{used}, and a backward adds to it; mark only the last backward before step(), with one loss, and call "
            "zero_grad() before the next one"
        )
    what = getattr(func, "__name__", str(func))
    if overlap is not None and overlap.is_begun:
        return (
            f"{used} in backward, so {what} cannot use it; clip with the optimizer's max_grad_norm, change gradients "
            "before the last backward, and call step() before zero_grad()"
        )
    return (
        f"{used}, so {what} cannot use it; read gradients before the last backward, and call zero_grad() after step()"
    )
