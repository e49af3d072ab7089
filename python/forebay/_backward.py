"""Gradients that come down during backward, as they become final."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from forebay._torch import DTYPES, is_placed_like, local, stream_handle
from forebay.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay import _core
    from forebay.optim import AdamW


@dataclass
class Gradient:
    """A gradient that is on its way down, and what it was when it set out.

    torch's version counters see most changes of a gradient, but not those of ``GradScaler.unscale_`` nor what is
    written through ``.data``. Those scale, and a norm tells.
    """

    # Held, so that its memory is given to nobody while it is being read.
    tensor: torch.Tensor
    versions: tuple[int, int]
    norm: torch.Tensor

    @classmethod
    def of(cls, gradient: torch.Tensor) -> Gradient:
        """Note what a gradient is now."""
        return cls(gradient, (gradient._version, local(gradient)._version), norms([local(gradient)])[0])

    def is_still(self, gradient: torch.Tensor | None) -> bool:
        """Whether a parameter's gradient is this one, unchanged."""
        if gradient is None or local(gradient).data_ptr() != local(self.tensor).data_ptr():
            return False
        return self.versions == (gradient._version, local(gradient)._version)


def norms(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the norm of each tensor, the same bits for the same numbers whatever the others are."""
    found: dict[int, torch.Tensor] = {}
    for dtype in DTYPES:
        places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        if places:
            of = torch._foreach_norm([tensors[i] for i in places], 2.0, dtype=torch.float32)
            found.update(zip(places, of, strict=True))
    return [found[i] for i in range(len(tensors))]


@dataclass
class Landed:
    """The gradients of one optimizer that are down or on their way."""

    gradients: dict[int, tuple[torch.Tensor, tuple[int, int], Gradient]] = field(default_factory=dict)
    active: bool = False
    hooked: dict[int, Any] = field(default_factory=dict)
    # The parameters that were found to be nobody's who reduces gradients later.
    checked: list[torch.Tensor] | None = None

    def check(self, engine: _core.Engine) -> None:
        """Have those brought down again that were changed since: clipped, unscaled or accumulated into."""
        kept = []
        for parameter, home, gradient in self.gradients.values():
            if gradient.is_still(parameter.grad):
                kept.append((home, gradient))
            else:
                engine.finish_landing(home)
        if not kept:
            return
        now = torch.stack(norms([local(gradient.tensor) for _, gradient in kept]))
        then = torch.stack([gradient.norm for _, gradient in kept])
        # One wait for the device; the step is about to wait for it anyway.
        for (home, _), differs in zip(kept, (now != then).tolist(), strict=True):
            if differs:
                engine.finish_landing(home)

    def forget(self, engine: _core.Engine) -> None:
        """Let go of all of them, once nobody reads them any more."""
        if self.gradients:
            engine.finish_landing(None)
            self.gradients.clear()

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self.hooked.values():
            handle.remove()
        self.hooked.clear()


@contextmanager
def last_backward(optimizer: AdamW) -> Iterator[None]:
    """Bring gradients down as they become final; see ``AdamW.last_backward``."""
    options, landed = optimizer._options, optimizer._landed
    if not options.updates_on_host:
        raise OptionError(
            f"last_backward belongs to placements 'host' and 'hybrid', this is {options.placement!r} with no part on "
            "the host; call backward without it"
        )
    if landed.active:
        raise OptionError("last_backward is not to be nested")
    # Everything that pins is done here: in a hook of autograd or FSDP it could deadlock with a collective.
    optimizer.prepare()
    engine, compute = optimizer._open()
    parameters = optimizer._flatten().parameters
    if landed.checked is not parameters:
        refuse_late_reduction(parameters)
        landed.checked = parameters
    for number, store in enumerate(optimizer._stores):
        sizes = [
            inner.numel() * inner.element_size() if inner.device == compute and travels(optimizer, inner) else 0
            for inner in map(local, store.parameters)
        ]
        engine.open_landing(number, sizes, options.pinned_budget_bytes)
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


def travels(optimizer: AdamW, inner: torch.Tensor) -> bool:
    """Whether a parameter's gradient has to come down: on the CPU only where there is a ring to test with."""
    return inner.device.type != "cpu" or optimizer._options.streams


def hook(reference: weakref.ref[AdamW]) -> Any:
    """Return what autograd and FSDP2 call when a parameter's gradient is final. It keeps no optimizer alive."""

    def land(parameter: torch.Tensor) -> None:
        optimizer = reference()
        if optimizer is None:
            return
        landed, gradient = optimizer._landed, parameter.grad
        home = optimizer._homes.get(id(parameter))
        if not landed.active or gradient is None or home is None or optimizer._engine is None:
            return
        number, index = home
        inner = local(gradient)
        compute = optimizer._compute
        store = optimizer._stores[number]
        # What the step would have to copy or refuse is left to the step.
        fits = (
            compute is not None
            and is_placed_like(parameter, gradient)
            and inner.layout == torch.strided
            and inner.device == compute
            and inner.dtype in DTYPES
            and inner.shape == store.shapes[index]
            and (inner.stride() == store.strides[index] or inner.numel() <= 1)
            and not inner.is_neg()
            and inner.numel() > 0
            and travels(optimizer, inner)
        )
        if not fits:
            return
        assert compute is not None
        with torch.no_grad():
            landed.gradients[id(parameter)] = (parameter, home, Gradient.of(gradient))
        size = inner.numel() * inner.element_size()
        optimizer._engine.land(number, index, inner.data_ptr(), size, stream_handle(compute))

    return land


def refuse_late_reduction(parameters: list[torch.Tensor]) -> None:
    """Refuse parameters of modules that reduce gradients after the hooks have seen them."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    mine = set(map(id, parameters))
    for module in gc.get_objects():
        # By type: some objects run code of their own when they are asked for their class.
        if not issubclass(type(module), (DistributedDataParallel, FullyShardedDataParallel)):
            continue
        if any(id(parameter) in mine for parameter in module.parameters()):
            raise OptionError(
                f"last_backward does not work under {type(module).__name__}: gradients are reduced after they are "
                "seen; call backward without it, or shard with FSDP2 (fully_shard)"
            )
