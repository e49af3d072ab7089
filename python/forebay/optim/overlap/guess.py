"""Steps with ``max_grad_norm`` whose updates run in backward, before the norm is known: when to try, and who can.

[Note: a step that guesses]
The engine updates on a second copy of the state, as if nothing were clipped; see [Note: a guess] in its ``guess.rs``.
Until ``step`` all can be taken back: ``Overlap.discard`` brings weights and gradients back, and the step is then one
of those that run under the next forward. So what is an error in a step that does not clip (gradients that are changed
or read after the last backward, another learning rate, ``GradScaler``) is only a guess in vain here. Reading a
parameter is an error in both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forebay._device import engine_name, is_gpu, record_event, with_backend
from forebay._tensors import local
from forebay.errors import OptionError
from forebay.optim.state import MASTER

if TYPE_CHECKING:
    from forebay.optim.base import Optimizer
    from forebay.optim.overlap.taking import Trained

NEAR = 0.9
"""A norm above this part of the limit is near it."""
PAUSE = 8
"""So many norms in a row must not be near the limit before a step guesses again."""


class Chances:
    """Whether the next step should guess: by the norms of all steps before it.

    A norm is read one step after it was computed, from memory to which it was copied meanwhile: the device has passed
    that point before the next forward, so this does not hold it up. Norms are the same on all ranks, and read in the
    same step on all of them, so all ranks decide alike.
    """

    def __init__(self) -> None:
        self._unread: tuple[torch.Tensor, Any, float] | None = None
        self._pause = 0

    def note(self, norm: torch.Tensor, limit: float) -> None:
        """Take the norm of a step and its limit, without waiting for it."""
        self._read()
        norm = norm.detach()
        if not is_gpu(norm.device):
            self._unread = norm.clone(), None, limit
            return
        host = torch.empty((), dtype=norm.dtype, pin_memory=True)
        host.copy_(norm, non_blocking=True)
        self._unread = host, record_event(norm.device), limit

    def fail(self) -> None:
        """Pause after a guess that was given up: what made it useless may be there in the next steps too."""
        self._pause = PAUSE

    def allow(self) -> bool:
        """Whether to guess."""
        self._read()
        return self._pause == 0

    def _read(self) -> None:
        if self._unread is None:
            return
        (norm, event, limit), self._unread = self._unread, None
        if event is not None:
            event.synchronize()
        # Not finite is near, too.
        self._pause = max(0, self._pause - 1) if float(norm) <= NEAR * limit else PAUSE


def check(optimizer: Optimizer) -> None:
    """Raise if steps of an optimizer cannot guess."""
    options = optimizer._options
    if options.max_grad_norm is None:
        raise OptionError(
            "speculate=True is for steps with max_grad_norm; leave it out: without it updates run in backward anyway"
        )
    if options.placement != "stream":
        raise OptionError(
            f"speculate=True needs placement='stream', and this is {options.placement!r}; leave it out, or choose "
            "'stream'"
        )
    if with_backend(engine_name(optimizer._choose_device()), options.backend).startswith("torch:"):
        raise OptionError(
            "speculate=True does not work on devices that are driven through torch, which have no kernel to bring "
            "weights back; leave it out"
        )
    if options.has_compact_masters:
        raise OptionError(
            "speculate=True needs f32 masters, and master_weights='compact' has only a part beside the weight, which a "
            "guess overwrites; use master_weights=True, or leave speculate out"
        )
    check_masters(optimizer)


def check_masters(optimizer: Optimizer) -> None:
    """Raise if a trained parameter has no master, with its name."""
    for parameter in optimizer._flatten().parameters:
        dtype = local(parameter).dtype
        if parameter.requires_grad and not optimizer._options.keeps_master(dtype):
            raise OptionError(
                f"speculate=True needs a master for each trained parameter, and {optimizer._name_of(parameter)} in "
                f"{dtype} has none; train in bf16 or f16 with master_weights, or leave speculate out"
            )


def can_guess(optimizer: Optimizer, one: Trained) -> bool:
    """Whether a parameter has state with a second copy, and a master."""
    assert one.home is not None
    return not optimizer._tables[one.home[0]].is_resident and MASTER in optimizer.state.rooms[id(one.parameter)].columns
