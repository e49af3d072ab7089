"""What a worker's actor is started with."""

from __future__ import annotations

from typing import Any


def get_runtime_env_for_policy_worker(policy_worker_name: str) -> dict[str, Any]:
    """Return the options of a worker, by the name of its module."""
    return {"for": policy_worker_name}
