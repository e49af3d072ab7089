"""Interrupts of saves and loads on two ranks: every case of ``dist_cases_interrupts.py``."""

from __future__ import annotations

import pytest

from support.dist.launch import LIMIT_S
from support.dist.registry import cases

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


@pytest.mark.parametrize("case", cases("interrupts", 2))
def test_case_passes_on_every_rank(groups, case):
    groups.outcome("interrupts", 2).check(case)
