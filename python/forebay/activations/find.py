"""Finds the layers of a model."""

from __future__ import annotations

from typing import Any

import torch

from forebay.activations.call import is_compiled
from forebay.errors import OptionError


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _sharded(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the outermost modules below the root that FSDP2 wraps; only those in lists if there are any."""
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:
        return []
    found: list[tuple[str, torch.nn.Module]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if name and isinstance(module, FSDPModule) and not inside:
            found.append((name, module))  # type: ignore[arg-type]
    listed = [module for name, module in found if name.rpartition(".")[2].isdigit()]
    return listed or [module for _, module in found]


def _default_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that FSDP2 wraps, or the outermost ModuleList with most parameters."""
    if sharded := _sharded(model):
        return sharded
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module)
    ]
    outermost: list[torch.nn.ModuleList] = [
        module for name, module in lists if not any(name.startswith(f"{outer}.") for outer, _ in lists if outer)
    ]
    if not outermost:
        raise OptionError(
            f"{type(model).__name__} has no layers that can be found: no module that FSDP2 wraps and no ModuleList; "
            "pass layers=[...], the modules to offload in the order in which they run, "
            "or put `with forebay.save_on_host():` around the forward pass"
        )
    largest: torch.nn.ModuleList = max(outermost, key=_count)
    # A list may have a module several times; that is one layer, which is called several times.
    return list(dict.fromkeys(largest))


def find_layers(model: torch.nn.Module, layers: Any) -> list[torch.nn.Module]:
    """Return the layers that the caller names, or the default layers, in their order."""
    if layers is None:
        return _default_layers(model)
    if isinstance(layers, str):
        try:
            layers = model.get_submodule(layers)
        except AttributeError as error:
            raise OptionError(f"invalid layers: {error}; name a ModuleList of the model, or pass modules") from error
    try:
        found = list(layers)
    except TypeError as error:
        raise OptionError(f"invalid layers: {layers!r}; pass a list of modules, or the name of a ModuleList") from error
    if not found or not all(isinstance(module, torch.nn.Module) for module in found):
        raise OptionError(f"invalid layers: {found!r}; pass a list of one or more modules")
    for module in found:
        for other in found:
            if other is not module and any(inner is module for inner in other.modules()):
                raise OptionError(
                    f"invalid layers: a {type(module).__name__} is inside a {type(other).__name__} that is listed too; "
                    "list one of them"
                )
    if len({id(module) for module in found}) != len(found):
        raise OptionError("invalid layers: a module is listed twice; list each once")
    return found


def compiled_around(model: torch.nn.Module, layers: list[torch.nn.Module]) -> str | None:
    """Return the name of a module that is compiled with layers inside, if there is one."""
    for module in model.modules():
        if is_compiled(module) and any(inner in layers for inner in module.modules() if inner is not module):
            return "the model" if module is model else f"a {type(module).__name__}"
    return None
