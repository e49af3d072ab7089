"""A layer's settings as they were when it ran: attributes, tensors, and torch's own switches.

A recomputed layer runs in the backward pass, when its settings may differ: another adapter or mode is active,
parameters were replaced for one call only. Recomputation restores the settings of the forward call, except for those
that the call changed itself. The old values of a parameter that was changed in place cannot be restored: that is an
error. Changes inside nested objects are not restored.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
_SETTINGS = _PLAIN | {list, tuple, dict}
_LONGEST = 16
"""Longer lists are data, not settings."""
_GONE = object()
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})


def _find_switches() -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Return getters and setters of torch's switches that change what a layer computes.

    Autocast and the device's random numbers are left to torch's checkpoint.
    """
    found: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [(torch.get_default_dtype, torch.set_default_dtype)]
    names = [
        (f"_get_{way}_sdp_enabled", f"_set_sdp_use_{way}")
        for way in ("flash", "mem_efficient", "math", "cudnn", "overrideable")
    ]
    for get, put in (*names, ("_get_sdp_priority_order", "_set_sdp_priority_order")):
        if hasattr(torch._C, get) and hasattr(torch._C, put):
            found.append((getattr(torch._C, get), getattr(torch._C, put)))
    return found


_SWITCHES = _find_switches()


def _is_short(values: Any) -> bool:
    return len(values) <= _LONGEST and all(type(one) in _PLAIN for one in values)


def _settings(held: dict[str, Any]) -> dict[str, Any]:
    """Return a module's settings: plain values, copies of short lists and dicts, and tensors themselves."""
    found = {}
    for key, value in held.items():
        kind = type(value)
        if kind in _PLAIN or kind is torch.Tensor or (kind is tuple and _is_short(value)):
            found[key] = value
        elif kind is list and _is_short(value):
            found[key] = list(value)
        elif kind is dict and key not in _REGISTRIES and _is_short(value.values()):
            found[key] = dict(value)
    return found


def _differ(now: Any, then: Any) -> bool:
    if now is then:
        return False
    return type(now) is not type(then) or type(then) not in _SETTINGS or bool(now != then)


def _attributes(module: torch.nn.Module) -> Iterator[dict[str, Any]]:
    """Return the attributes of each module in it, in a fraction of the time of ``modules()``."""
    seen = {module}
    found = [module]
    for inner in found:
        mine = inner.__dict__
        yield mine
        for child in (mine.get("_modules") or {}).values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)


class LayerSettings:
    """The settings of a layer, recorded when a call begins."""

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self.name = name
        self.switches = [get() for get, _ in _SWITCHES]
        # Each dictionary with its entries when the call began; and the entries of those that have parameters.
        self.held: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.owned: list[dict[str, Any]] = []
        self.parameters: list[tuple[torch.Tensor, bool, int]] = []
        for mine in _attributes(module):
            if "_fsdp_wrapped_module" in (mine.get("_modules") or ()):
                # The attributes of FSDP1's own module are its progress, not settings.
                continue
            self.held.append((mine, _settings(mine)))
            if "_is_fsdp_managed_module" in mine:
                # FSDP puts its tensors in place and fills them, each time the layer runs.
                continue
            # Modules of TorchScript keep parameters and buffers elsewhere.
            parameters, buffers = mine.get("_parameters"), mine.get("_buffers")
            if parameters and isinstance(parameters, dict):
                self.owned.append(dict(parameters.items()))
                self.held.append((parameters, self.owned[-1]))
            if buffers and isinstance(buffers, dict):
                self.held.append((buffers, dict(buffers.items())))

    def settle(self) -> None:
        """Drop settings that the call changed itself, such as a counter or a cache: these are not restored."""
        for now, then in self.held:
            changed = [key for key, value in then.items() if now.get(key, _GONE) is not value]
            for key in changed:
                if _differ(now.get(key, _GONE), then[key]):
                    del then[key]
        self.parameters = [
            (tensor, tensor.requires_grad, tensor._version)
            for then in self.owned
            for tensor in then.values()
            if tensor is not None and not tensor.is_inference()
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore all settings within this context."""
        for tensor, _, version in self.parameters:
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a parameter of {self.name}, {list(tensor.shape)}, is at version {tensor._version}; expected "
                    f"version {version} instead. The layer is recomputed, so its parameters must not change between "
                    "its forward and its backward pass"
                )
        undo: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        try:
            for (get, put), value in zip(_SWITCHES, self.switches, strict=True):
                if (current := get()) != value:
                    undo.append((put, (current,)))
                    put(value)
            for now, then in self.held:
                for key, value in then.items():
                    if _differ(current := now.get(key, _GONE), value):
                        undo.append((now.pop, (key, None)) if current is _GONE else (now.__setitem__, (key, current)))
                        now[key] = value
            for tensor, required, _ in self.parameters:
                if tensor.requires_grad != required and tensor.is_leaf:
                    undo.append((tensor.requires_grad_, (not required,)))
                    tensor.requires_grad_(required)
            yield
        finally:
            for call, values in reversed(undo):
                call(*values)
