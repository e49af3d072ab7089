"""The first version of the DTensor worker has the same contract."""

from nemo_rl.models.policy.workers.dtensor_policy_worker_v2 import DTensorPolicyWorkerV2Impl


class DTensorPolicyWorkerImpl(DTensorPolicyWorkerV2Impl):
    """Trains a model between phases of generation."""
