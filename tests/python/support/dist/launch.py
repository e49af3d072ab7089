"""Starts the ranks of a group as processes, waits for them with a limit, and reads what they wrote down."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from support.processes import environment

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S = 300.0
"""A group that hangs is ended after this; one that is healthy may share two cores with another worker's tests."""
LONGER_S = {"checkpoint": 450.0}
"""Kinds with many cases in one group."""
GRACE_S = 25.0
"""How long the others may go on after a rank died: longer than a collective waits."""


@dataclass
class Outcome:
    """How the cases went, rank by rank."""

    results: list[dict[str, dict[str, str | None]]]
    logs: list[str]

    def check(self, case: str, killed: tuple[int, ...] = ()) -> None:
        """Raise with every rank's own words where a case did not pass on all ranks but those that it kills."""
        problems = []
        for rank, (results, log) in enumerate(zip(self.results, self.logs, strict=True)):
            if rank in killed:
                if case in results:
                    problems.append(f"rank {rank} should have been killed in this case, and came to its end")
            elif case not in results:
                problems.append(f"rank {rank} did not get to the end of this case; its output:\n{log}")
            elif (error := results[case]["error"]) is not None:
                problems.append(f"rank {rank}:\n{error}")
        assert not problems, "\n".join(problems)


def launch(kind: str, world: int, folder: Path) -> Outcome:
    """Run all cases of a kind with this number of processes."""
    variables = environment()
    limit_s = LONGER_S.get(kind, LIMIT_S)
    if kind != "cuda":
        # FSDP2 would choose a GPU that it sees, and there are more ranks than GPUs.
        variables["CUDA_VISIBLE_DEVICES"] = ""
    logs = [folder / f"rank{rank}.log" for rank in range(world)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("wb") as output:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "support.dist.worker", kind, str(world), str(rank), folder, str(limit_s)],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=variables,
                )
            )
    _wait(ranks, limit_s)
    return Outcome(
        [_read(folder / f"rank{rank}.json") for rank in range(world)],
        [log.read_text(errors="replace")[-8000:] for log in logs],
    )


def _wait(ranks: list[subprocess.Popen[bytes]], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s + 5
    try:
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            if any(rank.poll() not in (None, 0) for rank in ranks):
                deadline = min(deadline, time.monotonic() + GRACE_S)
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _read(path: Path) -> dict[str, dict[str, str | None]]:
    results: dict[str, dict[str, str | None]] = json.loads(path.read_text()) if path.exists() else {}
    return results
