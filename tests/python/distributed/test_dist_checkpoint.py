"""Checkpoints on 1, 2 and 3 ranks: every case of ``dist_cases_checkpoint*.py``, in one group of processes."""

from __future__ import annotations

import pytest

from support.dist.launch import LONGER_S
from support.dist.registry import cases

pytestmark = pytest.mark.timeout(LONGER_S["checkpoint"] + 20)


@pytest.mark.parametrize(
    ("case", "killed"), [pytest.param(name, found.killed, id=name) for name, found in cases("checkpoint", 3).items()]
)
def test_case_passes_on_every_rank_that_lives(groups, case, killed):
    groups.outcome("checkpoint", 3).check(case, killed)
