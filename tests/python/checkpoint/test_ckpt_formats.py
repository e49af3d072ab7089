"""Checkpoints of state in fewer bits: f32 in the files, so that any format loads into any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import forebay
from forebay import _core, checkpoint
from forebay.checkpoint import writer
from forebay.optim.packed import Assembly, Moment
from support.checkpoint import files, folders, read_manifest, snapshot
from support.formats import BF16, BLOCKS, format_for, kept
from support.optim import snapshot as state_snapshot
from support.tensors import assert_same, random

if TYPE_CHECKING:
    from pathlib import Path

F32 = torch.float32
KINDS = (BF16, BLOCKS, F32)


class Net(torch.nn.Module):
    """Parameters with and without a whole block, in several orders of memory, and one that is not trained."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        for i, (name, shape) in enumerate(
            {"large": (40, 25), "turned": (20, 30), "small": (9,), "none": (0, 3)}.items()
        ):
            value = random(shape, 100 * seed + i)
            setattr(self, name, torch.nn.Parameter(value.t() if name == "turned" else value))
        self.frozen = torch.nn.Parameter(random((300,), seed), requires_grad=False)


def pair(seed: int, cls: type = forebay.AdamW, **options: Any) -> tuple[Net, Any]:
    """Return a model with its optimizer."""
    model = Net(seed)
    return model, cls(model.parameters(), **{"lr": 1e-2, **options})


def train(model: Net, optimizer: Any, steps: Any) -> None:
    """Take steps whose gradients depend on their number alone."""
    for step in steps:
        for i, parameter in enumerate(model.parameters()):
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter).copy_(random(parameter.shape, 1000 * step + i))
        optimizer.step()


def expected(model: Net, optimizer: Any, loads: Any) -> dict[str, torch.Tensor]:
    """Return a snapshot as an optimizer with another format has it."""
    found = snapshot(model, optimizer)
    for name, parameter in model.named_parameters():
        for column in ("exp_avg", "exp_avg_sq"):
            if (key := f"state.{name}.{column}") in found:
                of = format_for(loads, parameter.numel())
                found[key] = kept(parameter, found[key], of, signed=column == "exp_avg")
    return found


@pytest.mark.parametrize("placed", ["stream", "host", "resident"])
@pytest.mark.parametrize("loads", KINDS, ids=str)
@pytest.mark.parametrize("saves", KINDS, ids=str)
@pytest.mark.parametrize("waits", [True, False], ids=["save", "async_save"])
def test_any_format_loads_into_any(saves: Any, loads: Any, placed: str, waits: bool, tmp_path: Path) -> None:
    random_too = {"stochastic_rounding": saves != F32, "rounding_seed": 3}
    model, optimizer = pair(1, state_dtype=saves, placement=placed, **random_too)
    train(model, optimizer, range(3))
    saved = snapshot(model, optimizer)
    as_loaded = expected(model, optimizer, loads)
    if waits:
        checkpoint.save(tmp_path, model, optimizer)
    else:
        handle = checkpoint.async_save(tmp_path, model, optimizer)
        # What is saved is the state of the call.
        train(model, optimizer, range(20, 22))
        handle.result()
        checkpoint.load(tmp_path, model, optimizer)
        assert_same(snapshot(model, optimizer), saved)
    more = {"stochastic_rounding": loads != F32, "rounding_seed": 3}
    again, restored = pair(2, state_dtype=loads, placement=placed, **more)
    train(again, restored, range(7, 9))
    checkpoint.load(tmp_path, again, restored)
    assert_same(snapshot(again, restored), as_loaded)
    if saves == loads:
        # Random numbers go on where they were.
        train(model, optimizer, range(3, 5))
        train(again, restored, range(3, 5))
        assert_same(snapshot(again, restored), snapshot(model, optimizer))


@pytest.mark.parametrize("placed", ["stream", "resident"])
def test_state_that_appears_late_is_loaded_and_forgotten(placed: str, tmp_path: Path) -> None:
    def values(model: Net, optimizer: Any) -> Any:
        return state_snapshot(optimizer, list(model.parameters()))

    given = {"cls": forebay.SGD, "momentum": 0.9, "state_dtype": BLOCKS, "placement": placed}
    model, optimizer = pair(1, **given)
    checkpoint.save(tmp_path / "before", model, optimizer)
    train(model, optimizer, range(3))
    checkpoint.save(tmp_path / "after", model, optimizer)
    again, restored = pair(2, **given)
    checkpoint.load(tmp_path / "after", again, restored)
    assert_same(values(again, restored), values(model, optimizer))
    checkpoint.load(tmp_path / "before", again, restored)
    assert all(set(of) == {"param"} for of in values(again, restored))
    train(again, restored, range(1))
    assert torch.equal(restored.state[again.large]["momentum_buffer"], kept_gradient(again))


def kept_gradient(model: Net) -> torch.Tensor:
    """Return the gradient of a first step as it is kept."""
    gradient: torch.Tensor = model.large.grad
    return kept(model.large, gradient, BLOCKS, signed=True)


def test_state_that_a_checkpoint_lacks_starts_from_zero(tmp_path: Path) -> None:
    model, optimizer = pair(1)
    model.turned.requires_grad_(False)
    train(model, optimizer, range(3))
    checkpoint.save(tmp_path, model, optimizer)
    again, restored = pair(2, state_dtype=BLOCKS)
    train(again, restored, range(2))
    checkpoint.load(tmp_path, again, restored)
    assert not restored.state[again.turned]["exp_avg_sq"].any()
    assert restored.state[again.large]["exp_avg_sq"].any()


def test_the_files_have_f32(tmp_path: Path) -> None:
    found = []
    for kind in KINDS:
        model, optimizer = pair(1, state_dtype=kind)
        train(model, optimizer, range(3))
        checkpoint.save(tmp_path / str(kind), model, optimizer)
        manifest = read_manifest(tmp_path / str(kind) / folders(tmp_path / str(kind))[-1])
        assert manifest["tensors"]["optimizer.state.large.exp_avg"]["dtype"] == "F32"
        about = {name: (of["dtype"], of["shape"]) for name, of in manifest["tensors"].items()}
        found.append((about, manifest["paths"], manifest["objects"]))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("placed", ["stream", "resident"])
def test_a_save_makes_f32_values_a_part_at_a_time(placed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = pair(1, state_dtype=BLOCKS, placement=placed)
    train(model, optimizer, range(3))
    write, calls = _core.write_checkpoint, []

    def counted(folder: Any, prefix: str, entries: dict[str, Any], *others: Any) -> Any:
        calls.append([name for name in entries["name"] if "packed" in prefix])
        return write(folder, prefix, entries, *others)

    monkeypatch.setattr(_core, "write_checkpoint", counted)
    monkeypatch.setattr(writer, "PART_BYTES", 1)
    checkpoint.save(tmp_path, model, optimizer)
    names = [f"optimizer.state.{name}.{column}" for name in ("large", "turned") for column in ("exp_avg", "exp_avg_sq")]
    assert sorted(name for call in calls for name in call) == sorted(names)
    assert [len(call) for call in calls] == [1] * len(names) + [0]


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
def test_boxes_of_a_column_are_rounded_once(turned: bool) -> None:
    # Boxes that come first are smaller than others of their blocks: their scale grows.
    value = random((37, 29), 1) * torch.logspace(0, -6, 37)[:, None]
    parameter = torch.nn.Parameter(torch.zeros(29, 37).t() if turned else torch.zeros(37, 29))
    rule = _core.Rule("adamw")
    columns = [Moment.resident(rule, parameter, name, "8bit") for name in ("exp_avg", "exp_avg")]
    assembly = Assembly()
    for column in columns:
        for rows, wide in (((5, 37), (0, 29)), ((0, 5), (3, 29)), ((0, 5), (0, 3))):
            assembly.put(column, (rows[0], wide[0]), value[slice(*rows), slice(*wide)].clone())
    assembly.finish()
    for column in columns:
        assert torch.equal(column.read(), kept(parameter, value, BLOCKS, signed=True))
    # One box by itself leaves the other elements where they are, as far as they are not in its blocks.
    columns[0].write_part((0, 0), torch.zeros(1, 29) if not turned else torch.zeros(37, 1))
    left = torch.as_strided(columns[0].read(), (37 * 29,), (1,))[256:]
    assert torch.equal(left, torch.as_strided(columns[1].read(), (37 * 29,), (1,))[256:])


def test_a_load_that_breaks_off_makes_the_state_distrusted(tmp_path: Path) -> None:
    model, optimizer = pair(1, state_dtype=BLOCKS)
    train(model, optimizer, range(3))
    checkpoint.save(tmp_path, model, optimizer)
    damaged = next(file for file in files(tmp_path / folders(tmp_path)[-1]) if "packed" in file.name)
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    again, restored = pair(2, state_dtype=BLOCKS)
    train(again, restored, range(1))
    with pytest.raises(forebay.CheckpointError, match="damaged"):
        checkpoint.load(tmp_path, again, restored)
    with pytest.raises(forebay.CheckpointError, match="cannot be stepped"):
        restored.step()


@pytest.mark.parametrize("kind", [BF16, BLOCKS], ids=str)
def test_torch_loads_them(kind: Any, tmp_path: Path) -> None:
    model, optimizer = pair(1, state_dtype=kind)
    train(model, optimizer, range(3))
    checkpoint.save(tmp_path, model, optimizer)
    again = Net(2)
    theirs = torch.optim.AdamW(again.parameters(), lr=1e-2)
    checkpoint.load(tmp_path, again, theirs)
    for name, parameter in model.named_parameters():
        other = again.get_parameter(name)
        assert torch.equal(other.detach(), parameter.detach())
        if parameter.requires_grad:
            assert_same(theirs.state[other]["exp_avg"], optimizer.state[parameter]["exp_avg"].clone())
