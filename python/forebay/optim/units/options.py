"""The options of an optimizer that runs in units, and their checks."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay._checks import whole
from forebay._device import total_memory
from forebay.errors import OptionError
from forebay.optim.options import Keywords

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

LEAST_BYTES, MOST_BYTES = 16 << 20, 256 << 20
"""The limits of the default size of a unit: a copy of this size keeps the wire busy, and three of them are few."""

REMEDIES = {
    "placement": "its own step runs on the parameters' device, so only 'stream' is possible",
    "chunk_bytes": "use unit_bytes",
    "slots": "there are always three units on the device",
    "master_weights": "its step knows no masters; keep the parameters in float32, or leave this out",
    "state_dtype": "its step decides the type of its state",
    "stochastic_rounding": "its step decides the type of its state",
    "rounding_seed": "its step decides the type of its state",
    "max_grad_norm": "clip with torch.nn.utils.clip_grad_norm_ before the step",
    "skip_nonfinite": "check the gradients before the step",
    "grad_source": "its step reads the attribute grad",
    "device": "its step runs where the parameters are",
    "host_fraction": "its step runs on the parameters' device",
    "host_threads": "its step runs on the parameters' device",
    "host_kernel": "its step runs on the parameters' device",
    "resident_bytes": "all of its state goes through the units",
    "resident_fraction": "all of its state goes through the units",
    "backend": "its step is torch's own",
}
"""The options of forebay's own optimizers that do not apply here, and what to do instead."""

ALLOWED = {"placement": ("stream",), "master_weights": (None, False), "grad_source": ("grad",)}
"""The values of these that ask for nothing."""


class UnitKeywords(Keywords, total=False):
    """Options as the user gives them, also those of optimizers without an update rule."""

    unit_bytes: int | None


@dataclass(frozen=True)
class UnitOptions:
    """The checked options of one optimizer."""

    unit_bytes: int | None = None
    pinned_budget_bytes: int | None = None

    def size_on(self, device: torch.device) -> int:
        """Return how many bytes of state a unit has on a device, if no parameter has more."""
        if self.unit_bytes is not None:
            return self.unit_bytes
        return min(max(total_memory(device) // 256, LEAST_BYTES), MOST_BYTES)


def check_unit_options(label: str, given: Mapping[str, Any]) -> UnitOptions:
    """Return the checked options; raise an error that names the remedy if one does not apply.

    Parameters
    ----------
    label
        The name of the optimizer's class.
    given
        The options by name.
    """
    known = UnitOptions.__dataclass_fields__
    for name, value in given.items():
        if name in known or any(value is one or value == one for one in ALLOWED.get(name, ())):
            continue
        if name in REMEDIES:
            raise OptionError(
                f"forebay has no update rule for {label}, so {name}={value!r} does not apply: {REMEDIES[name]}"
            )
        near = difflib.get_close_matches(name, (*known, *REMEDIES), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"offload() got an unexpected keyword argument {name!r}{hint}")
    unit_bytes = whole("unit_bytes", given.get("unit_bytes"), 1, optional=True)
    budget = whole("pinned_budget_bytes", given.get("pinned_budget_bytes"), 0, optional=True)
    return UnitOptions(unit_bytes, budget)
