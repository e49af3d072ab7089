"""Lightning: a callback that offloads activations, clips inside the step and stops moves of optimizer state.

The optimizer is forebay's own: return ``forebay.AdamW(self.parameters())`` from ``configure_optimizers``. The callback
works with ``lightning.pytorch`` and with ``pytorch_lightning``, which have classes of their own for the same things.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import TYPE_CHECKING, Any

import torch

from forebay._wrapped import bare
from forebay.activations import ActivationOffload, offload_activations
from forebay.activations.find import find_layers
from forebay.integrations._moves import skip_moves
from forebay.integrations._versions import check_version
from forebay.optim.base import Optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["ForebayCallback"]

# The package, the modules of its trainer and of its fabric.
_FLAVOURS = (
    ("lightning", "lightning.pytorch", "lightning.fabric"),
    ("pytorch-lightning", "pytorch_lightning", "lightning_fabric"),
)


def _installed() -> list[tuple[str, str, str]]:
    """Return what is installed of Lightning; often it is both."""
    found = [flavour for flavour in _FLAVOURS if importlib.util.find_spec(flavour[1].partition(".")[0]) is not None]
    for package, *_ in found or _FLAVOURS[:1]:
        check_version(package, "2.5", "2.7")
    return found


_INSTALLED = _installed()
_PLUGINS = [importlib.import_module(f"{trainer}.plugins.precision") for _, trainer, _ in _INSTALLED]
_CALLBACKS = [importlib.import_module(f"{trainer}.callbacks").Callback for _, trainer, _ in _INSTALLED]
_Callback: Any = type("_Callback", tuple(_CALLBACKS), {})


class ForebayCallback(_Callback):  # type: ignore[misc]
    """Makes a ``Trainer`` work well with forebay's optimizers and offloads activations.

    Moves of optimizer state by Lightning are skipped for forebay's optimizers. Their gradients are clipped inside the
    step when Lightning is asked to clip the norm; the result is the same, and the gradients are read once less.

    Parameters
    ----------
    activations
        Whether to offload activations in ``fit``; or the options of :func:`forebay.offload_activations`.
    """

    def __init__(self, activations: bool | Mapping[str, Any] = False) -> None:
        self.offload: ActivationOffload | None = None
        """What offloads activations while ``fit`` runs and after it, for its figures."""
        self._options = None if activations is False else dict(() if activations is True else activations)
        self._undo: list[Any] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stop moves of state by this process's strategies."""
        for _, _, fabric in _INSTALLED:
            skip_moves(importlib.import_module(f"{fabric}.utilities.optimizer"), "_optimizer_to_device")

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Take clipping over and offload activations. Model and optimizers are on their device now."""
        self._remove()
        self._clip_in_step(trainer)
        for wrapper in trainer.strategy._lightning_optimizers:
            _forward_to_inner(wrapper)
        if self._options is not None:
            layers = find_layers(pl_module, self._options.get("layers"))
            self.offload = offload_activations(_called(pl_module, layers), **{**self._options, "layers": layers})
            self._undo.append(self.offload.remove)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Undo what ``on_fit_start`` did."""
        self._remove()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Undo what ``on_fit_start`` did."""
        self._remove()

    def _remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _clip_in_step(self, trainer: Any) -> None:
        """Have the precision plugin pass the norm on, instead of changing the gradients."""
        plugin = trainer.precision_plugin
        # A plugin with clipping of its own knows that the plain norm is wrong, as FSDP's plugin does.
        if any(type(plugin).clip_grad_by_norm is package.Precision.clip_grad_by_norm for package in _PLUGINS):
            plugin.clip_grad_by_norm = clip = _ClipInStep(plugin.clip_grad_by_norm)
            self._undo += [lambda: delattr(plugin, "clip_grad_by_norm"), clip.remove]


class _ClipInStep:
    """Replaces a plugin's ``clip_grad_by_norm``: the next step of forebay's optimizer clips."""

    def __init__(self, original: Callable[..., None]) -> None:
        self.original = original
        # The limit that an optimizer has again after its step, and the hook that sets it.
        self.waiting: dict[Optimizer, tuple[float | None, Any]] = {}
        self.warned = False

    def __call__(self, optimizer: Any, clip_val: float) -> None:
        inner = bare(optimizer)
        if not isinstance(inner, Optimizer):
            self.original(optimizer, clip_val)
            return
        if inner not in self.waiting:
            hook = inner.register_step_post_hook(lambda *_: self.restore(inner))
            self.waiting[inner] = inner.max_grad_norm, hook
        own, _ = self.waiting[inner]
        if own is not None and not self.warned:
            self.warned = True
            warnings.warn(
                f"gradients are clipped both by Lightning, to {clip_val}, and by max_grad_norm, to {own}; the smaller "
                "limit holds; use one of them",
                stacklevel=2,
            )
        inner.max_grad_norm = float(clip_val) if own is None else min(float(clip_val), own)

    def restore(self, optimizer: Optimizer) -> None:
        """Give an optimizer its own limit again: the next step clips only if Lightning asks for it again."""
        own, hook = self.waiting.pop(optimizer)
        hook.remove()
        optimizer.max_grad_norm = own

    def remove(self) -> None:
        """Give all optimizers their own limits again."""
        for optimizer in list(self.waiting):
            self.restore(optimizer)


def _called(pl_module: torch.nn.Module, layers: list[torch.nn.Module]) -> torch.nn.Module:
    """Return the module whose call is a pass. Lightning calls ``training_step``, not the module itself."""
    lists = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
    for child in pl_module.children():
        inside = set(child.modules())
        if not isinstance(child, lists) and inside.issuperset(layers):
            return child
    return pl_module


def _forward_to_inner(wrapper: Any) -> None:
    """Have a ``LightningOptimizer`` pass on all that forebay's optimizer has.

    The wrapper also inherits from the optimizer's class. A method would run on the wrapper and set attributes there.
    """
    inner = wrapper.optimizer
    if not isinstance(inner, Optimizer) or hasattr(type(wrapper), "_forebay_forwards"):
        return
    theirs = {name for cls in type(wrapper).__mro__ if not issubclass(type(inner), cls) for name in vars(cls)}
    public = {name for name in dir(inner) if not name.startswith("_")} - theirs
    members = {name: property(*_passed_on(name)) for name in public}
    wrapper.__class__ = type(type(wrapper).__name__, (type(wrapper),), {**members, "_forebay_forwards": True})


def _passed_on(name: str) -> tuple[Any, Any]:
    def read(wrapper: Any) -> Any:
        return getattr(wrapper.optimizer, name)

    def write(wrapper: Any, value: Any) -> None:
        setattr(wrapper.optimizer, name, value)

    return read, write
