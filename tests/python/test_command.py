"""The command that the wheel brings: as a script, and as a module."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import forebay

SCRIPT = Path(sys.executable).with_name("forebay")
WAYS = pytest.mark.parametrize("way", [[str(SCRIPT)], [sys.executable, "-m", "forebay"]], ids=["script", "module"])
LONG = ["bench", "step", "--device", "cpu", "--link-gbps", "0.01", "--params", "20000000"]
"""A command that runs for minutes."""


def run(way: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*way, *arguments], capture_output=True, text=True, check=False)


@WAYS
def test_version_names_wheel_and_kernels(way: list[str]) -> None:
    lines = run(way, "--version").stdout.splitlines()
    assert lines[0] == f"forebay {forebay.__version__}"
    assert lines[1].startswith("built by wheel cp311-abi3-")
    assert f"Python {sys.version.split()[0]}" in lines[1]
    assert lines[2].startswith("kernels adamw, adam, sgd, lion; cuda: PTX of CUDA 12.4 for sm_80 and newer; host: ")
    assert lines[3] == "backend cpu: built in, cpu"


@WAYS
def test_exit_codes_and_messages_are_those_of_the_command(way: list[str], tmp_path: Path) -> None:
    good = run(way, "plan", "step", "--model", "qwen2.5-0.5b", "--json", "-")
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout.startswith("{")
    absent = run(way, "verify", str(tmp_path / "nowhere"))
    assert (absent.returncode, absent.stdout) == (1, "")
    assert absent.stderr.startswith("error: ")
    assert "\nhint: " in absent.stderr
    wrong = run(way, "plan", "stepp")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "hint: " in wrong.stderr
    assert "Usage: forebay" in run(way, "--help").stdout


@WAYS
def test_check_tries_a_device(way: list[str]) -> None:
    done = run(way, "check", "--device", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert "went well, with torch" in lines[-1]
    assert sum("  ok" in line for line in lines) == len(lines) - 2
    assert run(way, "check", "--device", "abacus:0").returncode == 2
    assert "`forebay check --device npu:0`" in run(way, "--help").stdout


@WAYS
def test_ctrl_c_ends_it_at_once_without_a_traceback(way: list[str]) -> None:
    # A terminal would show the bar, and its first characters say that the work has begun.
    leader, follower = os.openpty()
    with subprocess.Popen([*way, *LONG], stdout=subprocess.PIPE, stderr=follower) as process:
        os.close(follower)
        os.read(leader, 1)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert out == b""
    os.close(leader)


def test_a_reader_that_goes_away_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [str(SCRIPT), "plan", "step", "--model", "qwen2.5-0.5b"], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_command_does_not_import_torch() -> None:
    code = "import sys; from forebay.__main__ import main; main(); sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code, "--help"], stdout=subprocess.DEVNULL, check=False).returncode == 0
    )


def test_other_threads_run_while_it_works(capfd: pytest.CaptureFixture[str]) -> None:
    from forebay import _core

    ended = threading.Event()
    threading.Thread(target=lambda: (_core.command(["forebay", "plan", "step"], ""), ended.set())).start()
    assert ended.wait(60)
    assert "plan of a streamed step" in capfd.readouterr().out
