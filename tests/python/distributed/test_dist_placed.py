"""Gradients over the ranks: every case of ``dist_cases_placed.py``, on 2 processes over gloo."""

from __future__ import annotations

import pytest

from support.dist.launch import LIMIT_S
from support.dist.registry import cases

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


@pytest.mark.parametrize("case", list(cases("placed", 2)))
def test_case_passes_on_every_rank(groups, case):
    groups.outcome("placed", 2).check(case)
