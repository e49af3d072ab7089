"""prime-rl: ``optim_cpu_offload`` through forebay.

``python -m forebay.integrations.prime_rl MODULE ARGUMENTS`` runs a module of prime-rl, such as
``prime_rl.trainer.sft.train``, after :func:`use`.
"""

from __future__ import annotations

import functools
import importlib
import runpy
import sys
from typing import Any

import forebay
from forebay.errors import OptionError
from forebay.integrations._moves import replace
from forebay.integrations._versions import check_version

__all__ = ["use"]

_TYPES = ("adamw", "sgd")
"""The optimizers of prime-rl that forebay has an update rule for."""

check_version("prime-rl", "0.8", "0.9")


def use(**options: Any) -> None:
    """Have prime-rl offload optimizers through forebay if ``model.optim_cpu_offload`` is true, as it is by default.

    With false the optimizer is torch's, on the GPU. Clipping stays with prime-rl, before the step.

    Parameters
    ----------
    options
        The options of :class:`forebay.AdamW` that torch's optimizers do not have, such as ``placement``.
    """
    if options.get("max_grad_norm") is not None:
        raise OptionError("prime-rl clips gradients before the step; leave max_grad_norm out, and set optim.max_norm")
    present = importlib.import_module("prime_rl.trainer.optim").setup_optimizer
    original = getattr(present, "_forebay_original", present)

    @functools.wraps(original)
    def setup_optimizer(
        config: Any,
        named_params: Any,
        parallel_dims: Any,
        cpu_offload: bool = False,
        full_offload_config: Any = None,
        *more: Any,
        **named: Any,
    ) -> Any:
        if not cpu_offload or full_offload_config is not None:
            return original(config, named_params, parallel_dims, cpu_offload, full_offload_config, *more, **named)
        if config.type not in _TYPES:
            raise OptionError(
                f"forebay has no update rule for optim.type={config.type}; use {' or '.join(_TYPES)}, or set "
                "model.optim_cpu_offload to false"
            )
        # prime-rl's own wrapper would move the state in each step.
        optimizer, manager = original(config, named_params, parallel_dims, False, None, *more, **named)
        return forebay.offload(optimizer, **options), manager

    setup_optimizer._forebay_original = original  # type: ignore[attr-defined]
    replace(present, "setup_optimizer", setup_optimizer)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m forebay.integrations.prime_rl MODULE ARGUMENTS")
    use()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
