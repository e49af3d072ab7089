"""forebay.AdamW with FSDP2 on a GPU: every case of ``dist_cases_cuda.py``, on one process."""

from __future__ import annotations

import pytest
import torch

from support.dist.registry import cases


@pytest.mark.parametrize("case", list(cases("cuda", 1)))
def test_case_passes_on_the_gpu(groups, case):
    if not torch.cuda.is_available():
        pytest.skip("no GPU: torch.cuda.is_available() is False")
    groups.outcome("cuda", 1).check(case)
