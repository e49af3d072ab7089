"""The suites: which files of a project run, and what they need. A new suite is one more entry here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Suite:
    """Test files of one project."""

    name: str
    about: str
    """What the files test, in one line."""
    files: tuple[str, ...] = ()
    """Files, or tests in them, below the folder that the user names; below ``tests/upstream`` where none is needed."""
    standing_in: str = "its Adam, AdamW and SGD in place of torch's"
    """What of forebay the tests use."""
    baseline: str = "torch's own"
    """What the other run uses."""
    plugins: tuple[str, ...] = ()
    """Further pytest plugins of ours."""
    paths: tuple[str, ...] = ()
    """Folders below the user's folder from which Python imports."""
    packages: tuple[str, ...] = ()
    """What must be installed."""
    options: tuple[str, ...] = ()
    """Further options of pytest."""
    replaces: bool = True
    """Whether torch's optimizers are replaced; if not, a plugin says where forebay is used."""
    compares: bool = False
    """Whether the tests step torch's own optimizers too, to compare with them."""
    has_baseline: bool = True
    needs_folder: bool = True
    needs_gpu: bool = False
    pretends: bool = True
    """Whether ``--on-cpu`` makes torch say that there is CUDA; not where the tests ask the project for a device."""
    counts: str = "steps"
    """What a run must do at least once to mean anything: a key of the counters."""


OURS_ALONE = ("--noconftest", "--import-mode=importlib", "-c", str(Path(__file__).parents[1] / "pytest.ini"))
"""Neither the project's settings for pytest nor its fixtures, which import the whole project."""

SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "transformers",
            "Trainer: optimizers, checkpoints, resuming",
            files=("tests/trainer/test_trainer_optimizers.py", "tests/trainer/test_trainer_checkpointing.py"),
            packages=("transformers", "accelerate", "datasets", "parameterized"),
        ),
        Suite(
            "accelerate",
            "optimizer, scheduler, saved state, Accelerator",
            files=(
                "tests/test_optimizer.py",
                "tests/test_scheduler.py",
                "tests/test_state_checkpointing.py",
                "tests/test_accelerator.py",
            ),
            packages=("accelerate", "parameterized"),
        ),
        Suite(
            "torchtitan",
            "parameter groups of the optimizer container",
            files=("tests/unit_tests/test_optimizer_param_groups.py",),
            # The released package is older than these tests.
            paths=(".",),
            packages=("tyro", "spmd_types"),
        ),
        Suite(
            "lightning",
            "optimizers, automatic and manual optimization, Fabric's moves of state",
            files=(
                "tests/tests_pytorch/core/test_lightning_optimizer.py",
                "tests/tests_pytorch/trainer/optimization/test_optimizers.py",
                "tests/tests_pytorch/trainer/optimization/test_manual_optimization.py",
                "tests/tests_fabric/utilities/test_optimizer.py",
            ),
            paths=("tests",),
            packages=("lightning", "pytorch_lightning"),
        ),
        Suite(
            "torch",
            "torch's database of optimizers: every input and every error of AdamW, Adam and SGD",
            files=("database/test_inputs.py", "database/test_errors.py"),
            packages=("expecttest",),
            replaces=False,
            compares=True,
            needs_folder=False,
        ),
        Suite(
            "megatron",
            "Megatron-LM's hybrid device optimizer",
            files=("tests/unit_tests/test_optimizer_cpu_offloading.py",),
            standing_in="forebay.integrations.megatron.HybridDeviceOptimizer",
            baseline="Megatron's own",
            plugins=("harness.megatron",),
            options=OURS_ALONE,
            replaces=False,
            compares=True,
            needs_gpu=True,
        ),
        Suite(
            "trl",
            "activation offload: the tests that compare gradients",
            files=tuple(
                f"tests/test_activation_offloading.py::TestActivationOffloading::test_{name}"
                for name in (
                    "offloading_with_peft_models",
                    "noop_manager_with_offloading",
                    "min_offload_size",
                    "real_hf_model",
                )
            ),
            standing_in="forebay.save_on_host in place of TRL's OffloadActivations",
            baseline="TRL's own",
            plugins=("harness.trl",),
            packages=("trl", "peft"),
            replaces=False,
            needs_gpu=True,
            counts="stored_bytes",
        ),
        Suite(
            "areal",
            "AReaL's per-layer step, with one rank",
            files=("tests/test_per_layer_optim_step.py",),
            standing_in="forebay.offload in place of AReaL's wrapper",
            baseline="AReaL's own",
            plugins=("harness.one_rank", "harness.f32_models", "harness.areal"),
            options=OURS_ALONE,
            packages=("transformers",),
            replaces=False,
            compares=True,
            needs_gpu=True,
        ),
        Suite(
            "verl-per-layer",
            "verl's per-layer step (pull request 5364), with one rank",
            files=("tests/test_per_layer_optimizer_step.py",),
            standing_in="forebay.offload in place of verl's wrapper",
            baseline="verl's own",
            plugins=("harness.one_rank", "harness.f32_models", "harness.verl_per_layer"),
            options=OURS_ALONE,
            packages=("transformers",),
            replaces=False,
            compares=True,
            needs_gpu=True,
        ),
        Suite(
            "verl-activations",
            "verl's activation offload under FSDP1 and FSDP2 (pull request 1220), with one rank",
            files=("tests/utils/test_activation_offload.py",),
            standing_in="forebay.offload_activations in place of verl's function, and its AdamW in place of torch's",
            baseline="verl's own and torch's",
            plugins=("harness.one_rank", "harness.verl_activations"),
            options=OURS_ALONE,
            packages=("transformers", "accelerate", "peft"),
            needs_gpu=True,
            pretends=False,
            counts="stored_bytes",
        ),
        Suite(
            "nemo-rl",
            "how a Megatron worker of NeMo-RL moves optimizer state (pull request 2248)",
            files=tuple(
                f"tests/unit/models/policy/test_megatron_worker.py::{name}"
                for name in (
                    "TestOptimizerOffloadRoundtrip",
                    "TestCoalescedBufferCaching",
                    "TestPinnedMemoryProperties",
                    "TestPinnedOptimizerEdgeCases",
                )
            ),
            standing_in="the worker of forebay.integrations.nemo_rl",
            plugins=("harness.nemo_rl",),
            options=OURS_ALONE,
            replaces=False,
            has_baseline=False,
            needs_gpu=True,
            counts="moves",
        ),
    )
}
