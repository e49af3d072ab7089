"""verl: its own FSDP engine with forebay's optimizer and forebay's plugin.

verl is in a folder of its own, because it asks for another transformers than the other frameworks: ``make
test-integrations`` makes it, and the variable ``FOREBAY_VERL`` names another one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from support.processes import environment
from support.tensors import assert_same

if TYPE_CHECKING:
    from collections.abc import Sequence

FOLDER = Path(os.environ.get("FOREBAY_VERL", Path(sys.prefix) / "verl"))


def run(*arguments: str, before: Sequence[Path] = ()) -> subprocess.CompletedProcess[str]:
    """Run Python where verl is installed; ``before`` are folders whose packages are found first."""
    assert (FOLDER / "verl").is_dir(), f"verl is not in {FOLDER}; run make test-integrations"
    given = environment()
    path = os.pathsep.join(map(str, [*before, given["PYTHONPATH"], FOLDER]))
    return subprocess.run(
        [sys.executable, *arguments],
        env={**given, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VERL_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train with verl's engine: with everything on and off, resumed, and with torch's optimizer."""
    folder = tmp_path_factory.mktemp("verl")
    done = run("-m", "support.verl_runs", str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, Any] = torch.load(folder / "found.pt", weights_only=False)
    return results


def test_forebay_names_a_plugin() -> None:
    (plugin,) = metadata.entry_points(group="verl.plugins", name="forebay")
    assert plugin.value == "forebay.integrations.verl"


def test_the_configuration_chooses_forebay(found: dict[str, Any]) -> None:
    assert found["plugin"]
    assert found["class"] == "forebay.optim.adamw.AdamW"
    assert found["placement"] == "host"


def test_offload_on_equals_off(found: dict[str, Any]) -> None:
    assert_same(found["on"], found["off"])


def test_a_checkpoint_of_verl_resumes_bit_for_bit(found: dict[str, Any]) -> None:
    assert_same(found["resumed"], found["on"])


def test_training_is_that_of_torchs_optimizer(found: dict[str, Any]) -> None:
    for ours, theirs in zip(found["off"], found["torch"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


def test_state_is_not_moved(found: dict[str, Any]) -> None:
    assert found["writes"] == []
    assert found["others"] == 4


def test_activations_are_offloaded(found: dict[str, Any]) -> None:
    # Four steps of three recomputed layers, each with its input of 2 x 48 x 64 f32.
    assert found["stored"] == 4 * 3 * 2 * 48 * 64 * 4


def test_clipping_twice_is_said(found: dict[str, Any]) -> None:
    (said,) = found["said"]
    assert "both by verl, to clip_grad=1.0, and by max_grad_norm=0.5; leave max_grad_norm out" in said


def test_a_plugin_that_fails_is_visible_and_verl_goes_on(tmp_path: Path) -> None:
    old = tmp_path / "verl-0.5.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.5.0\n")
    done = run("-c", "import verl; print(verl.DataProto.__name__)", before=[tmp_path])
    assert done.stdout.split() == ["DataProto"], done.stderr[-3000:]
    assert "forebay's plugin does nothing in this run of verl: verl 0.5.0 is too old for forebay" in done.stderr
    assert "VERL_USE_EXTERNAL_PLUGINS=none" in done.stderr
