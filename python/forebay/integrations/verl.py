"""verl: its moves of optimizer state leave forebay's optimizers alone, and its activation offload is forebay's.

verl imports this file itself: forebay has an entry point in the group ``verl.plugins``. The optimizer is chosen in
verl's configuration, with ``optimizer_impl=forebay``.

verl hides errors of plugins, so an error here is a warning too.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import TYPE_CHECKING, Any

from forebay.activations import offload_activations
from forebay.integrations._moves import replace, skip_moves
from forebay.integrations._versions import check_version
from forebay.optim.base import Optimizer

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from forebay.activations import ActivationOffload

__all__ = ["activation_options", "enable_activation_offloading"]

activation_options: dict[str, Any] = {}
"""The options of :func:`forebay.offload_activations` for ``model.enable_activation_offload``."""


def enable_activation_offloading(model: torch.nn.Module, strategy: str, enable_ckpt: bool = False) -> ActivationOffload:
    """Do what verl's function of this name does, with forebay.

    Parameters
    ----------
    model
        The model, wrapped by FSDP1 or FSDP2.
    strategy
        Not needed: forebay finds out how the model is wrapped.
    enable_ckpt
        Not needed: forebay finds out whether layers are recomputed. The model's own gradient checkpointing stays.
    """
    made = offload_activations(model, **activation_options)
    # A plain attribute, where a user finds the figures.
    model.__dict__["forebay_activations"] = made
    return made


def _says_once(build: Callable[..., Any]) -> Callable[..., Any]:
    """Have verl's ``build_optimizer`` say that gradients would be clipped twice."""

    @functools.wraps(build)
    def built(parameters: Any, config: Any) -> Any:
        optimizer = build(parameters, config)
        if isinstance(optimizer, Optimizer) and optimizer.max_grad_norm is not None:
            warnings.warn(
                f"gradients are clipped both by verl, to clip_grad={config.clip_grad}, and by "
                f"max_grad_norm={optimizer.max_grad_norm}; leave max_grad_norm out of override_optimizer_config",
                stacklevel=2,
            )
        return optimizer

    return built


def _install() -> None:
    check_version("verl", "0.9", "0.10")
    config = importlib.import_module("verl.workers.config.optimizer")
    replace(config.build_optimizer, "build_optimizer", _says_once(config.build_optimizer))
    skip_moves(importlib.import_module("verl.utils.fsdp_utils"), "offload_fsdp_optimizer", "load_fsdp_optimizer")
    name = enable_activation_offloading.__name__
    original = getattr(importlib.import_module("verl.utils.activation_offload"), name)
    replace(original, name, enable_activation_offloading)


try:
    _install()
except Exception as error:
    warnings.warn(
        f"forebay's plugin does nothing in this run of verl: {error}; VERL_USE_EXTERNAL_PLUGINS=none switches it off",
        stacklevel=2,
    )
    raise
