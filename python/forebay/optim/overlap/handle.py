"""``overlap_step``: what users call, and the handle that they get."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forebay._checks import whole
from forebay._wrapped import bare
from forebay.errors import OptionError
from forebay.optim.backward import late, refuse_late_reduction
from forebay.optim.base import Optimizer
from forebay.optim.overlap.explain import explained
from forebay.optim.overlap.guess import check
from forebay.optim.overlap.step import Overlap
from forebay.optim.overlap.units import OverlappedUnits
from forebay.optim.units import InUnits
from forebay.optim.units.parameters import members_of

if TYPE_CHECKING:
    from collections.abc import Iterable

OVERLAP_BYTES = 256 << 20


def overlap_step(
    model: torch.nn.Module | Iterable[torch.nn.Module],
    optimizer: torch.optim.Optimizer,
    *,
    accumulation_steps: int | None = None,
    speculate: bool = False,
    overlap_bytes: int = OVERLAP_BYTES,
) -> OverlappedStep:
    """Run the updates of an optimizer under backward and under the next forward, with the bits of the plain step.

    Without ``max_grad_norm``, each gradient is used as soon as it is final, during the last backward before a step, and
    its memory is freed after its update. With ``max_grad_norm``, updates begin at ``step`` and run under the next
    forward, or in backward with ``speculate``. ``step`` returns at once. Whoever reads a parameter before its update
    waits for it: modules before their forward, and any use through torch.

    The training loop stays as it is, with the last backward marked by ``with optimizer.last_backward():``, or without a
    mark if ``accumulation_steps`` is given. A gradient that was taken cannot be read, changed or added to: this raises
    an error, as does reading a parameter between the last backward and ``step``. So clip with ``max_grad_norm``. A step
    without a backward raises an error.

    An optimizer that ``forebay.offload`` runs in units needs no mark: its updates begin at ``step``.

    Parameters
    ----------
    model
        The model that is trained, or several. DDP and FSDP1 are refused, because they reduce gradients too late; use
        FSDP2 (``fully_shard``).
    optimizer
        An optimizer of forebay, also inside a wrapper.
    accumulation_steps
        How many backwards make a step. None if ``last_backward`` marks the last one.
    speculate
        With ``max_grad_norm``, let updates run in backward too, on a second copy of the state, as if nothing were
        clipped. If nothing was, the second copy becomes the state; else everything is done again from the first. The
        bits are those of the plain step in either case. Needs ``placement="stream"``, a master for each trained
        parameter, and twice the pinned memory, within ``pinned_budget_bytes``. A step guesses only if none of the last
        eight norms was above 0.9 of the limit; ``stats()`` has how often steps did (``speculated``) and were right
        (``accepted``).
    overlap_bytes
        The most GPU memory of the ring through which state streams while updates are hidden. Where the host takes part,
        the ring stays as it is. Models whose kernels take milliseconds gain from 1 GiB.

    Returns
    -------
    A handle. ``remove`` makes steps plain again.
    """
    inner = bare(optimizer)
    models = _models(model)
    if not isinstance(inner, (Optimizer, InUnits)):
        remedy = "use forebay.offload first, or one of forebay's optimizers"
        raise OptionError(f"overlap_step cannot take {type(inner).__name__}; {remedy}")
    label, earlier = (
        (inner._units.label, inner._units.overlap) if isinstance(inner, InUnits) else (inner._label, inner._overlap)
    )
    if earlier is not None:
        raise OptionError(f"{label} is overlapped already; call remove() on the handle first, or keep it")
    every = whole("accumulation_steps", accumulation_steps, 1, optional=True)
    if isinstance(inner, InUnits):
        if speculate:
            raise OptionError(
                f"{label} has no update rule of forebay, so speculate=True does not apply; leave it out: its updates "
                "run under the next forward"
            )
        if overlap_bytes != OVERLAP_BYTES:
            raise OptionError(
                f"{label} has no update rule of forebay, so overlap_bytes={overlap_bytes} does not apply; give "
                "unit_bytes to forebay.offload"
            )
        _check_belongs(models, [parameter for _, parameter in members_of(inner._units.optimizer)], label)
        return OverlappedStep(OverlappedUnits(inner._units, models))
    options = inner._options
    least = 2 * options.chunk_bytes
    if whole("overlap_bytes", overlap_bytes, 1) < least:
        raise OptionError(
            f"invalid overlap_bytes: {overlap_bytes}; give at least two chunks, {least} bytes, or make chunk_bytes "
            "smaller"
        )
    if options.grad_source != "grad":
        raise OptionError(
            f"overlap_step reads grad, and grad_source is {options.grad_source!r}; use grad_source='grad'"
        )
    _check_belongs(models, inner._flatten().parameters, label)
    if speculate:
        check(inner)
    overlap = Overlap(inner, models, every, speculate)
    # Where the host takes part, its copies would wait behind those of a larger ring.
    slots = options.slots if options.updates_on_host else max(overlap_bytes // options.chunk_bytes, options.slots)
    overlap.install(slots)
    return OverlappedStep(overlap)


def _models(model: Any) -> list[torch.nn.Module]:
    models = [model] if isinstance(model, torch.nn.Module) else list(model)
    for one in models:
        if not isinstance(one, torch.nn.Module):
            raise OptionError(
                f"overlap_step takes a module or several, not a {type(one).__name__}; give the model that is trained"
            )
        for inner in one.modules():
            if isinstance(inner, late()):
                raise OptionError(
                    f"overlap_step does not work under {type(inner).__name__}, which reduces gradients too late; shard "
                    "with FSDP2 (fully_shard)"
                )
    if not models:
        raise OptionError("overlap_step takes a module or several, and none was given; give the model that is trained")
    return models


def _check_belongs(models: list[torch.nn.Module], parameters: list[torch.Tensor], label: str) -> None:
    mine = set(map(id, parameters))
    for model in models:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not any(id(parameter) in mine for parameter in trained):
            raise OptionError(
                f"the {len(trained)} trained parameters of {type(model).__name__} are not those of {label}; "
                "make the optimizer with model.parameters(), after the model was moved, sharded or wrapped"
            )
    refuse_late_reduction(parameters)


class OverlappedStep:
    """The handle of :func:`forebay.overlap_step`."""

    def __init__(self, overlap: Overlap | OverlappedUnits) -> None:
        self._overlap = overlap

    def __repr__(self) -> str:
        return f"OverlappedStep({self._overlap.stats()})"

    def __reduce__(self) -> Any:
        raise OptionError("the handle of overlap_step cannot be pickled or copied; call overlap_step for the copy")

    def remove(self) -> None:
        """Wait for the step under way, and make the following ones plain. May be called again."""
        self._overlap.remove()

    def stats(self) -> dict[str, float | int]:
        """Return statistics of the last step. Does not wait for the device.

        ``exposed_s`` are the seconds that forwards and other readers waited for updates, as far as they have ended.
        ``speculated`` steps so far have updated before it was known whether they clip; ``accepted`` of them did not.
        ``freed_bytes`` are the bytes of gradients that were freed before the last gradient of the backward was final.
        """
        return self._overlap.stats()

    def plan(self) -> list[dict[str, Any]]:
        """Return the parts of the last step: those that ran in their order, then the others.

        Each has ``tensors`` (the parameters' names), ``bytes``, ``position``, ``submitted_ns`` since the step began
        and ``late``: whether it was submitted after ``step`` was called.
        """
        return self._overlap.plan()

    def explain(self) -> str:
        """Return the plan of the last step as text: what ran in which order, when, and what it was waiting for."""
        return explained(self._overlap.stats(), self.plan())
