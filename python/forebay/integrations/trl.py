"""TRL's trainers: the optimizer for all of them, and sleep while GRPO and RLOO generate."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

import forebay
from forebay._wrapped import bare
from forebay.errors import OptionError
from forebay.integrations import transformers as _transformers
from forebay.integrations._versions import check_version
from forebay.integrations.transformers import ForebayCallback, optimizer_cls_and_kwargs

if TYPE_CHECKING:
    from collections.abc import Callable

check_version("trl", "1.0", "2.0")

__all__ = ["ForebayCallback", "SleepCallback", "attach", "optimizer_cls_and_kwargs"]

SLEEPS = {"optimizer": ("optimizer", "gradients"), "all": ("parameters", "buffers", "optimizer", "gradients")}
"""What sleeps while a trainer generates, by the name of the option."""


def attach(
    trainer: Any,
    optimizer: type[torch.optim.Optimizer] | None = None,
    *,
    activations: bool | dict[str, Any] | None = None,
    overlap: bool | dict[str, Any] | None = None,
    saves: bool | dict[str, Any] | None = None,
    clip: bool = True,
    sleep: str | None = None,
    **options: Any,
) -> ForebayCallback:
    """Give a trainer of TRL an optimizer of forebay, after the trainer was made.

    The trainers for DPO and GRPO do not take ``optimizer_cls_and_kwargs``. This works with all of them.

    Parameters
    ----------
    trainer
        Any trainer of TRL that has not trained yet.
    optimizer, activations, overlap, saves, clip, options
        As in :func:`forebay.integrations.transformers.attach`.
    sleep
        What leaves the GPU while a trainer such as GRPO generates. ``"optimizer"``: gradients and the state of the
        optimizer that is on the GPU; the weights generate. ``"all"``: the weights too, where vLLM generates with its
        own weights on the same GPU (``vllm_mode="colocate"``).
    """
    if activations and getattr(trainer.args, "activation_offloading", False):
        raise OptionError("activation_offloading=True of TRL offloads activations already; leave one of them out")
    # Checked before anything is changed.
    sleeping = None if sleep is None else SleepCallback(trainer, sleep)
    callback = _transformers.attach(
        trainer, optimizer, activations=activations, overlap=overlap, saves=saves, clip=clip, **options
    )
    if sleeping is not None:
        trainer.add_callback(sleeping)
    return callback


class SleepCallback(_transformers.transformers.TrainerCallback):  # type: ignore[misc]
    """Puts a trainer's tensors to sleep while it generates, with a :class:`forebay.Sleeper`.

    Parameters
    ----------
    trainer
        A trainer of TRL that generates.
    what
        ``"optimizer"`` or ``"all"``, as ``sleep`` of :func:`attach`.
    """

    sleeper: forebay.Sleeper | None = None
    """The sleeper of this run, or of the last one."""

    def __init__(self, trainer: Any, what: str) -> None:
        if what not in SLEEPS:
            raise OptionError(f"invalid sleep: {what!r}; use 'optimizer' or 'all'")
        if not hasattr(trainer, "use_vllm"):
            raise OptionError(f"sleep is for trainers that generate; leave it out for {type(trainer).__name__}")
        if trainer.use_vllm and trainer.vllm_mode != "colocate":
            raise OptionError(
                "sleep makes room for generation on the same GPU, and vLLM generates elsewhere; leave sleep out: "
                f"vllm_mode={trainer.vllm_mode!r}"
            )
        if what == "all" and not trainer.use_vllm:
            raise OptionError(
                "sleep='all' needs use_vllm=True: without vLLM the trainer generates with its own weights; use "
                "sleep='optimizer'"
            )
        self._engine = trainer.vllm_generation if trainer.use_vllm else None
        self._kinds = SLEEPS[what]
        self._undo = ExitStack()

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Wrap the methods that generate."""
        self._undo.close()
        self.sleeper = forebay.Sleeper(model, bare(optimizer), gradients="keep")
        # vLLM's weights are synchronised before this method, so the trainer's weights may sleep inside it.
        owner, names = (
            (model, ("generate", "generate_batch")) if self._engine is None else (self._engine, ("generate",))
        )
        for name in names:
            if hasattr(owner, name):
                self._undo.callback(_replace(owner, name, functools.partial(self._generate, getattr(owner, name))))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Undo everything."""
        self._undo.close()

    def _generate(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        assert self.sleeper is not None
        with self.sleeper.asleep(self._kinds):
            return original(*args, **options)


def _replace(owner: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Put a method on an instance; return a function that undoes it."""
    before = vars(owner).get(name)
    vars(owner)[name] = method

    def undo() -> None:
        if before is None:
            del vars(owner)[name]
        else:
            vars(owner)[name] = before

    return undo
