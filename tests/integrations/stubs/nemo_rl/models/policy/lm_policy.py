"""The contract of a policy: it chooses the class of its workers by the configuration, or takes a path to one."""

from __future__ import annotations

import importlib
from typing import Any

from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY


class Policy:
    """Starts workers."""

    def __init__(
        self,
        cluster: Any,
        config: dict[str, Any],
        tokenizer: Any,
        name_prefix: str = "lm_policy",
        init_optimizer: bool = True,
        worker_extension_cls_fqn: str | None = None,
        skip_weight_load: bool = False,
    ) -> None:
        self.cluster, self.tokenizer, self.prefix, self.skips = cluster, tokenizer, name_prefix, skip_weight_load
        self.path = worker_extension_cls_fqn or "nemo_rl.models.policy.workers.some.DefaultWorker"
        # Raises for a class that is not registered.
        self.environment = ACTOR_ENVIRONMENT_REGISTRY[self.path] if worker_extension_cls_fqn else "default"

    def worker_class(self) -> Any:
        """Return the actor's class, as the process of a worker finds it."""
        module, _, name = self.path.rpartition(".")
        return getattr(importlib.import_module(module), name)
