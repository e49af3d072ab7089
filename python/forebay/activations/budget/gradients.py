"""Counts the gradients that a pass makes: they are memory that no plan can save."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forebay._tensors import local

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay._device import Meter


class GradientCount:
    """The bytes of gradients that one pass has made, now and at the last peak of its memory.

    A gradient counts when it is stored in its parameter, just after its operation has made it. So the count at a peak
    is exact except for the gradients of one operation. The gradient of a parameter that two modules share, such as the
    table of words, is stored only when both have made theirs. It counts from the first of them on.

    Parameters
    ----------
    model
        Its parameters that are trained and have no gradient yet get one.
    meter
        Reads the memory of the device.
    """

    def __init__(self, model: torch.nn.Module, meter: Meter) -> None:
        self.meter = meter
        self.seen: set[int] = set()
        self.bytes = 0
        # The highest memory since the last reading, and the gradients at that moment.
        self.peak = self.bytes_at_peak = 0
        # Gradients of one operation, the first after a peak: the bytes before them, and the memory with them. Nothing
        # is allocated or freed between gradients of one operation.
        self.group: tuple[int, int] | None = None
        owners: dict[torch.Tensor, list[torch.nn.Module]] = {}
        for module in model.modules():
            for parameter in module._parameters.values():
                if parameter is not None and parameter.requires_grad and parameter.is_leaf and parameter.grad is None:
                    owners.setdefault(parameter, []).append(module)
        self.handles: list[Any] = []
        for trained, modules in owners.items():
            self.handles.append(trained.register_post_accumulate_grad_hook(self._note))  # type: ignore[no-untyped-call]
            if len(modules) > 1:
                self.handles += [module.register_forward_hook(self._on_output(trained)) for module in modules]

    def _add(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        # A second backward pass adds to the gradient that the first one made.
        if id(parameter) not in self.seen:
            self.seen.add(id(parameter))
            mine = local(grad)
            if mine.device.type == self.meter.device.type and mine.layout == torch.strided:
                self.bytes += mine.nbytes

    def _on_output(self, parameter: torch.Tensor) -> Callable[..., None]:
        """Return a hook of a module: when the gradient of its output is known, that of its parameter is made."""

        def made(_: torch.Tensor) -> None:
            peak = self.meter.read()[1]
            if peak > self.peak:
                self.peak, self.bytes_at_peak = peak, self.bytes
            self.group = None
            self._add(parameter, parameter)

        def forward(_: torch.nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(made)  # type: ignore[no-untyped-call]

        return forward

    def _note(self, parameter: torch.Tensor) -> None:
        """Count a gradient that was stored."""
        before, grad = self.bytes, parameter.grad
        if grad is not None:
            self._add(parameter, grad)
        now, peak = self.meter.read()
        if peak > self.peak:
            self.peak, self.group = peak, (before, now)
        elif self.group is None or now != self.group[1]:
            self.group = None
            return
        # The peak came before the operation that made the gradients if more than these was freed since.
        start, _ = self.group
        self.bytes_at_peak = self.bytes if self.peak - now < self.bytes - start else start

    def read(self, peak: int) -> tuple[int, int]:
        """Return the gradients now and at this peak, the highest since the last reading."""
        at_peak = self.bytes if peak > self.peak else self.bytes_at_peak
        self.peak, self.bytes_at_peak, self.group = 0, 0, None
        return self.bytes, at_peak

    def close(self) -> None:
        """Count no more."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
