"""``forebay check``: what it prints, and that it fails where the device does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forebay import _accelerator
from forebay.check import check, main
from support import fake


def test_all_parts_go_well(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    with fake.delays(0.5):
        assert main(["--device", str(device)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0].split(":")[0] for line in lines[-5:-2]] == ["step", "activations", "sleep"]
    assert all("  ok" in line for line in lines[:-2])
    assert lines[-1].startswith("12 of 12 went well, with torch")


def test_a_missing_wait_is_a_failure(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_accelerator.Driver, "wait", lambda *_: None)
    with fake.delays(1):
        rows = {what: how for what, how, _ in check(device)}
    assert rows["contract: a stream waits for an event of another"] == "FAILED"


@pytest.mark.parametrize(
    ("call", "answer", "what"),
    [
        ("synchronize", None, "the host waits for an event"),
        ("query", True, "submitting does not wait for the work"),
        ("elapsed_ns", 0, "times cover the work between two events"),
    ],
)
def test_the_contract_finds_what_a_driver_does_wrong(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, call: str, answer: Any, what: str
) -> None:
    monkeypatch.setattr(_accelerator.Driver, call, lambda *_: answer)
    found = dict(forebay_contract())
    assert found[what] is not None


def forebay_contract() -> list[tuple[str, str | None]]:
    """Run the contract alone."""
    from forebay import _core

    return _core.check_contract("torch:fake:0")


def test_a_device_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "xpu:0"]) == 2
    assert capsys.readouterr().out == "error: invalid device: 'xpu:0'; use 'cpu', 'fake' or 'fake:N'\n"
    assert main(["--device", "fake:7"]) == 2
    assert "device fake:7 is not available: there are 2 of type fake" in capsys.readouterr().out
