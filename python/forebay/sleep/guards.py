"""Guards of sleeping modules and optimizers: they raise where torch would read an empty storage or crash.

There is a guard at every entry point that torch has: calling a module, its ``state_dict`` and ``load_state_dict``, an
optimizer's ``step``, ``state_dict`` and ``load_state_dict``, and pickling or copying either, which is how
``torch.save`` of a whole model reads its bytes. During a lazy wake, the guards wait for the tensors that are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Guard:
    """The guards of one module or optimizer, until they are removed."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def remove(self) -> None:
        """Remove the guards, and restore the earlier attributes."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _set(self, thing: Any, name: str, value: Any) -> None:
        """Set an attribute of the object itself, until the guard is removed."""
        before = thing.__dict__.get(name, self)

        def undo() -> None:
            if before is self:
                thing.__dict__.pop(name, None)
            else:
                thing.__dict__[name] = before

        thing.__dict__[name] = value
        self._undo.append(undo)

    def _no_pickle(self, thing: Any, check: Callable[[str], None]) -> None:
        # Both pickle and copy call this before they read the object's attributes.
        original = getattr(type(thing), "__getstate__", object.__getstate__)

        def get_state() -> Any:
            check("pickling or copying")
            return original(thing)

        self._set(thing, "__getstate__", get_state)

    def _no_zeros(self, thing: Any, check: Callable[[str], None]) -> None:
        # Dropping gradients needs no memory; filling them with zeros does.
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
        Called before each forward with the module, and with whether it runs without calling its inner modules; raises
        or waits.
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
        # to(), half() and other conversions call this.
        convert: Any = module._apply

        def apply(*arguments: Any, **keywords: Any) -> Any:
            check("to() or another conversion")
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
        The same for operations that only read the optimizer's state.
    wait
        Called before state of forebay's optimizers is looked up; waits for bytes that are on their way.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        check: Callable[[str], None],
        check_state: Callable[[str], None],
        wait: Callable[[], None],
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
        settle = getattr(optimizer, "_settle", None)
        if settle is not None:
            # State in fewer bits is shown as a copy, which would never get what arrives later.

            def settled(parameter: torch.Tensor | None) -> None:
                wait()
                settle(parameter)

            self._set(optimizer, "_settle", settled)


class Guards:
    """The guards of all models and optimizers of a sleeper."""

    def __init__(self) -> None:
        self._guards: list[Guard] = []

    def put(
        self,
        models: Iterable[torch.nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        on_forward: Callable[[int], Callable[[torch.nn.Module, bool], None]],
        check: Callable[[str, int | None], Callable[[str], None]],
        wait: Callable[[], None],
    ) -> None:
        """Guard everything, unless it is guarded already. Owners are numbered: models first, then optimizers.

        Parameters
        ----------
        models, optimizers
            What to guard.
        on_forward
            Returns, for a model's number, a function to call before a forward of its modules.
        check
            Returns, for a label and an owner's number, a function to call before another operation; None is for any
            owner.
        wait
            Waits for a wake under way.
        """
        if self._guards:
            return
        owner = -1
        try:
            for owner, model in enumerate(models):
                for module in model.modules():
                    self._guards.append(ModuleGuard(module, on_forward(owner), check("the model", owner)))
            for number, optimizer in enumerate(optimizers, start=owner + 1):
                check_all = check("the optimizer", None)
                self._guards.append(OptimizerGuard(optimizer, check_all, check("the optimizer", number), wait))
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove all guards."""
        while self._guards:
            self._guards.pop().remove()


def gathers_ahead(model: torch.nn.Module) -> bool:
    """Whether FSDP2 reads the weights of modules before they are called."""
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", None)
        if state is not None and getattr(state(), "_states_to_forward_prefetch", None):
            return True
    return False


def calling_units(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Return the modules that are always called through their own forward, so that each can wait for its own tensors.

    Those are the members of a ``Sequential``, and members of lists and dicts that have modules inside, such as the
    layers of a transformer. The weights of any other module may be read by the module around it, as
    ``MultiheadAttention`` reads those of ``out_proj``; then the module around it waits for them.
    """
    units: set[torch.nn.Module] = set()
    for module in model.modules():
        if type(module).forward is torch.nn.Sequential.forward:
            units.update(module.children())
        elif isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            units.update(child for child in module.children() if any(True for _ in child.children()))
    return units
