"""torchtitan: optimizers whose state is on the host, in its own container.

torchtitan 0.3 builds the container from a configuration, torchtitan 0.2 with a function of the ``TrainSpec``.
:func:`offloaded` takes either and returns the same kind.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import TYPE_CHECKING, Any

import forebay
from forebay.errors import OptionError
from forebay.integrations._versions import check_version

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["offloaded"]

VERSION = check_version("torchtitan", "0.2.2", "0.4")
_optimizers: Any = importlib.import_module("torchtitan.components.optimizer")
_Container: Any = _optimizers.OptimizersContainer

_NAMES = ("Adam", "AdamW")
"""The names of torchtitan's optimizers that become forebay's."""


def offloaded(target: Any, **options: Any) -> Any:
    """Return a configuration or a builder of the same optimizers, with their state on the host.

    Parameters
    ----------
    target
        With torchtitan 0.3 an ``OptimizersContainer.Config``, such as ``default_adamw(lr=3e-4)``. With torchtitan 0.2 a
        function such as ``build_optimizers``, for ``build_optimizers_fn`` of a ``TrainSpec``.
    options
        The options of :class:`forebay.AdamW` that torch's optimizers do not have, such as ``placement``.
    """
    _check_clipping(options)
    if hasattr(_Container, "Config"):
        return _configuration(target, options)
    if not callable(target):
        raise OptionError(f"invalid target: {target!r}; torchtitan {VERSION} takes a function like build_optimizers")
    return _builder(target, options)


def _check_clipping(options: Mapping[str, Any]) -> None:
    """Raise if optimizers are to clip: torchtitan clips all gradients together, and each optimizer its own."""
    if options.get("max_grad_norm") is not None:
        raise OptionError(
            "torchtitan clips gradients before the step; leave max_grad_norm out, and set training.max_norm"
        )


def _builder(build: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(build)
    def built(*args: Any, **kwargs: Any) -> Any:
        container = build(*args, **kwargs)
        if type(container) is not _Container:
            raise OptionError(
                f"{type(container).__name__} is not supported: it steps at other moments than forebay; switch off "
                "early_step_in_backward and fault tolerance"
            )
        for optimizer in container.optimizers:
            forebay.offload(optimizer, **options)
        return container

    return built


def _configuration(config: Any, options: dict[str, Any]) -> Any:
    if type(config) is not _Container.Config:
        raise OptionError(
            f"invalid target: {type(config).__qualname__}; torchtitan {VERSION} takes an OptimizersContainer.Config; a "
            "container of your own can inherit from forebay.integrations.torchtitan.ForebayOptimizers"
        )
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    given = config.optimizer_factory_kwargs_by_name
    settings["optimizer_factory_kwargs_by_name"] = given | {name: options | given.get(name, {}) for name in _NAMES}
    return ForebayOptimizers.Config(**settings)


if hasattr(_Container, "Config"):

    class ForebayOptimizers(_Container):  # type: ignore[misc]
        """torchtitan's container with forebay's optimizers. ``optimizer_factory_kwargs_by_name`` has their options."""

        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(_Container.Config):  # type: ignore[misc]
            """The configuration of torchtitan's container."""

        def __init__(self, config: Config, *, model_parts: list[Any]) -> None:
            if config.implementation == "fused_opt_states_bf16":
                raise OptionError(
                    "implementation=fused_opt_states_bf16 is not supported: forebay's state is f32; use fused"
                )
            for given in config.optimizer_factory_kwargs_by_name.values():
                _check_clipping(given)
            super().__init__(config, model_parts=model_parts)

        @staticmethod
        def _resolve_optimizer_factory(name: str) -> Any:
            return getattr(forebay, name) if name in _NAMES else _Container._resolve_optimizer_factory(name)
