"""Traces of several ranks: every case of ``dist_cases_trace.py``, on two processes."""

from __future__ import annotations

import pytest

from support.dist.launch import LIMIT_S
from support.dist.registry import cases

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


@pytest.mark.parametrize("case", cases("trace", 2))
def test_case_passes_on_every_rank(groups, case):
    groups.outcome("trace", 2).check(case)
