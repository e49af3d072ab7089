"""Optimizers where a program expects torch's own: by class, by name, by argument, and while groups are rebuilt."""

from __future__ import annotations

import gc
import inspect
import pydoc
import typing
import weakref
from typing import Any

import pytest
import torch

import forebay
from forebay.optim.options import Keywords
from support.optim import clone, give_gradients, make, snapshot, train
from support.tensors import assert_same

NAMES = ["AdamW", "Adam", "SGD"]


@pytest.mark.parametrize("name", NAMES)
def test_an_instance_is_an_instance_of_torchs_class(name: str) -> None:
    optimizer = getattr(forebay, name)(make([(3,)]))
    assert isinstance(optimizer, getattr(torch.optim, name))
    assert optimizer.offloads_itself


@pytest.mark.parametrize("name", NAMES)
def test_torchs_name_can_be_replaced(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    parameters, twins = make(), make()
    expected = getattr(forebay, name)(twins, lr=0.1)
    monkeypatch.setattr(torch.optim, name, getattr(forebay, name))
    optimizer = getattr(torch.optim, name)(parameters, lr=0.1)
    assert type(optimizer) is getattr(torch.optim, name)
    train(optimizer, parameters, 3)
    train(expected, twins, 3)
    optimizer.add_param_group({"params": make([(2, 2)])})
    assert_same(snapshot(optimizer, parameters), snapshot(expected, twins))
    forebay.restore(optimizer)


@pytest.mark.parametrize("name", [*NAMES, "Lion"])
def test_help_and_signature_show_every_option(name: str) -> None:
    cls = getattr(forebay, name)
    text = pydoc.plain(pydoc.render_doc(cls))
    parameters = inspect.signature(cls).parameters
    for option in Keywords.__annotations__:
        assert f" |  {option}\n" in text
        assert parameters[option].kind is inspect.Parameter.KEYWORD_ONLY
    assert "ForwardRef" not in text
    assert "placement: Literal['stream', 'resident', 'host', 'hybrid'] = 'stream', chunk_bytes: int = 16777216" in text
    assert inspect.Parameter.VAR_KEYWORD not in {one.kind for one in parameters.values()}
    if name != "Lion":
        torchs = inspect.signature(getattr(torch.optim, name)).parameters
        positional = [one for one in torchs if torchs[one].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        assert list(parameters)[: len(positional)] == positional
        assert torchs.keys() <= parameters.keys()
        assert all(parameters[one].default == torchs[one].default for one in torchs if one != "params")


def test_type_checkers_see_the_choices() -> None:
    hints = typing.get_type_hints(Keywords)
    assert typing.get_args(hints["placement"]) == ("stream", "resident", "host", "hybrid")
    assert "auto" in str(hints["host_fraction"])
    assert "avx512" in str(hints["host_kernel"])


@pytest.mark.parametrize(
    ("given", "meant"), [("placment", "placement"), ("max_norm", "max_grad_norm"), ("weigth_decay", "weight_decay")]
)
def test_a_typo_names_the_nearest_option(given: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"'{given}'; did you mean '{meant}'"):
        forebay.AdamW(make([(3,)]), **{given: 1})  # type: ignore[arg-type]


# Loads of nothing, and groups that are rebuilt before the first step.


@pytest.mark.parametrize("name", [*NAMES, "Lion"])
def test_an_empty_load_creates_nothing(device: torch.device, placement: str, name: str) -> None:
    parameters = make(device=device)
    optimizer = getattr(forebay, name)(parameters, lr=0.1, placement=placement)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.state
    assert not optimizer.state_dict()["state"]
    assert optimizer.stats()["pinned_bytes"] == 0
    twins = make(device=device)
    expected = getattr(forebay, name)(twins, lr=0.1, placement=placement)
    train(optimizer, parameters, 2)
    train(expected, twins, 2)
    assert_same(snapshot(optimizer, parameters), snapshot(expected, twins))


def test_a_load_creates_what_it_has_and_the_step_the_rest(device: torch.device, placement: str) -> None:
    parameters = make(device=device)
    source = torch.optim.AdamW(parameters, lr=0.1)
    train(source, parameters[:3], 2)
    twins = clone(parameters)
    optimizer = forebay.AdamW(twins, lr=0.1, placement=placement)
    optimizer.load_state_dict(source.state_dict())
    assert set(map(id, optimizer.state)) == set(map(id, twins[:3]))
    optimizer.prepare()
    assert set(map(id, optimizer.state)) == set(map(id, twins))
    copies = clone(parameters)
    expected = forebay.AdamW(copies, lr=0.1, placement=placement)
    expected.prepare()
    expected.load_state_dict(source.state_dict())
    train(optimizer, twins, 2)
    train(expected, copies, 2)
    assert_same(snapshot(optimizer, twins), snapshot(expected, copies))


@pytest.mark.parametrize("before", ["nothing", "prepare", "load"])
def test_replaced_parameters_leave_nothing_behind(device: torch.device, placement: str, before: str) -> None:
    parameters = make([(64, 64), (64,)], device=device)
    optimizer = forebay.AdamW(parameters, lr=0.1, placement=placement)
    kept = parameters[1]
    if before == "prepare":
        optimizer.prepare()
    if before == "load":
        source = torch.optim.AdamW(parameters, lr=0.1)
        train(source, parameters, 2)
        source.zero_grad()
        optimizer.load_state_dict(source.state_dict())
        del source
    gone = weakref.ref(parameters[0])
    new = make([(8, 8)], device=device, seed=2)[0]
    optimizer.param_groups[0]["params"][0] = new
    parameters[0] = new
    # The same from the start: what was loaded for the parameter that stays is kept.
    twins = clone(parameters)
    expected = forebay.AdamW(twins, lr=0.1, placement=placement)
    if before == "load":
        expected.state[twins[1]] = {name: value.clone() for name, value in optimizer.state[kept].items()}
    train(optimizer, parameters, 2)
    train(expected, twins, 2)
    gc.collect()
    assert gone() is None
    assert set(map(id, optimizer.state)) == {id(new), id(kept)}
    assert len(optimizer.state_dict()["state"]) == 2
    assert optimizer.stats()["pinned_bytes"] == expected.stats()["pinned_bytes"]
    assert_same(snapshot(optimizer, parameters), snapshot(expected, twins))


# Scalers, sources of gradients, casts.


def scaled_run(make_optimizer: Any, device: torch.device, bad: int | None) -> Any:
    parameters = make(device=device)
    optimizer = make_optimizer(parameters)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=2)
    for step in range(5):
        scale = scaler.scale(torch.ones((), device=device)).item()
        give_gradients(parameters, step, scale=scale)
        if step == bad:
            parameters[2].grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), snapshot(optimizer, parameters)


@pytest.mark.parametrize("bad", [None, 2], ids=["finite", "an overflow"])
@pytest.mark.parametrize("name", NAMES)
def test_a_fused_optimizer_unscales_and_skips_by_itself(
    device: torch.device, placement: str, name: str, bad: int | None
) -> None:
    cls = getattr(forebay, name)
    seen: list[Any] = []

    def fused(parameters: Any) -> Any:
        made = cls(parameters, lr=0.1, fused=True, placement=placement)
        made.register_step_pre_hook(lambda one, *_: seen.append(float(one.found_inf)))
        return made

    expected = scaled_run(lambda p: cls(p, lr=0.1, placement=placement), device, bad)
    found = scaled_run(fused, device, bad)
    assert seen == [float(step == bad) for step in range(5)]
    assert found[0] == expected[0]
    assert_same(found[1], expected[1])
    offloaded = scaled_run(
        lambda p: forebay.offload(getattr(torch.optim, name)(p, lr=0.1, fused=True), placement=placement), device, bad
    )
    assert_same(offloaded[1], expected[1])


def test_a_fused_optimizer_clips_after_unscaling(device: torch.device) -> None:
    found = scaled_run(lambda p: forebay.AdamW(p, lr=0.1, fused=True, max_grad_norm=0.5), device, None)
    expected = scaled_run(lambda p: forebay.AdamW(p, lr=0.1, max_grad_norm=0.5), device, None)
    assert_same(found[1], expected[1])


@pytest.mark.parametrize("source", ["decoupled_grad", "main_grad"])
def test_gradients_may_be_in_another_attribute(device: torch.device, placement: str, source: str) -> None:
    parameters, twins = make(device=device, dtype=torch.bfloat16), make(device=device, dtype=torch.bfloat16)
    optimizer = forebay.AdamW(parameters, lr=0.1, placement=placement, grad_source=source)  # type: ignore[arg-type]
    expected = forebay.AdamW(twins, lr=0.1, placement=placement)
    for step in range(3):
        give_gradients(parameters, step)
        give_gradients(twins, step)
        for parameter in parameters:
            setattr(parameter, source, parameter.grad.float())
            parameter.grad = None
        parameters[1].grad = torch.ones_like(parameters[1])
        optimizer.step()
        expected.step()
    assert_same(snapshot(optimizer, parameters), snapshot(expected, twins))
    if placement in ("host", "hybrid"):
        with pytest.raises(forebay.OptionError, match="last_backward reads grad"), optimizer.last_backward():
            pass


def test_an_unknown_source_is_refused() -> None:
    with pytest.raises(forebay.OptionError, match="invalid grad_source"):
        forebay.AdamW(make([(3,)]), grad_source="gradient")  # type: ignore[arg-type]


def test_the_limit_of_the_norm_can_be_set_later(device: torch.device, placement: str) -> None:
    parameters, twins = make(device=device), make(device=device)
    optimizer = forebay.AdamW(parameters, lr=0.1, placement=placement)
    expected = forebay.AdamW(twins, lr=0.1, placement=placement, max_grad_norm=0.5)
    optimizer.max_grad_norm = 0.5
    assert optimizer.max_grad_norm == 0.5
    train(optimizer, parameters, 2)
    train(expected, twins, 2)
    assert_same(snapshot(optimizer, parameters), snapshot(expected, twins))
    with pytest.raises(forebay.OptionError, match="invalid max_grad_norm"):
        optimizer.max_grad_norm = -1.0
    with pytest.raises(forebay.OptionError, match="skip_nonfinite needs max_grad_norm"):
        forebay.AdamW(parameters, max_grad_norm=1.0, skip_nonfinite=True).max_grad_norm = None


def test_a_cast_after_the_first_step_is_named(device: torch.device, placement: str) -> None:
    model = torch.nn.Linear(4, 4, device=device)
    optimizer = forebay.AdamW(model.named_parameters(), placement=placement)
    train(optimizer, list(model.parameters()), 1)
    model.bfloat16()
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match=r"weight \(now torch\.bfloat16\), bias .*make the optimizer after the cast"):
        train(optimizer, list(model.parameters()), 1)
    # It is said once.
    train(optimizer, list(model.parameters()), 1)
