"""Guards of what sleeps: torch would read garbage from an emptied storage, or crash, where these raise.

A guard stands at every door that torch offers: calling a module, its ``state_dict`` and ``load_state_dict``, an
optimizer's ``step``, ``state_dict`` and ``load_state_dict``, and pickling or copying either, which is how
``torch.save`` of a whole model gets at its bytes. While a lazy wake is under way the same guards wait for what is
needed instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class Guard:
    """Stands at the doors of one module or optimizer until it is taken away."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def remove(self) -> None:
        """Take it away; what was there before is as it was."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _set(self, thing: Any, name: str, value: Any) -> None:
        """Set an attribute of the object itself, until the guard goes."""
        before = thing.__dict__.get(name, self)

        def undo() -> None:
            if before is self:
                thing.__dict__.pop(name, None)
            else:
                thing.__dict__[name] = before

        thing.__dict__[name] = value
        self._undo.append(undo)

    def _no_pickle(self, thing: Any, check: Callable[[str], None]) -> None:
        # Both pickle and copy ask the object for this before they look at its attributes.
        original = getattr(type(thing), "__getstate__", object.__getstate__)

        def get_state() -> Any:
            check("pickling or copying")
            return original(thing)

        self._set(thing, "__getstate__", get_state)

    def _no_zeros(self, thing: Any, check: Callable[[str], None]) -> None:
        # Gradients that are dropped need no memory; gradients that are filled with zeros do.
        original = thing.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            if not set_to_none:
                check("zero_grad(set_to_none=False)")
            original(set_to_none)

        self._set(thing, "zero_grad", zero_grad)


class ModuleGuard(Guard):
    """Guards one module.

    Parameters
    ----------
    module
        The module.
    on_forward
        Called with the module and whether its inner modules will be called one by one, before each forward; raises or
        waits.
    check
        Called with the operation's name before anything else that reads or writes the module; raises or waits.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        on_forward: Callable[[torch.nn.Module, bool], None],
        check: Callable[[str], None],
    ) -> None:
        super().__init__()
        # A compiled module does not call the hooks of what was compiled into it.
        whole = type(module).__name__ == "OptimizedModule"

        def before_forward(module: torch.nn.Module, *_: Any) -> None:
            on_forward(module, whole)

        def before_save(*_: Any) -> None:
            check("state_dict()")

        def before_load(*_: Any) -> None:
            check("load_state_dict()")

        self._undo.append(module.register_forward_pre_hook(before_forward, prepend=True).remove)
        save: Any = module.register_state_dict_pre_hook
        self._undo.append(save(before_save).remove)
        load = getattr(module, "register_load_state_dict_pre_hook", module._register_load_state_dict_pre_hook)
        self._undo.append(load(before_load).remove)
        self._no_pickle(module, check)
        self._no_zeros(module, check)
        # What to(), cuda(), half() and their like go through.
        convert: Any = module._apply

        def apply(*arguments: Any, **keywords: Any) -> Any:
            check("to(), cuda() or another conversion")
            return convert(*arguments, **keywords)

        self._set(module, "_apply", apply)
        compiled = module.__dict__.get("_compiled_call_impl")
        if compiled is not None:

            def call(*arguments: Any, **keywords: Any) -> Any:
                on_forward(module, True)
                return compiled(*arguments, **keywords)

            self._set(module, "_compiled_call_impl", call)


class OptimizerGuard(Guard):
    """Guards one optimizer.

    Parameters
    ----------
    optimizer
        The optimizer.
    check
        Called with the operation's name before it; raises or waits.
    check_state
        The same for what only reads the optimizer's state.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, check: Callable[[str], None], check_state: Callable[[str], None]
    ) -> None:
        super().__init__()

        def before_step(*_: Any) -> None:
            check("step()")

        def before_save(*_: Any) -> None:
            check_state("state_dict()")

        def before_load(*_: Any) -> None:
            check("load_state_dict()")

        self._undo.append(optimizer.register_step_pre_hook(before_step).remove)
        self._undo.append(optimizer.register_state_dict_pre_hook(before_save, prepend=True).remove)
        self._undo.append(optimizer.register_load_state_dict_pre_hook(before_load, prepend=True).remove)
        self._no_pickle(optimizer, check_state)
        self._no_zeros(optimizer, check)


def gathers_ahead(model: torch.nn.Module) -> bool:
    """Whether FSDP2 was told to read the weights of modules before they are called."""
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", None)
        if state is not None and getattr(state(), "_states_to_forward_prefetch", None):
            return True
    return False


def calling_units(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Return the modules that are sure to be called through their own forward, so that they can wait for themselves.

    Those are the members of a ``Sequential``, and members of lists and dicts that have modules inside, as the layers of
    a transformer do. Any other module may have its weights read by the module around it, as ``MultiheadAttention``
    reads those of ``out_proj``, so the one around it waits for them.
    """
    units: set[torch.nn.Module] = set()
    for module in model.modules():
        if type(module).forward is torch.nn.Sequential.forward:
            units.update(module.children())
        elif isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            units.update(child for child in module.children() if any(True for _ in child.children()))
    return units
