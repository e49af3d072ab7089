"""The stack: three questions that only torch's stack frames answer.

Each function reads the frames of the running call, and nothing else in this package does.

- Which module was called? ``Module.__call__`` calls the function in ``_compiled_call_impl`` without the module. A
  replica of ``DataParallel`` has a copy of that attribute, so only the caller's ``self`` shows which of them was
  called.
- Does the call run inside a checkpoint? From torch 2.8 on, the active saved-tensor hooks can be read; before that, only
  the stack shows it.
- Is a recomputation complete? torch ends it with an exception, which TorchScript replaces by one of its own. The
  counter that shows the end is a local variable of the checkpoint's hook.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from types import FrameType

_CHECKPOINT_FILE = torch.utils.checkpoint.__file__

_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
"""Returns the active saved-tensor hooks; torch has it from 2.8 on."""


def called_replica(module: torch.nn.Module) -> Any:
    """Return the replica that was called; None if the module itself was called. To be called by the wrapper."""
    called = sys._getframe(2).f_locals.get("self")
    is_replica = called is not None and called is not module and getattr(called, "_is_replica", False)
    return called if is_replica else None


def inside_checkpoint() -> bool:
    """Whether the hooks of a torch checkpoint are active; other hooks on top would stop its recomputation."""
    if _top_hooks is None:
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code.co_filename != _CHECKPOINT_FILE:
            frame = frame.f_back
        return frame is not None
    top = _top_hooks(False)
    return top is not None and getattr(top[0], "__module__", "") == checkpoint.__module__


def recomputation_is_complete() -> bool:
    """Whether the innermost checkpoint has recomputed all tensors that it needs."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "unpack_hook" and code.co_filename == _CHECKPOINT_FILE:
            wanted, group = frame.f_locals.get("frame"), frame.f_locals.get("gid")
            return wanted is not None and wanted.recomp_counter[group] == len(wanted.weak_holders)
        frame = frame.f_back
    return False
