"""Which Python runs an actor, by the path of its class."""

from __future__ import annotations

_WORKERS = "nemo_rl.models.policy.workers"

ACTOR_ENVIRONMENT_REGISTRY: dict[str, str] = {
    f"{_WORKERS}.dtensor_policy_worker.DTensorPolicyWorker": "fsdp",
    f"{_WORKERS}.dtensor_policy_worker_v2.DTensorPolicyWorkerV2": "automodel",
    f"{_WORKERS}.megatron_policy_worker.MegatronPolicyWorker": "mcore",
}
