"""NeMo-RL: policy workers that move optimizer state through forebay, or not at all.

This module has a class for each policy worker of NeMo-RL, with the same name: an actor of Ray. With ``Impl`` at the end
of the name it is the class without Ray, to inherit from, and with ``Sleeping`` in front a worker that sleeps. They are
made when they are asked for, because each needs packages that only its own workers have.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import warnings
from typing import TYPE_CHECKING, Any

import forebay
from forebay.errors import OptionError
from forebay.integrations._moves import offloads_itself
from forebay.integrations._versions import check_version

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DTensorMoves", "MegatronMoves", "Sleeps", "use"]

_HERE = "forebay.integrations.nemo_rl"
_MODULES = {
    "DTensorPolicyWorker": "nemo_rl.models.policy.workers.dtensor_policy_worker",
    "DTensorPolicyWorkerV2": "nemo_rl.models.policy.workers.dtensor_policy_worker_v2",
    "MegatronPolicyWorker": "nemo_rl.models.policy.workers.megatron_policy_worker",
}
_WEIGHTS = ("parameters", "buffers")


class DTensorMoves:
    """How a DTensor worker moves its optimizer's state: all tensors together, through pinned memory.

    State of an optimizer that offloads itself, as forebay's do, stays where it is.
    """

    # Attributes of NeMo-RL's workers.
    max_grad_norm: float | None
    model: Any
    optimizer: Any

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        own = getattr(getattr(self, "optimizer", None), "max_grad_norm", None)
        theirs = getattr(self, "max_grad_norm", None)
        if own is not None and theirs is not None:
            warnings.warn(
                f"gradients are clipped both by NeMo-RL, to {theirs}, and by the optimizer's max_grad_norm, to {own}; "
                "leave max_grad_norm out of policy.optimizer.kwargs",
                stacklevel=2,
            )

    def move_optimizer_to_device(self, device: Any) -> None:
        """Move the state to ``"cpu"`` or ``"cuda"``."""
        if not offloads_itself(self.optimizer):
            forebay.move(self.optimizer.state, device)


class MegatronMoves:
    """How a Megatron worker moves its optimizer's state: all tensors together, through pinned memory.

    ``optimizer_cpu_offload`` of its configuration goes through forebay as well.
    """

    # Attributes of NeMo-RL's workers.
    cfg: Any
    optimizer: Any

    def __init__(self, config: Any, *args: Any, **keywords: Any) -> None:
        if config.get("megatron_cfg", {}).get("optimizer", {}).get("optimizer_cpu_offload"):
            from forebay.integrations import megatron

            if not megatron.is_installed():
                megatron.install()
        super().__init__(config, *args, **keywords)  # type: ignore[call-arg]

    def move_optimizer(self, device: str) -> None:
        """Move the state to ``"cpu"`` or ``"cuda"``.

        ``use_pinned_optimizer_offload: false`` in the configuration, where a version of NeMo-RL has it, asks for
        memory that is not pinned; NeMo-RL then moves the state itself.
        """
        if device not in ("cpu", "cuda") or self.cfg.get("use_pinned_optimizer_offload") is False:
            super().move_optimizer(device)  # type: ignore[misc]
            return
        is_chained = hasattr(self.optimizer, "chained_optimizers")
        forebay.move(self.optimizer.state if is_chained else self.optimizer._get_state(), device)


class Sleeps(DTensorMoves):
    """A DTensor worker whose weights and optimizer state sleep in pinned memory while the other side generates.

    It is for optimizers of torch and of forebay alike. Using what sleeps raises :class:`forebay.AsleepError`.
    """

    # Attributes of NeMo-RL's workers.
    cpu_offload: bool
    offload_optimizer_for_logprob: bool

    _sleeper: forebay.Sleeper | None = None
    # The kinds that sleep now.
    _asleep: frozenset[str] = frozenset()

    def _sleep(self, *kinds: str) -> None:
        if self.cpu_offload:
            raise OptionError(
                "dtensor_cfg.cpu_offload=true keeps weights on the CPU, and a sleeping worker would wake them on the "
                "GPU; set it to false, or use forebay.integrations.nemo_rl.use(sleep=False)"
            )
        if self._sleeper is None:
            self._sleeper = forebay.Sleeper(self.model, self.optimizer, gradients="drop")
        self._sleeper.sleep(kinds)
        self._asleep |= set(kinds)

    def _wake(self, *kinds: str) -> None:
        if self._sleeper is not None:
            self._sleeper.wake(kinds)
        self._asleep -= set(kinds)

    def offload_before_refit(self) -> None:
        """Put the optimizer to sleep and drop gradients; the weights are awake, because they are sent now."""
        self._wake(*_WEIGHTS)
        self._sleep("optimizer", "gradients")

    def offload_after_refit(self) -> None:
        """Put everything to sleep."""
        self.model.eval()
        self._sleep(*_WEIGHTS, "optimizer", "gradients")

    def prepare_for_training(self, *_: Any, **__: Any) -> None:
        """Wake everything."""
        self._wake(*_WEIGHTS, "optimizer", "gradients")
        self.model.train()

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Wake the weights; the optimizer may sleep."""
        self._wake(*_WEIGHTS)
        self.model.eval()
        if not keep_train_buffers and self.optimizer is not None and self.offload_optimizer_for_logprob:
            self._sleep("optimizer")

    def finish_inference(self) -> None:
        """Put the weights to sleep."""
        self._sleep(*_WEIGHTS)
        self.model.eval()

    def save_checkpoint(self, *args: Any, **keywords: Any) -> Any:
        """Save as NeMo-RL does; what sleeps is awake meanwhile."""
        with self._awake():
            return super().save_checkpoint(*args, **keywords)  # type: ignore[misc]

    def load_checkpoint(self, *args: Any, **keywords: Any) -> Any:
        """Load as NeMo-RL does; what sleeps is awake meanwhile."""
        with self._awake():
            return super().load_checkpoint(*args, **keywords)  # type: ignore[misc]

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        asleep = self._asleep
        self._wake(*asleep)
        try:
            yield
        finally:
            if asleep:
                self._sleep(*asleep)


def use(*, sleep: bool = False) -> None:
    """Have NeMo-RL's policies use the workers of this module. Call this before the policy is made.

    A policy that is given a ``worker_extension_cls_fqn`` uses that one.

    Parameters
    ----------
    sleep
        Whether DTensor workers sleep in a :class:`forebay.Sleeper` while the other side generates. By default NeMo-RL
        moves the model itself, and only moves of optimizer state go through forebay.
    """
    _check_version()
    registry = importlib.import_module("nemo_rl.distributed.ray_actor_environment_registry").ACTOR_ENVIRONMENT_REGISTRY
    for name, module in _MODULES.items():
        for ours in (name, *([] if name.startswith("Megatron") else [f"Sleeping{name}"])):
            registry.setdefault(f"{_HERE}.{ours}", registry[f"{module}.{name}"])
    policy = importlib.import_module("nemo_rl.models.policy.lm_policy").Policy
    original = inspect.unwrap(policy.__init__)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **keywords: Any) -> None:
        bound = inspect.signature(original).bind(self, *args, **keywords)
        if bound.arguments.get("worker_extension_cls_fqn") is None:
            bound.arguments["worker_extension_cls_fqn"] = _worker_for(bound.arguments["config"], sleep=sleep)
        original(*bound.args, **bound.kwargs)

    policy.__init__ = init


def _worker_for(config: Any, *, sleep: bool) -> str:
    """Return the name of the worker's class for a policy's configuration."""
    if config.get("quant_cfg") is not None:
        raise OptionError("quant_cfg has workers of its own in NeMo-RL; give worker_extension_cls_fqn, or leave it out")
    if (config.get("megatron_cfg") or {}).get("enabled"):
        if sleep:
            raise OptionError("Megatron moves its weights by itself; leave sleep=True out, or use DTensor workers")
        return f"{_HERE}.MegatronPolicyWorker"
    version = "V2" if (config.get("dtensor_cfg") or {}).get("_v2") else ""
    return f"{_HERE}.{'Sleeping' if sleep else ''}DTensorPolicyWorker{version}"


def _check_version() -> None:
    check_version("nemo-rl", "0.6", "0.7")


def __getattr__(name: str) -> Any:
    base = name.removeprefix("Sleeping").removesuffix("Impl")
    sleeps, is_plain = name.startswith("Sleeping"), name.endswith("Impl")
    if base not in _MODULES or (sleeps and base.startswith("Megatron")):
        raise AttributeError(f"module {_HERE!r} has no attribute {name!r}")
    _check_version()
    theirs = getattr(importlib.import_module(_MODULES[base]), f"{base}Impl")
    mixin = Sleeps if sleeps else MegatronMoves if base.startswith("Megatron") else DTensorMoves
    about = f"NeMo-RL's {base}{' that sleeps' if sleeps else ''}, with moves of optimizer state through forebay."
    made: Any = type(name, (mixin, theirs), {"__doc__": about, "__module__": _HERE})
    if not is_plain:
        ray = importlib.import_module("ray")
        describe = importlib.import_module("nemo_rl.models.policy.utils").get_runtime_env_for_policy_worker
        made = ray.remote(runtime_env=describe(_MODULES[base].rpartition(".")[2]))(made)
    globals()[name] = made
    return made
