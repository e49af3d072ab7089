"""Saving and loading where torch makes tensors on another device unless told otherwise."""

from __future__ import annotations

from pathlib import Path

from support.processes import python


def test_under_a_default_device(tmp_path: Path) -> None:
    """It stands for "cuda": whatever is made without a word has no memory on the host."""
    code = """
import sys
from support.saves import *
model = torch.nn.Linear(64, 64)
model.register_buffer("empty", torch.empty(0, 3))
optimizer = forebay.AdamW(model.parameters(), lr=torch.tensor(0.5))
train(model, [optimizer], 0)
kept = values(model, [optimizer])
other = torch.nn.Linear(64, 64).double()
other.register_buffer("empty", torch.empty(0, 3))
with torch.device("meta"):
    extra = {"t": torch.ones(100_000, device="cpu"), "rate": torch.tensor(0.5, device="cpu")}
    checkpoint.async_save(sys.argv[1], model, optimizer, extra=extra).result()
    found = checkpoint.load(sys.argv[1], model, optimizer)
    checkpoint.load(sys.argv[1], other, strict=False)
assert_same(values(model, [optimizer]), kept)
print(found["t"].sum().item(), found["rate"].item(), optimizer.param_groups[0]["lr"].item())
print(torch.equal(other.weight.float(), model.weight))
"""
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["100000.0", "0.5", "0.5", "True"]
