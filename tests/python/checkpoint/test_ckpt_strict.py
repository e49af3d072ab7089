"""Another model's checkpoint: refused with names and shapes, and nothing is changed; or what fits of it, on request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import forebay
from forebay import checkpoint
from support.checkpoint import pair, snapshot
from support.tensors import assert_same

if TYPE_CHECKING:
    from pathlib import Path


def model_of(**widths: int) -> torch.nn.ModuleDict:
    return torch.nn.ModuleDict({name: torch.nn.Linear(3, width) for name, width in widths.items()})


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def saved(path: Path, **widths: int) -> tuple[torch.nn.Module, forebay.AdamW]:
    model = model_of(**widths)
    optimizer = forebay.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer)
    checkpoint.save(path, model, optimizer)
    return model, optimizer


def into(**widths: int) -> tuple[torch.nn.Module, forebay.AdamW]:
    model = model_of(**widths)
    optimizer = forebay.AdamW(model.parameters(), lr=3e-2)
    step(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("strict", [True, False])
def test_another_shape_is_refused(strict: bool, tmp_path: Path) -> None:
    saved(tmp_path, a=4, b=5)
    target = into(a=4, b=6)
    before = snapshot(*target)
    with pytest.raises(
        forebay.CheckpointError, match=r"model\.b\.weight has shape \(5, 3\) in the .* and \(6, 3\) here"
    ):
        checkpoint.load(tmp_path, *target, strict=strict)
    assert_same(before, snapshot(*target))
    step(*target)


def test_what_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    saved(tmp_path, a=4)
    target = into(a=4, b=5)
    before = snapshot(*target)
    with pytest.raises(forebay.CheckpointError, match=r"it lacks model\.b\.weight, model\.b\.bias.*strict=False"):
        checkpoint.load(tmp_path, *target)
    assert_same(before, snapshot(*target))


def test_what_the_checkpoint_has_besides_is_named(tmp_path: Path) -> None:
    saved(tmp_path, a=4, b=5)
    target = into(a=4)
    before = snapshot(*target)
    with pytest.raises(forebay.CheckpointError, match=r"it also has model\.b\.bias, model\.b\.weight.* and \d+ more"):
        checkpoint.load(tmp_path, *target)
    assert_same(before, snapshot(*target))


def test_names_of_both_kinds(tmp_path: Path) -> None:
    saved(tmp_path, a=4, b=5)
    with pytest.raises(forebay.CheckpointError, match=r"it lacks model\.c\.weight.* and it also has model\.b\.bias"):
        checkpoint.load(tmp_path, *into(a=4, c=5))


def test_not_strict_loads_what_fits(tmp_path: Path) -> None:
    model, optimizer = saved(tmp_path, a=4, b=5)
    target, restored = into(a=4, c=6)
    kept = target["c"].weight.detach().clone()
    checkpoint.load(tmp_path, target, restored, strict=False)
    assert torch.equal(target["a"].weight, model["a"].weight)
    assert torch.equal(restored.state[target["a"].weight]["exp_avg"], optimizer.state[model["a"].weight]["exp_avg"])
    assert torch.equal(target["c"].weight, kept)
    assert not restored.state[target["c"].weight]["exp_avg"].any()
    assert restored.state[target["c"].weight]["step"] == 0
    step(target, restored)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (forebay.AdamW, {"lr": 1e-2}),
        (torch.optim.AdamW, {"lr": 1e-2}),
        (torch.optim.AdamW, {"lr": torch.tensor(1e-2), "foreach": False}),
    ],
)
def test_a_scheduler_may_come_after_the_load_or_not_at_all(kind: Any, options: Any, tmp_path: Path) -> None:
    model = model_of(a=4)
    optimizer = kind(model.parameters(), **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step(model, optimizer)
    scheduler.step()
    model.zero_grad()
    checkpoint.save(tmp_path, model, optimizer, extra={"scheduler": scheduler.state_dict()})
    other = kind(model.parameters(), **options)
    extra = checkpoint.load(tmp_path, model, other)
    assert extra is not None
    assert other.param_groups[0]["lr"] == 5e-3
    assert other.param_groups[0]["initial_lr"] == 1e-2
    again = torch.optim.lr_scheduler.ExponentialLR(other, 0.5, last_epoch=1)
    again.load_state_dict(extra["scheduler"])
    # And the reverse: an option that the checkpoint does not have stays as it is.
    checkpoint.save(tmp_path, model, kind(model.parameters(), **options))
    checkpoint.load(tmp_path, model, other)
    assert other.param_groups[0]["initial_lr"] == 1e-2


def test_another_number_of_groups_is_refused(tmp_path: Path) -> None:
    model = model_of(a=4, b=5)
    one = forebay.AdamW(model.parameters())
    two = forebay.AdamW([{"params": model["a"].parameters()}, {"params": model["b"].parameters()}])
    for saves, loads in ((one, two), (two, one)):
        checkpoint.save(tmp_path, model, saves)
        with pytest.raises(forebay.CheckpointError, match=r"optimizer\.param_groups\.1\.params"):
            checkpoint.load(tmp_path, model, loads)


def test_an_optimizer_is_not_found_where_only_a_model_was_saved(tmp_path: Path) -> None:
    model = model_of(a=4)
    checkpoint.save(tmp_path, model)
    target = into(a=4)
    before = snapshot(*target)
    with pytest.raises(forebay.CheckpointError, match=r"lacks .*optimizer\."):
        checkpoint.load(tmp_path, *target)
    assert_same(before, snapshot(*target))


def test_an_optimizer_needs_its_model(tmp_path: Path) -> None:
    _, optimizer = into(a=4)
    for call in (checkpoint.save, checkpoint.load):
        saved(tmp_path, a=4)
        with pytest.raises(forebay.OptionError, match="needs its model"):
            call(tmp_path, None, optimizer)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(forebay.CheckpointError, match="no complete checkpoint"):
        checkpoint.load(tmp_path / "empty", *pair())


def test_amsgrad_on_one_side_only(tmp_path: Path) -> None:
    model = model_of(a=4)
    optimizer = forebay.AdamW(model.parameters(), amsgrad=True)
    step(model, optimizer)
    checkpoint.save(tmp_path, model, optimizer)
    target = into(a=4)
    before = snapshot(*target)
    with pytest.raises(forebay.Error, match="max_exp_avg_sq"):
        checkpoint.load(tmp_path, *target)
    assert_same(before, snapshot(*target))
