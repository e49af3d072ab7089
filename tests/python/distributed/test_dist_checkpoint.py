"""Checkpoints on 1, 2 and 3 ranks: every case of ``dist_cases_checkpoint*.py``, in two groups of processes."""

from __future__ import annotations

import pytest
from dist_registry import cases


@pytest.mark.parametrize("case", list(cases("checkpoint", 3)))
def test_case_passes_on_every_rank(groups, case):
    groups.outcome("checkpoint", 3).check(case)


@pytest.mark.parametrize(("case", "killed"), list(zip(cases("killed", 3), [(2,), (0, 2)], strict=True)))
def test_case_passes_on_the_ranks_that_survive(groups, case, killed):
    groups.outcome("killed", 3).check(case, killed)
