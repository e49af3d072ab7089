"""NeMo-RL's tests of how its Megatron worker moves optimizer state, with forebay's worker."""

from __future__ import annotations

import os
from typing import Any, NamedTuple
from unittest import mock

import torch

import forebay
from forebay.integrations.nemo_rl import MegatronMoves
from forebay.moving import passes
from harness.hollow import absent, empty, module
from harness.swap import counts

absent("ray")
empty("nemo_rl")

move = forebay.move


def counted(state: Any, device: str) -> dict[str, float | int]:
    """Move state with forebay and count it; on the CPU, what forebay has not allocated counts as the GPU's."""
    counts["moves"] += 1
    if not os.environ["UPSTREAM_ON_CPU"]:
        return move(state, device)
    with (
        # What pretends that there is CUDA would keep the memory of every tensor that forebay makes.
        torch._C.DisableTorchFunction(),
        mock.patch.object(passes, "on_host", lambda part: not part.untyped_storage().resizable()),
        mock.patch.object(passes, "default_device", return_value=torch.device("cpu")),
    ):
        return passes.run(state, torch.device("cpu"), to_host=device == "cpu")


forebay.move = counted


class Theirs:
    """The part of NeMo-RL's own worker that is left to it: moves without pinned memory, and what it refuses."""

    cfg: dict[str, bool]
    optimizer: Any

    def move_optimizer(self, device: str) -> None:
        """Move the state, tensor by tensor."""
        if device not in ("cpu", "cuda"):
            raise ValueError(f"Invalid device: {device}")
        if self.cfg["use_coalesced_optimizer_offload"]:
            raise ValueError("use_coalesced_optimizer_offload requires use_pinned_optimizer_offload")
        for values in self.optimizer._get_state().values():
            values.update({key: value.to(device) for key, value in values.items()})


class MegatronPolicyWorkerImpl(MegatronMoves, Theirs):
    """A worker that says which memory all tensors are in, as NeMo-RL's does if it makes one buffer for them."""

    def move_optimizer(self, device: str) -> None:
        """Move the state as the integration does."""
        super().move_optimizer(device)
        tensors = [value for values in self.optimizer._get_state().values() for value in values.values()]
        if self.cfg["use_coalesced_optimizer_offload"] and device == "cpu" and tensors:
            ends = [tensor.data_ptr() + tensor.numel() * tensor.element_size() for tensor in tensors]
            begin = min(tensor.data_ptr() for tensor in tensors)
            self._optimizer_pinned_buf = Slab(begin, max(ends) - begin)


class Slab(NamedTuple):
    """What the tests ask of the memory that all tensors are in."""

    address: int
    size: int

    def data_ptr(self) -> int:
        """Return where it begins."""
        return self.address

    def numel(self) -> int:
        """Return its bytes."""
        return self.size


module("nemo_rl.models.policy.workers.megatron_policy_worker", MegatronPolicyWorkerImpl=MegatronPolicyWorkerImpl)
module("tests.unit.test_utils", SimpleLossFn=object)
# The package of the tests names it as a plugin of pytest; it chooses tests by what has changed.
module("tests.unit._plugins.remote_select")
