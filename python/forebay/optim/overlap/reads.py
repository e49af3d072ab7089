"""Waiting before modules are called, for readers that torch's Python door does not see; and the order of the reads.

Every module that owns trained parameters waits for them before its forward: extensions in C++ take tensors as they are.
A module that was compiled, which runs no hooks of the modules inside, waits for everything inside. FSDP2 waits before
it gathers shards. The same places record in which order a forward needs parameters, and how often.

[Note: parameters that step() waits for]
A hook that did not run cannot wait: a model that was compiled as a whole afterwards, replicas of ``DataParallel``, or a
weight that is used without calling its module. So ``step()`` itself waits for the parameters of a module that was not
called since the step before.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling

from forebay._device import stream_handle
from forebay.activations.call import Layer, no_hook
from forebay.optim.overlap.pending import Pending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from forebay.optim.overlap.units import Steps

_CALL = "_compiled_call_impl"
"""The attribute that ``Module.__call__`` calls if it is set; ``Module.compile`` sets it."""

_graph_task = torch._C._current_graph_task_id
"""Returns the number of the backward that this thread runs; -1 outside of one."""


class Reader:
    """One place that reads parameters, and waits for them before it does."""

    def __init__(self, overlap: Steps, parameters: list[torch.Tensor]) -> None:
        self.overlap, self.parameters = overlap, parameters
        # The step that was waited for last, and the stream that waited.
        self.step, self.stream = 0, 0
        # The pass in which it read last, and how often.
        self.pass_number, self.calls = -1, 0
        # Whether it has read since the last step.
        self.called = False
        # Where it stands in the order of a forward.
        self.place: int | None = None

    def enter(self) -> None:
        """Wait for the updates of these parameters if they are pending."""
        overlap = self.overlap
        if overlap.is_open:
            if self.step != overlap.steps or self.stream != stream_handle(overlap.compute):
                overlap.wait_for(self)
        elif overlap.is_begun:
            overlap.check_readable(self.parameters)
        if _graph_task() != -1:
            # Recomputed, or gathered again.
            overlap.in_backward = True
            return
        if overlap.in_backward:
            overlap.begin_pass()
        if self.pass_number != overlap.passes:
            self.pass_number, self.calls, self.called = overlap.passes, 0, True
            if self.place is None:
                self.place = overlap.next_place()
        self.calls += 1

    def is_pending(self) -> bool:
        """Whether any of its parameters waits for its update."""
        return any(isinstance(parameter, Pending) for parameter in self.parameters)

    def remove(self) -> None:
        """Wait no more."""


class ModuleReader(Reader):
    """A hook that runs before the forward of a module."""

    def __init__(self, overlap: Steps, module: torch.nn.Module, parameters: list[torch.Tensor]) -> None:
        super().__init__(overlap, parameters)
        self.module = weakref.ref(module)
        # First: FSDP2's own hooks read the parameters.
        self.hook = module.register_forward_pre_hook(self, prepend=True)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model takes no overlapped steps.
        return (no_hook, ())

    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        """Wait, unless this is compiled code, or a replica that has copies of the parameters."""
        if is_compiling() or module is not self.module():
            return
        self.enter()

    def remove(self) -> None:
        """Remove the hook."""
        self.hook.remove()


class CompiledReader(Reader):
    """Stands before the call of a module that was compiled in place."""

    def __init__(self, overlap: Steps, module: torch.nn.Module, parameters: list[torch.Tensor]) -> None:
        super().__init__(overlap, parameters)
        self.module = weakref.ref(module)
        self.inner: Callable[..., Any] = no_hook
        self.install()

    def __reduce__(self) -> Any:
        return (_same, (self.inner,))

    def install(self) -> None:
        """Stand before the call, also if the module was compiled again since."""
        module = self.module()
        found = None if module is None else compiled_call(module)
        if found is not None and found is not self:
            self.inner = found
            _set_compiled_call(module, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Wait, and call the module."""
        if not is_compiling():
            self.enter()
        return self.inner(*args, **kwargs)

    def remove(self) -> None:
        """Restore the module's call."""
        module = self.module()
        if module is not None and compiled_call(module) is self:
            _set_compiled_call(module, self.inner)


def _same(inner: Callable[..., Any]) -> Callable[..., Any]:
    return inner


def compiled_call(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Return what calls a module that was compiled in place; None if it was not."""
    found = module.__dict__.get(_CALL)
    # Activation offload stands in the same place, in front of what was there.
    return found.previous if isinstance(found, Layer) else found


def _set_compiled_call(module: Any, call: Callable[..., Any]) -> None:
    found = module.__dict__.get(_CALL)
    if isinstance(found, Layer):
        found.inner = found.previous = call
    else:
        # Not with setattr, which a compiled module redirects.
        module.__dict__[_CALL] = call


class ShardReader(Reader):
    """Stands before FSDP2's gathering of the shards of one group of parameters."""

    def __init__(self, overlap: Steps, group: Any, parameters: list[torch.Tensor]) -> None:
        super().__init__(overlap, parameters)
        self.group = weakref.ref(group)
        self.inner: Callable[..., Any] = group.unshard
        self.others: set[int] = set()
        group.__dict__["unshard"] = self

    def __reduce__(self) -> Any:
        return (_same, (self.inner,))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Wait, and gather the shards."""
        if not is_compiling():
            self.enter()
            self.order_gathering()
        return self.inner(*args, **kwargs)

    def order_gathering(self) -> None:
        """Make the streams on which FSDP2 gathers wait for what the current stream waits for."""
        group = self.group()
        if not self.overlap.is_open or group is None:
            return
        for name in ("all_gather_copy_in_stream", "all_gather_stream"):
            stream = getattr(group.comm_ctx, name, None)
            handle = getattr(stream, "cuda_stream", None)
            if handle is not None:
                self.overlap.order(self.parameters, int(handle))

    def remove(self) -> None:
        """Restore FSDP2's own method."""
        group = self.group()
        if group is not None and group.__dict__.get("unshard") is self:
            del group.__dict__["unshard"]


class Begins:
    """A hook that runs before the forward of a model."""

    def __init__(self, overlap: Steps, model: torch.nn.Module) -> None:
        self.overlap = overlap
        self.hook = model.register_forward_pre_hook(self, prepend=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return (no_hook, ())

    def __call__(self, *_: Any) -> None:
        """Prepare for the pass."""
        if not is_compiling():
            self.overlap.prepare_pass()

    def remove(self) -> None:
        """Remove the hook."""
        self.hook.remove()


class Readers:
    """Every place where models read parameters of one optimizer.

    Parameters
    ----------
    overlap
        The overlapped steps.
    models
        The models.
    """

    def __init__(self, overlap: Steps, models: Iterable[torch.nn.Module]) -> None:
        self.overlap, self.models = overlap, list(models)
        self.all: list[Reader] = []
        # For each parameter, by its id, and for each module that owns it: the readers of which one is called.
        self._owners: dict[int, list[list[Reader]]] = {}
        self._begins: list[Begins] = []
        self._modules: list[torch.nn.Module] = []
        self._own: dict[int, list[Reader]] = {}
        self._compiled: dict[int, CompiledReader] = {}
        self._mine: set[int] = set()

    def install(self, mine: set[int]) -> None:
        """Put readers in place for the parameters with these ids."""
        self.remove()
        self._modules = list(dict.fromkeys(module for model in self.models for module in model.modules()))
        sharded: set[int] = set()
        for group in _groups_of(self._modules):
            parameters = [one.sharded_param for one in group.fsdp_params if id(one.sharded_param) in mine]
            if parameters:
                sharded.update(map(id, parameters))
                self._add([ShardReader(self.overlap, group, parameters)])
        self._mine = mine - sharded
        for module in self._modules:
            owned = [one for one in module._parameters.values() if one is not None and id(one) in self._mine]
            if owned and not _is_wrapper(module):
                self._own[id(module)] = [ModuleReader(self.overlap, module, list(dict.fromkeys(owned)))]
                self._add(self._own[id(module)])
        for module in filter(_is_wrapper, self._modules):
            inside = self._inside(module)
            if inside:
                self._stands_for(module, ModuleReader(self.overlap, module, inside))
        self.follow_compiled()
        self._begins = [Begins(self.overlap, model) for model in self.models]

    def _add(self, readers: list[Reader]) -> None:
        """Add the readers of one owner; later ones may stand for the first."""
        self.all += readers
        for parameter in readers[0].parameters:
            self._owners.setdefault(id(parameter), []).append(readers)

    def _inside(self, module: torch.nn.Module) -> list[torch.Tensor]:
        return [parameter for parameter in module.parameters() if id(parameter) in self._mine]

    def _stands_for(self, module: torch.nn.Module, reader: Reader) -> None:
        """Record that a reader waits for everything inside a module."""
        self.all.append(reader)
        for inner in module.modules():
            if id(inner) in self._own:
                self._own[id(inner)].append(reader)

    def follow_compiled(self) -> None:
        """Stand before the calls of modules that were compiled since."""
        for module in self._modules:
            if _CALL not in module.__dict__ or compiled_call(module) is None:
                continue
            known = self._compiled.get(id(module))
            if known is not None:
                known.install()
            elif inside := self._inside(module):
                self._compiled[id(module)] = made = CompiledReader(self.overlap, module, inside)
                self._stands_for(module, made)

    def waits_for(self, parameter: torch.Tensor) -> bool:
        """Whether each reader of a parameter has waited in the last pass, and so will in the next."""
        owners = self._owners.get(id(parameter))
        return owners is not None and all(any(reader.called for reader in readers) for readers in owners)

    def calls(self, parameter: torch.Tensor) -> int:
        """Return how often the modules that own a parameter were called in the last pass."""
        owners = self._owners.get(id(parameter), ())
        return sum(reader.calls for readers in owners for reader in readers)

    def place(self, parameter: torch.Tensor) -> int | None:
        """Return where a parameter stands in the order of a forward, if it was seen."""
        owners = self._owners.get(id(parameter), ())
        found = [reader.place for readers in owners for reader in readers if reader.place is not None]
        return min(found, default=None)

    def is_sharded(self, parameter: torch.Tensor) -> bool:
        """Whether FSDP2 gathers a parameter."""
        return id(parameter) not in self._mine

    def begin_step(self) -> None:
        """Forget which readers have waited."""
        for reader in self.all:
            reader.called, reader.pass_number = False, -1

    def remove(self) -> None:
        """Remove all of them."""
        for reader in self.all:
            reader.remove()
        for hook in self._begins:
            hook.remove()
        self.all, self._begins = [], []
        for found in (self._owners, self._own, self._compiled):
            found.clear()


def _is_wrapper(module: torch.nn.Module) -> bool:
    """Whether a module is what ``torch.compile`` made of another one."""
    return "_orig_mod" in module._modules


def _groups_of(modules: list[torch.nn.Module]) -> list[Any]:
    """Return FSDP2's groups of parameters."""
    found: dict[int, Any] = {}
    for module in modules:
        state = getattr(module, "_get_fsdp_state", None)
        if state is not None:
            several = getattr(state(), "_fsdp_param_groups", None) or [getattr(state(), "_fsdp_param_group", None)]
            found.update((id(group), group) for group in several if group is not None)
    return list(found.values())
