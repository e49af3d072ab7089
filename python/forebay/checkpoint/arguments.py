"""Checks of what users pass to ``save``, ``async_save`` and ``load``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from forebay._wrapped import members
from forebay.errors import OptionError

ORDER = "the order is path, model, optimizer"


def check_path(path: Any) -> None:
    """Raise if a path is none."""
    if isinstance(path, (torch.nn.Module, torch.optim.Optimizer)):
        raise OptionError(f"invalid path: {_a(path)}; {ORDER}")
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise OptionError(f"invalid path: {_a(path)}; name a folder with a string or a path")


def check_model(model: Any) -> None:
    """Raise if a model is neither a module nor None."""
    if model is None or isinstance(model, torch.nn.Module):
        return
    if isinstance(model, (str, os.PathLike, torch.optim.Optimizer)):
        remedy = ORDER
    elif isinstance(model, Mapping):
        remedy = "give the module itself, not its state dict; extra= saves other values"
    elif isinstance(model, (list, tuple)):
        remedy = "give one module: put several into a torch.nn.ModuleList or save each to a path of its own"
    else:
        remedy = "give a torch.nn.Module"
    raise OptionError(f"invalid model: {_a(model)}; {remedy}")


def check_extra(extra: Any) -> None:
    """Raise if extra values are no mapping."""
    if extra is not None and not isinstance(extra, Mapping):
        raise OptionError(f"invalid extra: {_a(extra)}; give a dict of names and values")


def optimizers_of(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return one optimizer, several or none as a list, without the wrappers of frameworks around them."""
    if optimizer is None:
        return []
    found = members(optimizer)
    if not isinstance(found[0], torch.optim.Optimizer) and _is_collection(optimizer):
        found = [one for item in optimizer for one in members(item)]
    for one in found:
        if not isinstance(one, torch.optim.Optimizer):
            raise OptionError(f"invalid optimizer: {_a(one)}; {_remedy(one)}")
    return found


def _is_collection(thing: Any) -> bool:
    return isinstance(thing, Iterable) and not isinstance(thing, (str, bytes, Mapping, torch.nn.Module, torch.Tensor))


def _remedy(thing: Any) -> str:
    if isinstance(thing, (str, os.PathLike, torch.nn.Module)):
        return ORDER
    if isinstance(thing, Mapping):
        return "give the optimizer itself, not its state dict; several are given as a list"
    if isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
        return "give the optimizer, and save the scheduler's state_dict() with extra="
    return "give a torch.optim.Optimizer or a list of them"


def check_belongs(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Raise if an optimizer has parameters that are not the model's: state is saved under the model's names."""
    if _is_flattened(model):
        return
    known = {id(parameter) for parameter in model.parameters()}
    for number, one in enumerate(optimizers):
        which = type(one).__name__ if len(optimizers) == 1 else f"{type(one).__name__} {number}"
        every = [(group, place) for group, of in enumerate(one.param_groups) for place in range(len(of["params"]))]
        foreign = [at for at in every if id(one.param_groups[at[0]]["params"][at[1]]) not in known]
        if foreign:
            group, place = foreign[0]
            shape = tuple(one.param_groups[group]["params"][place].shape)
            raise OptionError(
                f"the optimizer {which} is not of this model: {len(foreign)} of its {len(every)} parameters are not in "
                f"the model, the first is parameter {place} of group {group} with shape {shape}; give the model's own "
                "optimizer, made after the model was sharded, cast or moved"
            )


def _is_flattened(model: torch.nn.Module) -> bool:
    """Whether FSDP1 has replaced the parameters by flat ones. Then DCP finds the names in another way."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return fsdp is not None and any(isinstance(module, fsdp) for module in model.modules())


def _a(thing: Any) -> str:
    """Return what a thing is, for an error."""
    if thing is None or isinstance(thing, (str, int, float, bytes)):
        return repr(thing)
    if isinstance(thing, os.PathLike):
        return repr(os.fspath(thing))
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    if isinstance(thing, (list, tuple)) and thing:
        inside = ", ".join(sorted({type(item).__name__ for item in thing}))
        return f"{_with_article(type(thing).__name__)} of {inside}"
    return _with_article(type(thing).__name__)


def _with_article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name}"
