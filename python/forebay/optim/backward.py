"""Gradients that are copied to the host during backward, each as soon as it is final."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from forebay._device import is_gpu, stream_handle
from forebay._fingerprint import Fingerprint
from forebay._tensors import DTYPES, address, is_placed_like, local, storage_address
from forebay.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay import _core
    from forebay.optim.base import Optimizer


@dataclass
class Gradient:
    """A gradient that is being copied, and its address, type and bits when the copy began."""

    # Held, so that its memory is not reused while it is being read.
    tensor: torch.Tensor
    looks: tuple[Any, ...]
    bits: Fingerprint

    @classmethod
    def of(cls, gradient: torch.Tensor) -> Gradient:
        """Record address, type and bits of a gradient now."""
        return cls(gradient, looks_of(gradient), Fingerprint(local(gradient)))

    def is_at(self, gradient: torch.Tensor | None) -> bool:
        """Whether a parameter's gradient is in the same memory."""
        return gradient is not None and address(local(gradient)) == self.looks[0]

    def is_still(self, gradient: torch.Tensor | None) -> bool:
        """Whether a parameter's gradient has the same address, type, order and version. Its bits are not read."""
        return gradient is not None and looks_of(gradient) == self.looks


def looks_of(gradient: torch.Tensor) -> tuple[Any, ...]:
    """Return a gradient's address, shape, order, type and version counters."""
    inner = local(gradient)
    return address(inner), inner.shape, inner.stride(), inner.dtype, gradient._version, inner._version


@dataclass
class Landed:
    """The gradients of one optimizer that are on the host or being copied there."""

    gradients: dict[int, tuple[torch.Tensor, tuple[int, int], Gradient]] = field(default_factory=dict)
    active: bool = False
    hooked: dict[int, Any] = field(default_factory=dict)
    # The parameters of the last search for modules that reduce late, and how many such modules were known then.
    checked: tuple[list[torch.Tensor], int] | None = None

    def check(self, engine: _core.Optimizer) -> None:
        """Drop the copies of gradients that were changed since: clipped, unscaled or accumulated into."""
        kept = []
        for parameter, home, gradient in self.gradients.values():
            if gradient.is_still(parameter.grad):
                kept.append((home, gradient))
            else:
                engine.finish_landing(home)
        if not kept:
            return
        # One wait for the device; the step is about to wait for it anyway.
        changed = Fingerprint.changed([gradient.bits for _, gradient in kept])
        for (home, _), differs in zip(kept, changed, strict=True):
            if differs:
                engine.finish_landing(home)

    def drop(self, engine: _core.Optimizer, parameter: torch.Tensor) -> None:
        """Wait for the copy of a gradient that its parameter no longer has, and release it."""
        known = self.gradients.get(id(parameter))
        if known is not None and not known[2].is_at(parameter.grad):
            engine.finish_landing(known[1])
            del self.gradients[id(parameter)]

    def forget(self, engine: _core.Optimizer) -> None:
        """Wait for all copies, and release all gradients."""
        if self.gradients:
            engine.finish_landing(None)
            self.gradients.clear()

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        take_off(self.hooked)


def take_off(hooked: dict[int, Any]) -> None:
    """Remove hooks."""
    for handle in hooked.values():
        handle.remove()
    hooked.clear()


@contextmanager
def last_backward(optimizer: Optimizer) -> Iterator[None]:
    """Copy gradients to the host as they become final; see ``Optimizer.last_backward``."""
    options, landed = optimizer._options, optimizer._landed
    if not options.updates_on_host:
        raise OptionError(
            f"last_backward needs placement 'host' or 'hybrid', and the host must update a part; this is "
            f"{options.placement!r} with no part on the host; call backward without it"
        )
    if options.grad_source != "grad":
        raise OptionError(
            f"last_backward reads grad, and grad_source is {options.grad_source!r}; call backward without it"
        )
    if landed.active:
        raise OptionError("last_backward cannot be nested; put one around the last backward of a step")
    # All memory is pinned here: in a hook of autograd or FSDP pinning could deadlock with a collective.
    optimizer.prepare()
    engine, compute = optimizer._open()
    parameters = optimizer._flatten().parameters
    if landed.checked is None or landed.checked[0] is not parameters or landed.checked[1] != late_reducers():
        refuse_late_reduction(parameters)
        landed.checked = (parameters, late_reducers())
    for number, table in enumerate(optimizer._tables):
        sizes = [
            local(parameter).nbytes if parameter is not None and travels(optimizer, local(parameter), compute) else 0
            for parameter in table.parameters
        ]
        engine.open_landing(number, sizes)
    if not landed.hooked:
        # For an optimizer that is never closed. At exit the hooks do no harm.
        weakref.finalize(optimizer, take_off, landed.hooked).atexit = False
    for parameter in parameters:
        if parameter.requires_grad and id(parameter) not in landed.hooked:
            register: Any = parameter.register_post_accumulate_grad_hook
            handle = register(hook(weakref.ref(optimizer)))
            landed.hooked[id(parameter)] = handle
    landed.forget(engine)
    landed.active = True
    try:
        yield
    except BaseException:
        landed.forget(engine)
        raise
    finally:
        landed.active = False


def travels(optimizer: Optimizer, inner: torch.Tensor, compute: torch.device) -> bool:
    """Whether a gradient has to be copied: from where the optimizer computes; on the CPU only if there is a ring."""
    return inner.device == compute and (is_gpu(compute) or optimizer._options.streams)


def hook(reference: weakref.ref[Optimizer]) -> Any:
    """Return what autograd and FSDP2 call when a gradient is final. It does not keep the optimizer alive."""

    def land(parameter: torch.Tensor) -> None:
        optimizer = reference()
        if optimizer is None:
            return
        landed, gradient = optimizer._landed, parameter.grad
        home = optimizer._homes.get(id(parameter))
        if home is None or optimizer._engine is None:
            return
        landed.drop(optimizer._engine, parameter)
        if not landed.active or gradient is None:
            return
        number, index = home
        inner = local(gradient)
        compute = optimizer._compute
        table = optimizer._tables[number]
        # Gradients that would have to be put in order, or refused, are left to the step.
        fits = (
            is_placed_like(parameter, gradient)
            and inner.layout == torch.strided
            and inner.dtype in DTYPES
            and inner.shape == table.shapes[index]
            and (inner.stride() == table.strides[index] or inner.numel() <= 1)
            and not inner.is_neg()
            and storage_address(inner.untyped_storage()) % 8 == 0
            and inner.numel() > 0
            and travels(optimizer, inner, compute)
        )
        if not fits:
            return
        with torch.no_grad():
            landed.gradients[id(parameter)] = (parameter, home, Gradient.of(gradient))
        optimizer._engine.land(number, index, address(inner), inner.nbytes, stream_handle(compute))

    return land


class Reducers:
    """Counts the submodules that were added to modules that reduce gradients late, since the first search for them.

    Torch keeps no list of such modules, so the search reads all objects of the process. It is repeated only when there
    may be another one.
    """

    count: int | None = None

    @classmethod
    def note(cls, module: torch.nn.Module, _name: str, _taken: Any) -> None:
        """Count one. Torch calls this when a submodule is added to a module."""
        if isinstance(module, late()):
            cls.count = (cls.count or 0) + 1


def late_reducers() -> int:
    """Return the count; 0 if torch.distributed is not initialized."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0
    if Reducers.count is None:
        Reducers.count = 0
        torch.nn.modules.module.register_module_module_registration_hook(Reducers.note)
    return Reducers.count


def late() -> tuple[type, ...]:
    """Return the modules that reduce gradients after the hooks have seen them."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel, FullyShardedDataParallel


def refuse_late_reduction(parameters: list[torch.Tensor]) -> None:
    """Raise if a module has these parameters and reduces gradients after the hooks have seen them."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    mine, kinds = set(map(id, parameters)), late()
    for module in gc.get_objects():
        # By type: some objects run code of their own when they are asked for their class.
        if not issubclass(type(module), kinds):
            continue
        if any(id(parameter) in mine for parameter in module.parameters()):
            raise OptionError(
                f"last_backward does not work under {type(module).__name__}, which reduces gradients too late; call "
                "backward without it, or shard with FSDP2 (fully_shard)"
            )
