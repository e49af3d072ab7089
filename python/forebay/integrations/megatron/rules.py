"""Which optimizer of forebay stands for a class that Megatron names, and which arguments it takes."""

from __future__ import annotations

import difflib
import inspect
from typing import TYPE_CHECKING, Any

import torch

from forebay._checks import one_of
from forebay.errors import OptionError
from forebay.optim import SGD, Adam, AdamW
from forebay.optim.base import Optimizer
from forebay.optim.options import GRAD_SOURCES

if TYPE_CHECKING:
    from collections.abc import Mapping

TORCHS: dict[type, type[Optimizer]] = {torch.optim.AdamW: AdamW, torch.optim.Adam: Adam, torch.optim.SGD: SGD}
"""Bound at import: ``torch.optim.AdamW`` may be replaced later."""

FUSED = ("transformer_engine", "apex")
"""Packages whose ``FusedAdam`` and ``FusedSGD`` Megatron uses on the GPU."""

SETTINGS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "momentum", "dampening", "nesterov")
"""Arguments of the update rules."""

RECORDED = ("fused", "foreach", "capturable", "differentiable", "bias_correction", "adam_w_mode", "set_grad_none")
"""Arguments that choose how torch, Transformer Engine or apex compute. They are kept in the groups. A value that would
change the result is refused."""

OPTIONS = (
    *("placement", "host_fraction", "host_threads", "host_kernel"),
    *("chunk_bytes", "slots", "pinned_budget_bytes", "grad_source"),
)
"""Options of forebay, in addition to the arguments of Megatron's class."""

SHARED = ("chunk_bytes", "slots")
"""Options of both parts. The others are of the offloaded part alone."""


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise if an argument is not known, or has a value that forebay cannot follow."""
    known = (*SETTINGS, *RECORDED, *OPTIONS, "decoupled_weight_decay")
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"HybridDeviceOptimizer.__init__() got an unexpected keyword argument {name!r}{hint}")
    if given.get("bias_correction") is False:
        raise OptionError(
            "bias_correction=False is not supported: forebay's Adam corrects the bias, as torch's does; leave it out"
        )
    one_of("grad_source", given.get("grad_source"), (None, *GRAD_SOURCES))
    if given.get("placement") == "resident":
        raise OptionError("placement 'resident' contradicts an offloaded part; set offload_fraction=0 instead")


def counterpart(cls: Any, given: Mapping[str, Any]) -> type[Optimizer]:
    """Return the class of forebay with the update rule of another class.

    Parameters
    ----------
    cls
        What Megatron was told to use on the CPU or the GPU.
    given
        The arguments for it.
    """
    if isinstance(cls, type) and issubclass(cls, Optimizer):
        return cls
    if cls in TORCHS:
        return TORCHS[cls]
    package, name = str(getattr(cls, "__module__", "")).partition(".")[0], getattr(cls, "__name__", repr(cls))
    if package in FUSED and name == "FusedAdam":
        return AdamW if given.get("adam_w_mode", True) else Adam
    if package in FUSED and name == "FusedSGD":
        return SGD
    raise OptionError(
        f"no update rule for {package}.{name}; use AdamW, Adam or SGD of torch, or FusedAdam or FusedSGD of "
        "Transformer Engine or apex"
    )


def settings_of(cls: Any, ours: type[Optimizer], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings for our class: the given ones, else the defaults of the class that it stands for."""
    found = {}
    theirs = inspect.signature(cls).parameters
    for name in ours.settings:
        default = theirs[name].default if name in theirs else inspect.Parameter.empty
        if name in given:
            found[name] = given[name]
        elif isinstance(default, (int, float, tuple)):
            found[name] = default
    return found
