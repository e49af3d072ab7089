"""``resident_bytes`` and ``resident_fraction``: part of the state stays on the device, and every bit is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import forebay
from support.optim import SHAPES, TINY, make, run, snapshot, train
from support.overlap import Run, both
from support.tensors import assert_same

PLACED: dict[str, dict[str, Any]] = {
    "stream": {},
    "host": {"placement": "host"},
    "hybrid": {"placement": "hybrid", "host_fraction": 0.5},
}
PARTS: dict[str, dict[str, Any]] = {
    "none": {"resident_bytes": 0},
    "some": {"resident_bytes": 4000},
    "half": {"resident_fraction": 0.5},
    "all": {"resident_fraction": 1.0},
}


def resident(optimizer: Any) -> list[int]:
    """Return the places of the parameters whose state is on the device."""
    parameters = optimizer.param_groups[0]["params"]
    return [i for i, one in enumerate(parameters) if optimizer.state.rooms[id(one)].is_resident]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_bits_are_those_without_it(device: torch.device, dtype: torch.dtype, placed: str, part: str) -> None:
    options = {"device": device, "dtype": dtype, "chunk_bytes": TINY, "max_grad_norm": 0.5}
    assert_same(run(**options, **PLACED[placed], **PARTS[part]), run(**options))


def test_parameters_are_chosen_whole_and_in_order(device: torch.device) -> None:
    parameters = make(device=device)
    sizes = [8 * parameter.numel() for parameter in parameters]
    optimizer = forebay.AdamW(parameters, chunk_bytes=TINY, resident_bytes=sizes[0] + sizes[1] + 7)
    train(optimizer, parameters, 1)
    assert resident(optimizer)[:2] == [0, 1]
    assert sum(sizes[i] for i in resident(optimizer)) <= sizes[0] + sizes[1] + 7
    if device.type == "cuda":
        assert optimizer.state[parameters[0]]["exp_avg"].is_cuda
        assert not optimizer.state[parameters[2]]["exp_avg"].is_cuda


@pytest.mark.parametrize("name", ["SGD", "Lion", "Adam"])
def test_every_rule(device: torch.device, name: str) -> None:
    ends = []
    for options in ({}, {"resident_fraction": 0.5}):
        parameters = make(device=device)
        settings = {"momentum": 0.9} if name == "SGD" else {}
        optimizer = getattr(forebay, name)(parameters, lr=1e-2, chunk_bytes=TINY, **settings, **options)
        train(optimizer, parameters, 4)
        ends.append(snapshot(optimizer, parameters))
    assert_same(*ends)


@pytest.mark.parametrize("part", ["some", "all"])
def test_state_dicts_checkpoints_and_sleep(device: torch.device, part: str, tmp_path: Any) -> None:
    ends = []
    for options in ({}, PARTS[part]):
        model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Linear(40, 8)).to(device)
        with torch.no_grad():
            for i, parameter in enumerate(model.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)))
        optimizer = forebay.AdamW(model.parameters(), lr=1e-2, chunk_bytes=TINY, **options)
        parameters = list(model.parameters())
        train(optimizer, parameters, 2)
        path = tmp_path / str(bool(options))
        forebay.checkpoint.save(path, model, optimizer)
        saving = forebay.checkpoint.async_save(f"{path}-async", model, optimizer)
        train(optimizer, parameters, range(2, 4))
        saving.result()
        for name in (path, f"{path}-async"):
            forebay.checkpoint.load(name, model, optimizer)
            train(optimizer, parameters, range(2, 3))
        optimizer.zero_grad()
        sleeper = forebay.Sleeper(model, optimizer)
        sleeper.sleep()
        sleeper.wake()
        train(optimizer, parameters, range(3, 5))
        optimizer.load_state_dict(optimizer.state_dict())
        train(optimizer, parameters, range(5, 6))
        ends.append(snapshot(optimizer, parameters))
    assert_same(*ends)


@pytest.mark.parametrize("clip", [None, 0.05], ids=["plain", "clipped"])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("placed", PLACED)
def test_overlapped_steps(device: torch.device, placed: str, part: str, clip: float | None) -> None:
    def body(run: Run) -> None:
        run.train(4, 2)

    for late in (False, True):
        both(body, device, late=late, max_grad_norm=clip, **PLACED[placed], **PARTS[part])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"resident_bytes": -1}, "resident_bytes: -1"),
        ({"resident_bytes": 1.5}, "resident_bytes: 1.5"),
        ({"resident_fraction": 1.5}, "resident_fraction: 1.5"),
        ({"resident_bytes": 1, "resident_fraction": 0.5}, "give one of them"),
        ({"resident_bytes": 1, "placement": "resident"}, "contradicts placement 'resident'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(forebay.OptionError, match=match):
        forebay.AdamW(make(SHAPES), **options)
