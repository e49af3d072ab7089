"""xtuner V1: a configuration of AdamW whose state is on the host.

``swap_optimizer`` has xtuner's own meaning: if it is true, the state is offloaded and xtuner does not move it; if not,
the optimizer is torch's AdamW.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

import forebay
from forebay.errors import OptionError
from forebay.integrations._versions import check_version

__all__ = ["ForebayAdamWConfig"]


def _configs() -> Any:
    check_version("xtuner", "0.2", "0.3")
    # V0 and V1 have the same version.
    if importlib.util.find_spec("xtuner.v1") is None:
        raise OptionError("this xtuner is V0, without xtuner.v1; install V1 from its repository")
    return importlib.import_module("xtuner.v1.config.optim")


_AdamWConfig: Any = _configs().AdamWConfig


class ForebayAdamWConfig(_AdamWConfig):  # type: ignore[misc]
    """xtuner's ``AdamWConfig`` with its state on the host: ``optim_cfg=ForebayAdamWConfig(lr=1e-5)``.

    Attributes
    ----------
    swap_optimizer
        Whether to offload; by default on. xtuner reads it too, and then leaves the state where it is.
    options
        The options of :class:`forebay.AdamW` that torch's AdamW does not have, such as ``placement``.
    """

    swap_optimizer: bool | None = True
    options: dict[str, Any] = {}  # noqa: RUF012 -- pydantic copies the defaults of a model

    def build(self, model: Any) -> torch.optim.Optimizer:
        """Build the optimizer of a model that is sharded already."""
        if self.options.get("max_grad_norm") is not None:
            raise OptionError("xtuner clips gradients before the step; leave max_grad_norm out of options")
        # xtuner builds torch's AdamW here, and logs what is trained.
        made: torch.optim.Optimizer = _AdamWConfig.build(self.model_copy(update={"swap_optimizer": False}), model)
        return forebay.offload(made, **self.options) if self.swap_optimizer else made
