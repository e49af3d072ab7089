"""AReaL: its FSDP engines with the optimizer's state on the host.

This module has a class for each engine of ``areal.engine.fsdp_engine``, with the same name. AReaL sends the path of a
class to its workers, so that they import this module themselves.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import forebay
from forebay.errors import OptionError
from forebay.integrations._versions import check_version

__all__ = ["use"]

check_version("areal", "1.0.4", "1.1")
_engines: Any = importlib.import_module("areal.engine.fsdp_engine")

_NAMES = ("FSDPEngine", "FSDPPPOActor", "FSDPPPOCritic", "FSDPLMEngine", "FSDPRWEngine", "FSDPDPOEngine")


class _Offloads:
    """Offloads the optimizer that an engine has built."""

    forebay_options: ClassVar[dict[str, Any]] = {}
    """The options of :class:`forebay.AdamW` that torch's AdamW does not have; for a subclass to replace."""

    # Attributes of AReaL's engines.
    config: Any
    cpu_offload: Any
    device: Any
    optimizer: Any
    optimizer_config: Any

    def _create_optimizer(self, ft_spec: Any) -> None:
        """Build the optimizer and its schedule as AReaL does, then offload the optimizer."""
        if self.optimizer_config is None:
            return
        if self.config.fsdp.per_layer_optim_step:
            raise OptionError(
                "per_layer_optim_step=true offloads the optimizer too; set it to false, or use AReaL's own engine"
            )
        if self.optimizer_config.type == "adam_bf16":
            raise OptionError("optimizer type adam_bf16 is not supported: forebay's state is f32; use adam or sgd")
        if self.forebay_options.get("max_grad_norm") is not None:
            raise OptionError("AReaL clips gradients before the step; leave max_grad_norm out of forebay_options")
        super()._create_optimizer(ft_spec)  # type: ignore[misc]
        # With offload_params the parameters are on the CPU, and the step is to run on the GPU.
        device = {} if self.cpu_offload is None else {"device": self.device}
        forebay.offload(self.optimizer, **{**device, **self.forebay_options})


for _name in _NAMES:
    if (_engine := getattr(_engines, _name, None)) is not None:
        _about = f"AReaL's {_name} with the optimizer's state on the host."
        globals()[_name] = type(_name, (_Offloads, _engine), {"__doc__": _about})


def use() -> None:
    """Have AReaL's trainers take the classes of this module."""
    engines = importlib.import_module("areal.engine")
    for name in _NAMES:
        if name in globals():
            setattr(engines, name, globals()[name])
