"""forebay.AdamW with DDP, FSDP2 and DTensor: every case of ``dist_cases_*.py``, on 2 and 3 processes over gloo."""

from __future__ import annotations

import pytest

from support.dist.launch import LIMIT_S
from support.dist.registry import cases

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


@pytest.mark.parametrize(
    ("world", "case"),
    [pytest.param(world, name, id=f"{name}-{world}") for world in (2, 3) for name in cases("cpu", world)],
)
def test_case_passes_on_every_rank(groups, world, case):
    groups.outcome("cpu", world).check(case)
