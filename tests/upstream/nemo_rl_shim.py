"""Modules of ``nemo_rl`` with the names that ``test_megatron_worker.py`` of NeMo-RL imports, as of pull request 2248.

The worker in them moves optimizer state as forebay's does. Neither NeMo-RL nor Ray is needed. The tests that start
workers do not run: choose the four classes from ``TestOptimizerOffloadRoundtrip`` on. Give pytest ``-p nemo_rl_shim``,
and the file alone, in a folder without the rest of NeMo-RL's tests.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from forebay.integrations.nemo_rl import MegatronMoves

NAMES = {
    "ray": (),
    "nemo_rl.algorithms.loss": ("ClippedPGLossConfig", "ClippedPGLossFn", "DPOLossConfig", "DPOLossFn", "NLLLossFn"),
    "nemo_rl.algorithms.loss.interfaces": ("LossFunction",),
    "nemo_rl.algorithms.utils": ("get_tokenizer",),
    "nemo_rl.distributed.batched_data_dict": ("BatchedDataDict",),
    "nemo_rl.distributed.virtual_cluster": ("RayVirtualCluster",),
    "nemo_rl.models.generation": ("configure_generation_config",),
    "nemo_rl.models.generation.megatron": ("MegatronGeneration",),
    "nemo_rl.models.policy": ("PolicyConfig",),
    "nemo_rl.models.policy.lm_policy": ("Policy",),
    "nemo_rl.utils.checkpoint": ("CheckpointManager",),
    "tests.unit.test_utils": ("SimpleLossFn",),
}
"""What the file imports and the four classes do not use."""


class _Memory:
    """The pinned memory of the last move: where it begins, and how many bytes it has."""

    def __init__(self, address: int, size: int) -> None:
        self._address, self._size = address, size

    def data_ptr(self) -> int:
        """Return the address."""
        return self._address

    def numel(self) -> int:
        """Return the number of bytes."""
        return self._size


class _Pageable:
    """How NeMo-RL moves state without pinned memory, and what it refuses."""

    cfg: dict[str, bool]
    optimizer: Any

    def move_optimizer(self, device: str) -> None:
        """Move the state, tensor by tensor."""
        if device not in ("cpu", "cuda"):
            raise ValueError(f"Invalid device: {device}")
        if self.cfg["use_coalesced_optimizer_offload"]:
            raise ValueError("use_coalesced_optimizer_offload requires use_pinned_optimizer_offload")
        for state in self.optimizer._get_state().values():
            state.update({key: value.to(device) for key, value in state.items()})


class MegatronPolicyWorkerImpl(MegatronMoves, _Pageable):
    """A worker of which the tests use ``move_optimizer`` and the memory that it keeps."""

    def move_optimizer(self, device: str) -> None:
        """Move the state with forebay, and say where it is if it has to be in one piece."""
        super().move_optimizer(device)
        tensors = [value for state in self.optimizer._get_state().values() for value in state.values()]
        if self.cfg["use_coalesced_optimizer_offload"] and device == "cpu" and tensors:
            starts = [tensor.data_ptr() for tensor in tensors]
            ends = [tensor.data_ptr() + tensor.numel() * tensor.element_size() for tensor in tensors]
            self._optimizer_pinned_buf = _Memory(min(starts), max(ends) - min(starts))


def put_in() -> None:
    """Make the modules."""
    for path, names in NAMES.items():
        _module(path, **dict.fromkeys(names, object))
    _module("nemo_rl.models.policy.workers.megatron_policy_worker", MegatronPolicyWorkerImpl=MegatronPolicyWorkerImpl)


def _module(path: str, **names: Any) -> None:
    for end in [i for i, letter in enumerate(path) if letter == "."] + [len(path)]:
        part = path[:end]
        if part not in sys.modules:
            sys.modules[part] = types.ModuleType(part)
            sys.modules[part].__path__ = []  # type: ignore[attr-defined]
            parent, _, own = part.rpartition(".")
            if parent:
                setattr(sys.modules[parent], own, sys.modules[part])
    vars(sys.modules[path]).update(names)


def pytest_configure(config: Any) -> None:
    """Make the modules before the file is read."""
    config.addinivalue_line("markers", "mcore: tests of the Megatron worker")
    put_in()
