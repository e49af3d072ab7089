"""Hugging Face's Trainer: optimizer, clipping inside its step, overlapped steps, activations, saves."""

from __future__ import annotations

import importlib
import inspect
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import forebay
from forebay._wrapped import bare
from forebay.errors import CheckpointError, OptionError
from forebay.integrations._trainer_clip import Clipping, limit_of
from forebay.integrations._trainer_saves import FOLDER, Saves, complete, newest
from forebay.integrations._versions import check_version
from forebay.optim.base import Optimizer

check_version("transformers", "5.3", "6.0")

transformers: Any = importlib.import_module("transformers")

__all__ = ["ForebayCallback", "attach", "optimizer_cls_and_kwargs"]


def optimizer_cls_and_kwargs(
    args: Any, optimizer: type[torch.optim.Optimizer] | None = None, **options: Any
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return what ``Trainer(optimizer_cls_and_kwargs=...)`` takes.

    The learning rate, betas, epsilon and weight decay are those of the arguments. The Trainer makes its usual groups,
    with and without weight decay.

    Parameters
    ----------
    args
        The ``TrainingArguments``.
    optimizer
        A class of forebay; ``forebay.AdamW`` by default.
    options
        Settings and options of that class, such as ``placement="hybrid"``. They override the arguments.
    """
    chosen: Any = forebay.AdamW if optimizer is None else optimizer
    asked = str(getattr(args.optim, "value", args.optim))
    if optimizer is None and not asked.startswith("adamw"):
        warnings.warn(
            f"args.optim={asked!r} is not used, forebay.AdamW takes its place; name the class, such as forebay.SGD, or "
            "make that optimizer and give it to the Trainer with optimizers=",
            stacklevel=2,
        )
    if options.get("max_grad_norm") is not None and limit_of(args) is not None:
        warnings.warn(
            f"max_grad_norm={options['max_grad_norm']} clips inside the step, and the Trainer clips with "
            f"args.max_grad_norm={args.max_grad_norm} before it; leave max_grad_norm out and use ForebayCallback, "
            "which clips once, or set args.max_grad_norm to 0",
            stacklevel=2,
        )
    given = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
    }
    takes = inspect.signature(chosen).parameters
    return chosen, {**{name: value for name, value in given.items() if name in takes}, **options}


def attach(
    trainer: Any,
    optimizer: type[torch.optim.Optimizer] | None = None,
    *,
    activations: bool | dict[str, Any] | None = None,
    overlap: bool | dict[str, Any] | None = None,
    saves: bool | dict[str, Any] | None = None,
    clip: bool = True,
    **options: Any,
) -> ForebayCallback:
    """Give a Trainer an optimizer of forebay and a :class:`ForebayCallback`, after the Trainer was made.

    This works with every Trainer, also with those whose constructor does not take ``optimizer_cls_and_kwargs``. The
    norm in the log is the one that the step computes; the Trainer does not compute it a second time.

    Parameters
    ----------
    trainer
        A ``transformers.Trainer`` that has not trained yet.
    optimizer
        A class of forebay; ``forebay.AdamW`` by default. A Trainer that has an optimizer already keeps the object, and
        ``forebay.offload`` converts it.
    activations, overlap, saves, clip
        As in :class:`ForebayCallback`.
    options
        Options of the optimizer.
    """
    if trainer.optimizer is None:
        trainer.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs(trainer.args, optimizer, **options)
    elif optimizer is not None:
        raise OptionError(
            "the trainer has an optimizer already; leave the class out to convert it, or make the trainer without "
            f"optimizers: {optimizer.__name__}"
        )
    else:
        forebay.offload(trainer.optimizer, **options)
    callback = ForebayCallback(activations=activations, overlap=overlap, saves=saves, clip=clip)
    callback.accelerator = trainer.accelerator
    trainer.add_callback(callback)
    return callback


class ForebayCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """What forebay does in a Trainer besides the optimizer.

    Everything is undone when training ends. After an error in ``train``, the next ``train`` or ``restore`` undoes it.

    Parameters
    ----------
    activations
        Offload activations: True, or a dict of options of ``forebay.offload_activations``.
    overlap
        Run updates under backward and under the next forward, with the same bits: True, or a dict of options of
        ``forebay.overlap_step``. If the Trainer does not clip, the norm is not known, and the log says NaN.
    saves
        Save the optimizer in the background, inside each checkpoint of the Trainer and instead of the Trainer's own
        ``optimizer.pt``: True, or a dict of options of ``forebay.checkpoint.async_save``. ``resume`` trains on.
    clip
        Clip to ``args.max_grad_norm`` inside the step of forebay's optimizer. If this is False, or the optimizer has no
        update rule of forebay, the Trainer clips before the step, as usual.
    """

    accelerator: Any = None
    """The Trainer's accelerator, which ``attach`` sets; None if it is not known."""
    offload: forebay.ActivationOffload | None = None
    """The activation offload of this run, or of the last one."""
    overlapped: Any = None
    """The handle of ``forebay.overlap_step`` of this run, or of the last one."""

    def __init__(
        self,
        *,
        activations: bool | dict[str, Any] | None = None,
        overlap: bool | dict[str, Any] | None = None,
        saves: bool | dict[str, Any] | None = None,
        clip: bool = True,
    ) -> None:
        self._activations = _options("activations", activations)
        self._overlap = _options("overlap", overlap)
        if self._overlap is not None and not clip:
            raise OptionError(
                "clip=False leaves clipping to the Trainer, and an overlapped step has taken the gradients by then; "
                "leave clip or overlap out"
            )
        self._saves = _options("saves", saves)
        self._clips = clip
        self._undo = ExitStack()
        self._clipping: Clipping | None = None
        self._run: Saves | None = None
        self._resumed: Path | None = None

    def resume(self, trainer: Any, checkpoint: str | Path | None = None, **options: Any) -> Any:
        """Train on from a checkpoint with a save in the background; return what ``trainer.train`` returns.

        Parameters
        ----------
        trainer
            The Trainer that has this callback.
        checkpoint
            A folder ``checkpoint-N``. By default the newest complete one of the output folder: a run that was killed
            may leave a newer one whose save is not complete.
        options
            Other arguments of ``trainer.train``.
        """
        folder = newest(trainer.args.output_dir) if checkpoint is None else Path(checkpoint)
        if complete(folder) is None:
            raise CheckpointError(
                f"the folder {FOLDER!r} of this checkpoint is absent or not complete: {folder}; resume from an earlier "
                "checkpoint"
            )
        self._resumed = folder
        try:
            return trainer.train(resume_from_checkpoint=str(folder), **options)
        finally:
            self._resumed = None

    def restore(self) -> None:
        """Undo everything that this callback has set."""
        self._undo.close()

    # The Trainer's events.

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **_: Any,
    ) -> None:
        """Start everything. The model is wrapped by now, and the Trainer has loaded its checkpoint."""
        # An earlier run may have ended with an error.
        self.restore()
        inner, scaler = bare(optimizer), getattr(optimizer, "scaler", None)
        with ExitStack() as undo:
            # An optimizer without an update rule of forebay does not clip inside its step.
            if self._clips and isinstance(inner, Optimizer):
                self._clipping = Clipping(args, inner, self.accelerator)
                undo.callback(self._end_clipping)
            if self._activations is not None:
                _check_activations(args)
                self.offload = forebay.offload_activations(model, **self._activations)
                undo.callback(self.offload.remove)
            if self._overlap is not None:
                self._check_overlap(args)
                steps = {"accumulation_steps": args.gradient_accumulation_steps, **self._overlap}
                self.overlapped = forebay.overlap_step(model, optimizer, **steps)
                undo.callback(self.overlapped.remove)
            if self._saves is not None:
                _check_saves(args, state, model, self.accelerator)
                self._run = Saves(self._saves, model, inner, lr_scheduler, scaler)
                undo.callback(self._end_saves, args, args.save_only_model)
                args.save_only_model = True
                if state.global_step:
                    self._load(args, state, inner)
            self._undo = undo.pop_all()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the random state of a checkpoint between epochs. The Trainer shuffles the batches after this event."""
        if self._run is not None and (args.ignore_data_skip or float(state.epoch or 0).is_integer()):
            self._run.set_random_state()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the random state of a checkpoint inside an epoch: its batches are skipped by now. Take the limit."""
        if self._run is not None:
            self._run.set_random_state()
        if self._clipping is not None:
            self._clipping.begin_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Return the limit."""
        if self._clipping is not None:
            self._clipping.end_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for the running save if another one follows: the Trainer may remove old checkpoints then."""
        if self._run is not None and control.should_save:
            self._before_save(args, state)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for the running save. The Trainer may save now, if the model is the best so far."""
        if self._run is not None:
            self._run.wait()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for the running save if another one follows, or if the best model is loaded over the weights."""
        if self._run is None:
            return
        if control.should_save:
            self._before_save(args, state)
        elif control.should_training_stop:
            self._run.wait()

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Begin a save inside the checkpoint that the Trainer has written."""
        if self._run is None:
            return
        folder = _folder(args, state)
        if _is_sharded(model):
            # The Trainer itself can only resume from weights in this form.
            utils = importlib.import_module("accelerate.utils")
            plugin = self.accelerator.state.fsdp_plugin
            utils.save_fsdp_model(plugin, self.accelerator, model, str(folder), adapter_only=True)
        self._run.begin(folder)
        if control.should_training_stop:
            self._run.wait()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Undo everything."""
        self.restore()

    def _before_save(self, args: Any, state: Any) -> None:
        assert self._run is not None
        self._run.wait()
        # A Trainer with sharded state does not write the model by itself, and expects the folder.
        _folder(args, state).mkdir(parents=True, exist_ok=True)

    def _load(self, args: Any, state: Any, optimizer: torch.optim.Optimizer) -> None:
        """Load the save in the checkpoint that the Trainer has loaded."""
        assert self._run is not None
        if self._resumed is None and len(optimizer.state):
            # The checkpoint has an optimizer.pt, and the Trainer has loaded it.
            return
        folder = self._resumed or _folder(args, state)
        if (path := complete(folder)) is None:
            raise CheckpointError(
                f"the folder {FOLDER!r} of this checkpoint is absent or not complete, so the optimizer cannot be "
                f"loaded; use callback.resume(trainer), which takes the newest complete checkpoint: {folder}"
            )
        self._run.load(path)

    def _check_overlap(self, args: Any) -> None:
        if self._clipping is None:
            return
        if self.accelerator is None and limit_of(args) is None:
            raise OptionError(
                "a Trainer that does not clip reads the gradients for its log, and an overlapped step has taken them "
                "by then; use attach(trainer, overlap=True) instead of callbacks=, or set args.max_grad_norm"
            )
        self._clipping.takes_gradients = True

    def _end_clipping(self) -> None:
        clipping, self._clipping = self._clipping, None
        if clipping is not None:
            clipping.remove()

    def _end_saves(self, args: Any, save_only_model: bool) -> None:
        args.save_only_model = save_only_model
        run, self._run = self._run, None
        if run is not None:
            run.wait()


def _options(name: str, value: Any) -> dict[str, Any] | None:
    """Return the options that a switch means; None if it is off."""
    if value is None or value is False:
        return None
    if value is True:
        return {}
    if isinstance(value, dict):
        return dict(value)
    raise OptionError(f"invalid {name}: {value!r}; use True, or a dict of options")


def _folder(args: Any, state: Any) -> Path:
    """Return the checkpoint that the Trainer writes at this step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _is_sharded(model: Any) -> bool:
    """Whether FSDP, the first or the second, wraps a model."""
    fsdp = importlib.import_module("torch.distributed.fsdp")
    return isinstance(model, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel))


def _check_activations(args: Any) -> None:
    if args.torch_compile:
        raise OptionError(
            "torch_compile=True compiles the whole model, so its layers are not called one by one; compile the layers "
            "instead, `for layer in layers: layer.compile()`, or leave activations out"
        )
    if args.n_gpu > 1:
        raise OptionError(
            f"activations cannot be offloaded from the copies that DataParallel makes; start one process for each GPU "
            f"with torchrun: n_gpu={args.n_gpu}"
        )


def _check_saves(args: Any, state: Any, model: Any, accelerator: Any) -> None:
    if args.save_total_limit == 1:
        raise OptionError(
            "save_total_limit=1 removes the only complete checkpoint before the next save in the background is "
            "complete; use save_total_limit=2 or more"
        )
    if state.is_hyper_param_search:
        raise OptionError("saves in the background do not work in a hyper-parameter search; leave saves out")
    if not _is_sharded(model):
        return
    if args.save_strategy == "best":
        raise OptionError("saves in the background under FSDP do not work with save_strategy='best'; use 'steps'")
    if accelerator is None:
        raise OptionError(
            "saves in the background under FSDP need the Trainer's accelerator; use attach(trainer, saves=...) instead "
            "of callbacks="
        )
