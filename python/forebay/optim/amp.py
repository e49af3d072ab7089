"""The scale and the flag that ``GradScaler`` gives to an optimizer that unscales its own gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forebay._tensors import local

if TYPE_CHECKING:
    from forebay.optim.base import Optimizer


def unscale(optimizer: Optimizer) -> bool:
    """Unscale the gradients in place if a ``GradScaler`` asks for it. Returns whether the step is to be taken.

    ``GradScaler`` sets ``grad_scale`` and ``found_inf`` on optimizers that were made with ``fused=True``. Counters of
    steps are on the host, so the flag is read there, as ``GradScaler`` does for optimizers that are not fused.
    """
    found_inf, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    if found_inf is not None and float(found_inf):
        return False
    if scale is None:
        return True
    source = optimizer._options.grad_source
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in optimizer._flatten().parameters:
        gradient = getattr(parameter, source, None)
        if gradient is not None:
            inner = local(gradient)
            kinds.setdefault((inner.device, inner.dtype), []).append(inner)
    # As GradScaler computes it: exact for the powers of two that it uses.
    inverse = scale.double().reciprocal().float()
    for (device, _), gradients in kinds.items():
        ignored = torch.zeros((), dtype=torch.float32, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, ignored, inverse.to(device))
    return True
