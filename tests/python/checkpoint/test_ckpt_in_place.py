"""Loading fills the pinned memory that is there: no other address, no second copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import forebay
from forebay import _core, checkpoint
from support.checkpoint import pair, train
from support.processes import python_in_silence

if TYPE_CHECKING:
    from pathlib import Path


def test_state_stays_where_it_is(tmp_path: Path) -> None:
    model, optimizer = pair(dtype=torch.bfloat16)
    train(model, optimizer, range(2))
    checkpoint.save(tmp_path, model, optimizer)
    again, restored = pair(2, torch.bfloat16)
    train(again, restored, range(1))
    weights = {name: parameter.data_ptr() for name, parameter in again.named_parameters()}
    state = {id(p): {kind: v.data_ptr() for kind, v in s.items()} for p, s in restored.state.items()}
    held = restored.state[again.body.weight]["exp_avg"]
    pinned = restored.stats()["pinned_bytes"]
    checkpoint.load(tmp_path, again, restored)
    assert weights == {name: parameter.data_ptr() for name, parameter in again.named_parameters()}
    assert state == {id(p): {kind: v.data_ptr() for kind, v in s.items()} for p, s in restored.state.items()}
    assert restored.stats()["pinned_bytes"] == pinned
    # A view taken before shows what was loaded, and what the next step makes of it.
    assert torch.equal(held, optimizer.state[model.body.weight]["exp_avg"])
    train(again, restored, range(2, 3))
    assert torch.equal(held, restored.state[again.body.weight]["exp_avg"])


MEMORY = """
import sys, torch, forebay
from pathlib import Path
from forebay import checkpoint

def mib(key):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(key))
    return int(line.split()[1]) / 1024

def peak(work):
    # Of resident memory, while it runs.
    Path("/proc/self/clear_refs").write_text("5")
    before = mib("VmRSS")
    work()
    return mib("VmHWM") - before

torch.set_num_threads(1)
# 96 MiB of weights, 192 MiB of moments; once small, so that whatever is made at first use is made.
models = [torch.nn.ParameterList([torch.ones(n) for _ in range(4)]) for n in (1000, 6 << 20)]
for i, model in enumerate(models):
    optimizer = forebay.AdamW(model.parameters())
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.synchronize()
    for parameter in model:
        parameter.grad = None
    path = Path(sys.argv[1]) / str(i)
    saved = peak(lambda: checkpoint.save(path, model, optimizer))
    loaded = peak(lambda: checkpoint.load(path, model, optimizer))
print(saved, loaded)
"""


def test_neither_way_takes_a_second_copy(tmp_path: Path) -> None:
    saved, loaded = map(float, python_in_silence(MEMORY, tmp_path, timeout=100).split())
    # Blocks of 8 MiB for each thread are what it may take; the state has 288 MiB.
    assert saved < 64, f"{saved} MiB while saving"
    assert loaded < 64 + 16 * 8, f"{loaded} MiB while loading"


def test_a_save_waits_for_the_stores_of_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The order of calls, since a store is over before a race could show.
    calls: list[str] = []
    write, settle = _core.write_checkpoint, forebay.AdamW._settle

    def note_write(*arguments: Any) -> Any:
        calls.append("write")
        return write(*arguments)

    def note_settle(self: forebay.AdamW, parameter: torch.Tensor | None) -> None:
        calls.append("all settled" if parameter is None else "one settled")
        settle(self, parameter)

    monkeypatch.setattr(_core, "write_checkpoint", note_write)
    monkeypatch.setattr(forebay.AdamW, "_settle", note_settle)
    model, optimizer = pair(chunk_bytes=6 * 64 * 4, slots=2)
    train(model, optimizer, range(3))
    calls.clear()
    checkpoint.save(tmp_path, model, optimizer)
    assert "all settled" in calls[: calls.index("write")]
