"""Runs of verl's FSDP engine on the CPU, in a process of their own: ``python -m support.verl_runs FOLDER``.

verl knows GPUs and NPUs, and lets plugins add platforms; this file adds one for the CPU. The engine's ``_build_module``
and ``forward_step`` are replaced: they need flash-attention and another version of transformers. Everything else is
verl's: FSDP2, the optimizer, moves of state, clipping, schedules and checkpoints.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import forebay.optim.state as forebay_state
from support.models import tiny
from support.tensors import random

FSDP = "verl.workers.engine.fsdp.transformer_impl"


def use_cpu() -> None:
    """Have verl compute on the CPU."""
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class Cpu(PlatformCUDA):  # type: ignore[misc,valid-type]
        device_name = "cpu"
        device_module = torch.cpu

        def is_available(self) -> bool:
            return True

        def current_device(self) -> str:
            return "cpu"

        def synchronize(self, device_index: Any = None) -> None:
            """Do nothing: the CPU has finished."""

        def empty_cache(self) -> None:
            """Do nothing: there is no cache."""

        def communication_backend_name(self) -> str:
            return "gloo"

    # verl's checkpoints have the state of the device's generator.
    torch.cpu.get_rng_state, torch.cpu.set_rng_state = torch.get_rng_state, torch.set_rng_state  # type: ignore[attr-defined]
    platform_manager._current_platform = Cpu()


def engine(folder: Path, *, optimizer: str, offload: bool, **more: Any) -> Any:
    """Return verl's engine with a small model, sharded by FSDP2."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    class Engine(FSDPEngine):  # type: ignore[misc,valid-type]
        def _build_module(self) -> torch.nn.Module:
            model = tiny("qwen2", torch.device("cpu"))
            if self.model_config.enable_gradient_checkpointing:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            return model

    model_config = HFModelConfig(
        path=str(folder / "model"),
        load_tokenizer=False,
        use_remove_padding=False,
        override_config={"attn_implementation": "sdpa"},
        enable_activation_offload=offload,
    )
    engine_config = FSDPEngineConfig(
        strategy="fsdp2",
        optimizer_offload=offload,
        use_torch_compile=False,
        fsdp_size=1,
        mixed_precision={"param_dtype": "fp32"},
    )
    options = {"placement": "host", **more} if optimizer == "forebay" else None
    optimizer_config = FSDPOptimizerConfig(
        optimizer_impl=optimizer,
        optimizer="AdamW",
        lr=1e-3,
        total_training_steps=6,
        lr_scheduler_type="cosine",
        override_optimizer_config=options,
    )
    made = Engine(model_config, engine_config, optimizer_config, CheckpointConfig())
    made.initialize()
    return made


def train(made: Any, steps: range) -> None:
    """Train as verl's workers do."""
    for step in steps:
        tokens = random((2, 48), 50 + step).mul(1e4).long().remainder(90).add(3)
        with made.train_mode():
            made.optimizer_zero_grad()
            made.module(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            made.optimizer_step()
            made.lr_scheduler_step()


def weights(made: Any) -> list[torch.Tensor]:
    """Return the whole parameters."""
    return [parameter.full_tensor().detach().clone() for parameter in made.module.parameters()]


def moved_by_verl() -> int:
    """Return how many tensors of another optimizer's state verl moves."""
    from verl.utils.fsdp_utils import load_fsdp_optimizer, offload_fsdp_optimizer

    writes = []

    class Recorded(dict[str, torch.Tensor]):
        def __setitem__(self, name: str, value: torch.Tensor) -> None:
            writes.append(name)

    parameter = torch.nn.Parameter(torch.zeros(3))
    state = {parameter: Recorded(exp_avg=torch.zeros(3), exp_avg_sq=torch.zeros(3))}
    other = SimpleNamespace(state=state, param_groups=[{"params": [parameter]}])
    offload_fsdp_optimizer(other)
    load_fsdp_optimizer(other, "cpu")
    return len(writes)


def main(folder: Path) -> None:
    """Run everything and save what was found."""
    import verl  # noqa: F401 -- this import loads forebay's plugin

    plugin = sys.modules.get("forebay.integrations.verl")
    found: dict[str, Any] = {"plugin": plugin is not None}
    if plugin is None:
        raise SystemExit("verl has not loaded forebay's plugin")
    plugin.activation_options.update(min_bytes=0, fraction=1.0)
    use_cpu()
    tiny("qwen2", torch.device("cpu")).save_pretrained(folder / "model")

    writes: list[str] = []
    real = forebay_state.ParameterState.__setitem__

    def write(self: Any, name: str, value: Any) -> None:
        writes.append(name)
        real(self, name, value)

    on = engine(folder, optimizer="forebay", offload=True)
    found["class"] = f"{type(on.optimizer).__module__}.{type(on.optimizer).__qualname__}"
    found["placement"] = on.optimizer._options.placement
    train(on, range(2))
    on.save_checkpoint(str(folder / "saved"))
    forebay_state.ParameterState.__setitem__ = write  # type: ignore[method-assign]
    train(on, range(2, 4))
    # On the CPU the engine only loads; this is its other move.
    sys.modules[FSDP].offload_fsdp_optimizer(on.optimizer)
    forebay_state.ParameterState.__setitem__ = real  # type: ignore[method-assign]
    found["writes"], found["on"] = writes, weights(on)
    found["stored"] = on.module.forebay_activations.stats()["stored_bytes"]

    off = engine(folder, optimizer="forebay", offload=False)
    train(off, range(4))
    found["off"] = weights(off)

    again = engine(folder, optimizer="forebay", offload=True)
    again.load_checkpoint(str(folder / "saved"))
    train(again, range(2, 4))
    found["resumed"] = weights(again)

    torchs = engine(folder, optimizer="torch.optim", offload=False)
    train(torchs, range(4))
    found["torch"] = weights(torchs)
    found["others"] = moved_by_verl()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine(folder, optimizer="forebay", offload=False, max_grad_norm=0.5)
    found["said"] = [str(one.message) for one in said if "clip" in str(one.message)]
    torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/group", rank=0, world_size=1)
    try:
        main(Path(sys.argv[1]))
    finally:
        torch.distributed.destroy_process_group()
