"""Models of transformers under a budget, unchanged."""

import copy

import pytest
import torch

from forebay.activations.budget import controller as _budget
from forebay.activations.budget.controller import MEASURING
from support.budget import Counted, CountedMeter, budgeted, by_chance, peak_of
from support.models import forwards_of, hf_step, tiny
from support.offload import assert_nothing_left
from support.sizes import seeds
from support.tensors import assert_same

transformers = pytest.importorskip("transformers")


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
LARGE = 1 << 29


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seed", seeds(3))
def test_plans_by_chance_change_no_bit(kind: str, padded: bool, seed: int, device: torch.device) -> None:
    model = tiny(kind, device)
    expected = hf_step(model, device, padded=padded)
    with budgeted(model, LARGE, min_bytes=256) as handle:
        by_chance(handle, seed)
        for _ in range(MEASURING + 4):
            assert_same(expected, hf_step(model, device, padded=padded))
        assert handle.stats()["fetched_bytes"] > 0
        assert_nothing_left(handle)
    assert_same(expected, hf_step(model, device, padded=padded))
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)


def test_a_tight_budget_recomputes_and_a_loose_one_does_not(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> None:
        model = tiny("qwen2", device)
        calls = forwards_of(model)
        expected = hf_step(model, device)
        meter = _budget.meter_of(device)
        whole = peak_of(meter, lambda: hf_step(model, device))
        for place, most in ((0.75, 8), (1.1, 4)):
            with budgeted(model, int(place * whole), min_bytes=256) as handle:
                for _ in range(MEASURING + 6):
                    calls.clear()
                    assert_same(expected, hf_step(model, device))
                choices = [row["choice"] for row in handle.table() if row["layer"] is not None]
                if place > 1:
                    assert choices == ["keep"] * 4
                else:
                    assert choices != ["keep"] * 4
                again = sum("recompute" in choice for choice in choices)
                assert len(calls) == 4 + again <= most

    if device.type == "cuda":
        run()
        return
    with Counted() as counted:
        meter = CountedMeter(device, counted)
        monkeypatch.setattr(_budget, "meter_of", lambda _: meter)
        run()


def test_training_in_evaluation_mode(device: torch.device) -> None:
    """Transformers itself recomputes layers in training mode only."""
    model = tiny("llama", device).eval()
    expected = hf_step(model, device)
    calls = forwards_of(model)
    with budgeted(model, LARGE, min_bytes=256) as handle:
        by_chance(handle, 0)
        for _ in range(MEASURING + 3):
            assert_same(expected, hf_step(model, device))
        assert len(calls) > 4 * (MEASURING + 3)
        assert_nothing_left(handle)


def test_copies_are_not_offloaded(device: torch.device) -> None:
    model = tiny("qwen2", device)
    expected = hf_step(model, device)
    with budgeted(model, LARGE, min_bytes=256) as handle:
        for _ in range(MEASURING + 1):
            hf_step(model, device)
        before = handle.stats()["stored_bytes"]
        twin = copy.deepcopy(model)
        assert_same(expected, hf_step(twin, device))
        assert handle.stats()["stored_bytes"] == before > 0


@pytest.mark.parametrize("seed", seeds(2))
def test_adapters(seed: int, device: torch.device) -> None:
    peft = pytest.importorskip("peft")
    model = tiny("qwen2", device)
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1)
    model = peft.get_peft_model(model, adapter)
    model.enable_input_require_grads()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)

    def run() -> list[torch.Tensor]:
        torch.manual_seed(7)
        return hf_step(model, device)

    expected = run()
    with budgeted(model, LARGE, min_bytes=256) as handle:
        by_chance(handle, seed)
        for _ in range(MEASURING + 4):
            assert_same(expected, run())
        assert_nothing_left(handle)


@pytest.mark.parametrize("seed", seeds(2))
def test_autocast(seed: int, device: torch.device) -> None:
    model = tiny("qwen2", device)

    def run() -> list[torch.Tensor]:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return hf_step(model, device)

    expected = run()
    with budgeted(model, LARGE, min_bytes=256) as handle:
        by_chance(handle, seed)
        for _ in range(MEASURING + 4):
            assert_same(expected, run())
        assert_nothing_left(handle)
