"""Native checkpoints: state as it is kept, into the same formats bit for bit and into any other."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import forebay
from forebay import _core, checkpoint
from forebay.optim.packed import Packed
from support.checkpoint import files, folders, read_manifest
from support.processes import environment
from support.saves import held
from support.tensors import assert_same, bits, random

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

BF16 = torch.bfloat16
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"state_dtype": BF16},
    "8bit": {"state_dtype": "8bit"},
    "bf16-random": {"state_dtype": BF16, "stochastic_rounding": True, "rounding_seed": 5},
    "8bit-random": {"state_dtype": "8bit", "stochastic_rounding": True, "rounding_seed": 5},
    "mixed": {"state_dtype": {"exp_avg": BF16}, "master_weights": "compact"},
    "compact": {"master_weights": "compact"},
    "all": {"state_dtype": "8bit", "master_weights": "compact", "stochastic_rounding": True},
    "f32": {},
}
RULES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "adamw": (forebay.AdamW, {"amsgrad": True}),
    "adam": (forebay.Adam, {}),
    "sgd": (forebay.SGD, {"momentum": 0.9}),
    "lion": (forebay.Lion, {}),
}


class Model(torch.nn.Module):
    """Parameters of several blocks, of less than one, turned, empty, with and without gradients."""

    def __init__(self, seed: int, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.wide = torch.nn.Parameter(torch.empty(33, 17))
        self.turned = torch.nn.Parameter(torch.empty(40, 30).t())
        self.line = torch.nn.Parameter(torch.empty(257))
        self.cube = torch.nn.Parameter(torch.empty(3, 1, 300).transpose(0, 2))
        self.small = torch.nn.Parameter(torch.empty(7))
        self.one = torch.nn.Parameter(torch.empty(()))
        self.nothing = torch.nn.Parameter(torch.empty(0, 3))
        self.late = torch.nn.Parameter(torch.empty(300))
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(random(parameter.shape, 1000 * seed + i))
        self.to(dtype)


def make(seed: int = 1, rule: str = "adamw", dtype: torch.dtype = BF16, **options: Any) -> tuple[Model, Any]:
    """Return a model and its optimizer."""
    model = Model(seed, dtype)
    of, settings = RULES[rule]
    return model, of(model.parameters(), lr=1e-2, **settings, **options)


def train(model: Model, optimizer: Any, steps: Iterable[int]) -> None:
    """Take steps with gradients that depend on their numbers."""
    for step in steps:
        for i, parameter in enumerate(model.parameters()):
            parameter.grad = None
            if parameter is not model.late:
                parameter.grad = torch.empty_like(parameter).copy_(random(parameter.shape, 7919 * step + i))
        optimizer.step()


def kept(model: Model, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return parameters and state; packed columns as they are kept."""
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer.synchronize()
    for name, parameter in model.named_parameters():
        for column, value in dict.items(dict.get(optimizer.state, parameter, {})):
            parts = value.items() if isinstance(value, Packed) else [("", value)]
            found.update((f"{name}.{column}.{part}", tensor.detach().clone()) for part, tensor in parts)
    return found


def shown(model: Model, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return parameters and state as users see them."""
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found.update((f"{name}.{column}", value.clone()) for column, value in optimizer.state[parameter].items())
    return found


def manifest_of(path: Path) -> dict[str, Any]:
    """Return the manifest of the last checkpoint of a path."""
    return read_manifest(path / folders(path)[-1])


def save(path: Path, model: Model, optimizer: Any, waits: bool = True, **options: Any) -> None:
    """Save natively; in the background while steps go on, if the save does not wait."""
    if waits:
        checkpoint.save(path, model, optimizer, native=True, **options)
        return
    handle = checkpoint.async_save(path, model, optimizer, native=True, **options)
    train(model, optimizer, range(50, 53))
    handle.result()


@pytest.mark.parametrize("waits", [True, False], ids=["save", "async_save"])
@pytest.mark.parametrize("placed", ["stream", "host", "hybrid", "resident"])
@pytest.mark.parametrize("kind", [name for name in FORMATS if name != "f32"])
def test_a_restart_has_the_bits_of_no_restart(kind: str, placed: str, waits: bool, tmp_path: Path) -> None:
    options = {**FORMATS[kind], "placement": placed}
    model, optimizer = make(1, **options)
    train(model, optimizer, range(3))
    saved = kept(model, optimizer)
    save(tmp_path, model, optimizer, waits)
    again, restored = make(2, **options)
    train(again, restored, range(9, 11))
    checkpoint.load(tmp_path, again, restored)
    assert_same(kept(again, restored), saved)
    model, optimizer = make(1, **options)
    train(model, optimizer, range(6))
    train(again, restored, range(3, 6))
    assert_same(kept(again, restored), kept(model, optimizer))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["bf16", "8bit-random", "bf16-random", "compact"])
def test_every_rule_restarts(rule: str, kind: str, tmp_path: Path) -> None:
    model, optimizer = make(1, rule, **FORMATS[kind])
    train(model, optimizer, range(4))
    save(tmp_path, model, optimizer)
    again, restored = make(2, rule, **FORMATS[kind])
    checkpoint.load(tmp_path, again, restored)
    assert_same(kept(again, restored), kept(model, optimizer))
    train(model, optimizer, range(4, 7))
    train(again, restored, range(4, 7))
    assert_same(kept(again, restored), kept(model, optimizer))


@pytest.mark.parametrize("loads", FORMATS)
@pytest.mark.parametrize("saves", ["8bit", "mixed", "all", "f32"])
@pytest.mark.parametrize("native", [True, False], ids=["native", "portable"])
def test_any_format_loads_into_any_other(native: bool, saves: str, loads: str, tmp_path: Path) -> None:
    model, optimizer = make(1, **FORMATS[saves])
    train(model, optimizer, range(3))
    checkpoint.save(tmp_path, model, optimizer, native=native)
    again, restored = make(2, **FORMATS[loads])
    # Old state must leave no trace, whatever it shared a scale with.
    train(again, restored, range(9, 11))
    for state in restored.state.values():
        if state["exp_avg"].numel():
            state["exp_avg"] = torch.full_like(state["exp_avg"], torch.inf)
    checkpoint.load(tmp_path, again, restored)
    expected, found = shown(model, optimizer), shown(again, restored)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        tolerance = {"rtol": 0.0, "atol": 0.0}
        if name.endswith(("exp_avg", "exp_avg_sq")) and loads != saves:
            tolerance = {"rtol": 0.07, "atol": value.abs().max().item() / 2**11 if value.numel() else 0.0}
        torch.testing.assert_close(found[name], value, **tolerance)
    train(again, restored, range(3, 5))


def test_torch_loads_it(tmp_path: Path) -> None:
    model, optimizer = make(1, "adam", **FORMATS["all"])
    train(model, optimizer, range(3))
    save(tmp_path, model, optimizer)
    again = Model(2)
    theirs = torch.optim.Adam(again.parameters(), lr=1e-2)
    checkpoint.load(tmp_path, again, theirs)
    for (name, parameter), mine in zip(again.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter.detach(), mine.detach())
        if parameter.numel():
            state = optimizer.state[mine]
            assert torch.equal(theirs.state[parameter]["exp_avg_sq"].float(), state["exp_avg_sq"].to(BF16).float()), (
                name
            )


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({"state_dtype": "8bit", "master_weights": "compact"}, (2 * (1 + 4 / 256) + 2 + 1 / 8) / 12),
        ({"state_dtype": BF16, "master_weights": "compact"}, (2 * 2 + 2 + 1 / 8) / 12),
        ({"master_weights": "compact"}, (2 * 4 + 2 + 1 / 8) / 12),
    ],
    ids=["8bit", "bf16", "compact"],
)
def test_files_have_the_size_of_the_state(options: dict[str, Any], share: float, tmp_path: Path) -> None:
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.randn(1024, 512).to(BF16))})
    optimizer = forebay.AdamW(model.parameters(), lr=1e-2, **options)
    model["w"].grad = torch.randn_like(model["w"])
    optimizer.step()
    for native in (True, False):
        checkpoint.save(tmp_path / str(native), model, optimizer, native=native)
        found = checkpoint.inspect(tmp_path / str(native))
        state = sum(of["bytes"] for of in found["tensors"] if of["name"].startswith("optimizer.state.w."))
        assert state - 4 == round(12 * 1024 * 512 * (share if native else 1))
        headers = 8192
        assert found["file_bytes"] <= found["tensor_bytes"] + headers * found["files"]
    assert checkpoint.verify(tmp_path / "True") == checkpoint.inspect(tmp_path / "True")["file_bytes"]


def test_the_manifest_says_how_it_is_kept(tmp_path: Path) -> None:
    model, optimizer = make(1, **FORMATS["all"])
    train(model, optimizer, range(2))
    save(tmp_path, model, optimizer)
    text = (tmp_path / folders(tmp_path)[-1] / "manifest.json").read_text()
    assert text.startswith('{"forebay_checkpoint":2,')
    manifest = manifest_of(tmp_path)
    assert sorted(manifest["encodings"]) == ["8bit-signed", "8bit-unsigned", "compact"]
    assert manifest["encodings"]["8bit-signed"]["block"] == 256
    assert len(manifest["encodings"]["8bit-unsigned"]["shares"]) == 256
    turned = manifest["tensors"]["optimizer.state.turned.master_param"]
    assert (turned["dtype"], turned["shape"], turned["weight"]) == ("F32", [30, 40], "model.turned")
    assert turned["chunks"][0]["order"] == [1, 0]
    # Memory of one order has one description.
    assert "order" not in manifest["tensors"]["optimizer.state.wide.master_param"]["chunks"][0]
    found = checkpoint.inspect(tmp_path)
    formats = {of["name"]: of.get("format") for of in found["tensors"]}
    assert formats["optimizer.state.wide.exp_avg"] == "8bit"
    assert formats["optimizer.state.wide.master_param"] == "compact"
    assert formats["optimizer.state.small.exp_avg"] is formats["model.wide"] is None
    assert found["objects"]["rounding"] == {"seeds": [0]}
    # A save without any such state is what it always was.
    checkpoint.save(tmp_path, model, forebay.SGD(model.parameters(), lr=1e-2), native=True)
    text = (tmp_path / folders(tmp_path)[-1] / "manifest.json").read_text()
    assert text.startswith('{"forebay_checkpoint":1,')


def test_weights_are_exported(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, optimizer = make(1, **FORMATS["all"])
    train(model, optimizer, range(2))
    save(tmp_path / "run", model, optimizer)
    found = load_file(checkpoint.export_weights(tmp_path / "run", tmp_path / "w.safetensors"))
    assert_same(found, {name: value.detach() for name, value in model.named_parameters()})


def test_a_master_whose_weight_is_not_saved_is_saved_as_f32(tmp_path: Path) -> None:
    model, optimizer = make(1, **FORMATS["compact"])
    train(model, optimizer, range(2))
    model.wide.requires_grad_(False)
    save(tmp_path, model, optimizer, trained_only=True)
    tensors = manifest_of(tmp_path)["tensors"]
    assert "model.wide" not in tensors
    assert "encoding" not in tensors["optimizer.state.wide.master_param"]["chunks"][0]
    assert tensors["optimizer.state.line.master_param"]["chunks"][0]["encoding"] == "compact"
    again, restored = make(2, **FORMATS["compact"])
    with torch.no_grad():
        again.wide.copy_(model.wide)
    checkpoint.load(tmp_path, again, restored, strict=False)
    assert_same(restored.state[again.wide]["master_param"], optimizer.state[model.wide]["master_param"])


# While steps go on.


@pytest.mark.parametrize("budget", [0, 5000, None])
@pytest.mark.parametrize("placed", ["stream", "resident"])
def test_steps_go_on_within_a_budget(placed: str, budget: int | None, tmp_path: Path) -> None:
    model, optimizer = make(1, **FORMATS["all"], placement=placed)
    train(model, optimizer, range(3))
    saved = kept(model, optimizer)
    save(tmp_path, model, optimizer, waits=False, snapshot_budget_bytes=budget)
    again, restored = make(2, **FORMATS["all"], placement=placed)
    checkpoint.load(tmp_path, again, restored)
    assert_same(kept(again, restored), saved)


@pytest.mark.parametrize("placed", ["stream", "resident"])
def test_a_native_snapshot_makes_no_f32_copies(placed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.randn(2048, 1024).to(BF16))})
    optimizer = forebay.AdamW(model.parameters(), lr=1e-2, placement=placed, **FORMATS["all"])
    model["w"].grad = torch.randn_like(model["w"])
    optimizer.step()

    def read(packed: Packed, device: torch.device) -> torch.Tensor:
        raise AssertionError(f"{packed.column} was read as f32")

    monkeypatch.setattr(Packed, "_copy", read)
    with held() as gate:
        handle = checkpoint.async_save(tmp_path, model, optimizer, native=True)
        optimizer.step()
        gate.open()
    handle.result()
    progress = handle.progress()
    elements = model["w"].numel()
    # Weights and state, and the rest of its last page.
    state = elements * (2 * (1 + 4 / 256) + 2 + 1 / 8)
    assert 2 * elements <= progress["copied_bytes"] <= 2 * elements + state + (4 << 20)
    assert progress["copy_memory_bytes"] <= 2 * elements + state + (4 << 20)


@pytest.mark.parametrize("turned", [(False, True), (True, False), (True, True)])
def test_memory_of_another_order_is_decoded(turned: tuple[bool, bool], tmp_path: Path) -> None:
    def run(is_turned: bool) -> tuple[torch.nn.ParameterDict, forebay.AdamW]:
        value = random((40, 30), 1).to(BF16)
        parameter = torch.nn.Parameter(value.t().contiguous().t() if is_turned else value)
        model = torch.nn.ParameterDict({"w": parameter})
        optimizer = forebay.AdamW(model.parameters(), lr=1e-2, **FORMATS["all"])
        parameter.grad = torch.empty_like(parameter).copy_(random((40, 30), 2))
        optimizer.step()
        return model, optimizer

    model, optimizer = run(turned[0])
    checkpoint.save(tmp_path, model, optimizer, native=True)
    expected = dict(optimizer.state[model["w"]].items())
    model, optimizer = run(turned[1])
    optimizer.state[model["w"]]["exp_avg"] = torch.zeros(40, 30)
    checkpoint.load(tmp_path, model, optimizer)
    for name, value in optimizer.state[model["w"]].items():
        close = {"rtol": 0.07, "atol": expected[name].abs().max().item() / 2**11}
        exact = turned[0] == turned[1] or name in ("step", "master_param")
        torch.testing.assert_close(value, expected[name], **({"rtol": 0.0, "atol": 0.0} if exact else close))


# Conversions.


def forebay_command(*arguments: Any) -> tuple[int, str, str]:
    """Run the command; return its exit code and what it wrote."""
    command = [sys.executable, "-m", "forebay", *map(str, arguments)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_conversions_go_round(tmp_path: Path) -> None:
    model, optimizer = make(1, **FORMATS["f32"])
    train(model, optimizer, range(3))
    checkpoint.save(tmp_path / "portable", model, optimizer)
    native, back = tmp_path / "native", tmp_path / "back"
    code, said, complaint = forebay_command(
        "convert", tmp_path / "portable", native, "--state", "8bit", "--master", "compact", "--json"
    )
    assert code == 0, complaint
    made = json.loads(said)
    assert made["bytes"] < 0.6 * made["bytes_before"]
    assert made["formats"]["compact"] == 8
    assert forebay_command("verify", native)[0] == 0
    again, restored = make(2, **FORMATS["mixed"])
    checkpoint.load(native, again, restored)
    compact = {p: s["master_param"] for p, s in zip(model.parameters(), optimizer.state.values(), strict=True)}
    for parameter, mine in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(restored.state[parameter]["master_param"], compact[mine])
    code, said, complaint = forebay_command("convert", native, back, "--state", "f32", "--master", "f32")
    assert code == 0, complaint
    assert "as f32" in said
    assert "encodings" not in manifest_of(back)
    first, second = make(3, **FORMATS["8bit"]), make(4, **FORMATS["8bit"])
    checkpoint.load(native, *first)
    checkpoint.load(back, *second)
    assert_same(kept(*second), kept(*first))


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path) -> None:
    model, optimizer = make(1, **FORMATS["f32"])
    train(model, optimizer, range(3))
    checkpoint.save(tmp_path / "portable", model, optimizer)
    damaged = files(tmp_path / "portable" / folders(tmp_path / "portable")[-1])[0]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    code, _, complaint = forebay_command("convert", tmp_path / "portable", tmp_path / "native", "--state", "bf16")
    assert code == 1
    assert "damaged: block" in complaint
    assert not folders(tmp_path / "native")
    assert not checkpoint.exists(tmp_path / "native")


# What is said and refused.


def edited(path: Path, edit: Any) -> None:
    """Change the manifest of the last checkpoint, with a right checksum."""
    import zlib

    folder = path / folders(path)[-1]
    manifest = read_manifest(folder)
    edit(manifest)
    version = 2 if manifest.get("encodings") else 1
    rest = json.dumps(manifest)[1:].encode()
    head = f'{{"forebay_checkpoint":{version},"crc32":"{zlib.crc32(rest):08x}",'
    (folder / "manifest.json").write_bytes(head.encode() + rest)


def _encoding(manifest: dict[str, Any], name: str, **values: Any) -> None:
    manifest["encodings"][name].update(values)


def _chunk(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = manifest["tensors"][f"optimizer.state.{name}"]["chunks"][0]
    return found


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda m: _encoding(m, "8bit-signed", block=128), "kept as 8bit in blocks of 128 elements"),
        (lambda m: _encoding(m, "8bit-signed", shares=[0.5] * 128), "another table of shares: code 0 is 0.5"),
        (lambda m: _encoding(m, "8bit-unsigned", kind="fp4"), 'kept as "fp4", and this forebay reads bf16, 8bit'),
        (lambda m: _encoding(m, "8bit-unsigned", zero_point=3), 'with "zero_point", which this forebay does not know'),
        (lambda m: _chunk(m, "line.exp_avg")["beside"].update(end=0), "kept as 8bit has 8 bytes of F32"),
        (lambda m: _chunk(m, "line.exp_avg").update(shape=[256]), "kept as 8bit has 256 bytes of U8"),
        (lambda m: _chunk(m, "line.exp_avg").pop("beside"), "kept as 8bit has 1 of 2 parts"),
        (lambda m: m["tensors"].pop("model.wide"), 'its weight "model.wide" is not in the checkpoint'),
        (lambda m: m["tensors"]["model.line"].update(dtype="F16"), 'its weight "model.line" is F16'),
        (lambda m: m["encodings"].pop("compact"), 'kept as "compact", which is not described'),
        (lambda m: m["encodings"].clear(), "which is not described"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(edit: Any, words: str, tmp_path: Path) -> None:
    model, optimizer = make(1, **FORMATS["all"])
    train(model, optimizer, range(2))
    save(tmp_path, model, optimizer)
    edited(tmp_path, edit)
    again, restored = make(2, **FORMATS["all"])
    train(again, restored, range(2))
    before = kept(again, restored)
    with pytest.raises(forebay.CheckpointError) as refused:
        checkpoint.load(tmp_path, again, restored)
    assert words in str(refused.value)
    if "8bit" in words or "fp4" in words:
        assert "optimizer.state." in str(refused.value)
    # Nothing was changed, and training may go on.
    assert_same(kept(again, restored), before)
    train(again, restored, range(2, 3))


def test_another_rule_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    model, optimizer = make(1, "sgd", **FORMATS["8bit"])
    train(model, optimizer, range(2))
    save(tmp_path, model, optimizer)
    again, restored = make(2, "adam", **FORMATS["8bit"])
    train(again, restored, range(2))
    before = kept(again, restored)
    with pytest.raises(
        forebay.CheckpointError, match=r"lacks .*exp_avg.* also has .*momentum_buffer \(8bit\)"
    ) as refused:
        checkpoint.load(tmp_path, again, restored)
    assert "strict=False" in str(refused.value)
    assert_same(kept(again, restored), before)


def test_a_damaged_part_makes_the_state_distrusted(tmp_path: Path) -> None:
    model, optimizer = make(1, **FORMATS["8bit"])
    train(model, optimizer, range(2))
    save(tmp_path, model, optimizer)
    place = _chunk(manifest_of(tmp_path), "line.exp_avg")["beside"]
    damaged = tmp_path / folders(tmp_path)[-1] / manifest_of(tmp_path)["files"][place["file"]]["name"]
    content = bytearray(damaged.read_bytes())
    content[place["begin"]] ^= 1
    damaged.write_bytes(content)
    for kind in ("8bit", "bf16"):
        again, restored = make(2, **FORMATS[kind])
        train(again, restored, range(1))
        with pytest.raises(forebay.CheckpointError, match="damaged"):
            checkpoint.load(tmp_path, again, restored)
        with pytest.raises(forebay.CheckpointError, match="cannot be stepped"):
            restored.step()


def test_conversions_of_a_load_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = make(1, **FORMATS["8bit"])
    train(model, optimizer, range(2))
    save(tmp_path, model, optimizer)
    caplog.set_level(logging.INFO, logger="forebay")
    checkpoint.load(tmp_path, *make(2, **FORMATS["8bit"]))
    assert "encoded again" not in caplog.text
    checkpoint.load(tmp_path, *make(2, **FORMATS["bf16"]))
    found = [record.getMessage() for record in caplog.records if "encoded again" in record.getMessage()]
    # Five parameters have a block of elements, and three columns each.
    assert len(found) == 1
    assert ": 15 tensors of state are decoded and encoded again" in found[0]


def test_another_seed_is_said_and_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = make(1, **FORMATS["8bit-random"])
    train(model, optimizer, range(2))
    save(tmp_path, model, optimizer)
    checkpoint.load(tmp_path, *make(2, **FORMATS["8bit-random"]))
    assert "rounding_seed" not in caplog.text
    again, restored = make(2, **{**FORMATS["8bit-random"], "rounding_seed": 6})
    checkpoint.load(tmp_path, again, restored)
    assert "rounding_seed=6, and the checkpoint was made with 5" in caplog.text
    train(model, optimizer, range(2, 4))
    train(again, restored, range(2, 4))
    found, expected = kept(again, restored), kept(model, optimizer)
    assert any(not torch.equal(bits(found[name]), bits(expected[name])) for name in expected)


def test_native_is_a_switch(tmp_path: Path) -> None:
    model, optimizer = make(1)
    for save_it in (checkpoint.save, checkpoint.async_save):
        with pytest.raises(forebay.OptionError, match="invalid native: 'yes'; use True or False"):
            save_it(tmp_path, model, optimizer, native="yes")  # type: ignore[arg-type]


def test_encodings_are_those_of_the_formats() -> None:
    assert _core.checkpoint_encoding("exp_avg", "8bit", [3, 100]) == (
        "8bit-signed",
        [(":codes", "U8", [3, 100]), (":scales", "F32", [2])],
    )
    assert _core.checkpoint_encoding("exp_avg", "f32", [3]) is None
