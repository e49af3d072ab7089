"""Where the gradients of a step are: in ``grad``, ``decoupled_grad`` or ``main_grad`` of each parameter."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from forebay._tensors import is_dtensor, local

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from forebay.optim.base import Optimizer

DECOUPLED = "decoupled_grad"
_ABSENT: Any = object()


@contextmanager
def gradients_of(part: Optimizer, asked: str | None) -> Iterator[None]:
    """Within this context, a part's step reads the gradients that Megatron has given to its parameters.

    As in Megatron, a parameter that has the attribute ``decoupled_grad`` has its gradient there, also if it is None.

    A rank may have no elements of a DTensor. Megatron-FSDP gives it no gradient there. Its count of steps would stay
    behind those of other ranks, and a checkpoint might save that count. So it gets a gradient without elements.

    Parameters
    ----------
    part
        The optimizer.
    asked
        The attribute to use for all parameters; None to do as Megatron does.
    """
    parameters = [parameter for group in part.param_groups for parameter in group["params"]]
    source = asked or (DECOUPLED if any(hasattr(parameter, DECOUPLED) for parameter in parameters) else "grad")
    lent: list[tuple[torch.Tensor, Any]] = []
    for parameter in parameters:
        before = getattr(parameter, source, _ABSENT)
        gradient = parameter.grad if before is _ABSENT and source == DECOUPLED and asked is None else before
        is_absent = gradient is None or gradient is _ABSENT
        if is_absent and is_dtensor(parameter) and not local(parameter).numel():
            gradient = parameter.detach()
        if gradient is not before:
            lent.append((parameter, before))
            setattr(parameter, source, gradient)
    if part._options.grad_source != source:
        part._options = replace(part._options, grad_source=source)
    try:
        yield
    finally:
        for parameter, before in lent:
            if before is _ABSENT:
                delattr(parameter, source)
            else:
                setattr(parameter, source, before)
