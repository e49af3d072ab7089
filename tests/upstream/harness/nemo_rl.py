"""NeMo-RL's tests of how its Megatron worker moves optimizer state, with ``forebay.move`` in a worker of ours."""

from __future__ import annotations

import os
from typing import Any, NamedTuple
from unittest import mock

import torch

import forebay
from forebay.moving import passes
from harness.hollow import absent, empty, module
from harness.swap import counts

absent("ray")
empty("nemo_rl")


class MegatronPolicyWorkerImpl:
    """The part of a worker that the tests use."""

    cfg: dict[str, bool]
    optimizer: Any

    def move_optimizer(self, device: str) -> None:
        """Move the state: as NeMo-RL's options say, with forebay or tensor by tensor."""
        if device not in ("cpu", "cuda"):
            raise ValueError(f"Invalid device: {device}")
        pinned, coalesced = (self.cfg[f"use_{way}_optimizer_offload"] for way in ("pinned", "coalesced"))
        if coalesced and not pinned:
            raise ValueError("use_coalesced_optimizer_offload requires use_pinned_optimizer_offload")
        state = self.optimizer._get_state()
        if pinned:
            moved = move(state, device)
            counts["moves"] += 1
        else:
            for values in state.values():
                values.update({key: value.to(device) for key, value in values.items()})
        if coalesced and device == "cpu":
            addresses = [value.data_ptr() for values in state.values() for value in values.values()]
            self._optimizer_pinned_buf = Slab(min(addresses, default=0), int(moved["pinned_bytes"]))


def move(state: Any, device: str) -> dict[str, float | int]:
    """Move state with forebay; on the CPU, what forebay has not allocated counts as the GPU's."""
    if not os.environ["UPSTREAM_ON_CPU"]:
        return forebay.move(state, device)
    with (
        # What pretends that there is CUDA would keep the memory of every tensor that forebay makes.
        torch._C.DisableTorchFunction(),
        mock.patch.object(passes, "on_host", lambda part: not part.untyped_storage().resizable()),
        mock.patch.object(passes, "default_device", return_value=torch.device("cpu")),
    ):
        return passes.run(state, torch.device("cpu"), to_host=device == "cpu")


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
