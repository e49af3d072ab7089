"""Asynchronous saves on two ranks: every case of ``dist_cases_async*.py``."""

from __future__ import annotations

import pytest

from support.dist.launch import LIMIT_S
from support.dist.registry import cases


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize(
    ("case", "killed"), [pytest.param(name, found.killed, id=name) for name, found in cases("async", 2).items()]
)
def test_case_passes_on_every_rank_that_lives(groups, case, killed):
    groups.outcome("async", 2).check(case, killed)
