"""Recomputation: hooks stand outside the checkpoint, every layer is recomputed once, and inputs leave the device."""

import copy

import pytest
import torch

import forebay
from support.models import forwards_of, hf_step, tiny
from support.offload import ACTIVATION_BYTES, Block, Stack, assert_nothing_left, data, offloaded, train
from support.tensors import assert_same

pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Counted(Block):
    """Counts its forward passes."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Count and run."""
        type(self).calls += 1
        return super().forward(x)


def count(run) -> int:
    Counted.calls = 0
    run()
    return Counted.calls


@pytest.mark.parametrize("keep_last", [0, 1, 2])
def test_each_layer_is_recomputed_once(keep_last: int, device: torch.device) -> None:
    torch.manual_seed(0)
    model = Stack(*(Counted() for _ in range(5))).to(device)
    x = data(device)
    expected = train(model, x)
    with offloaded(model, recompute=True, keep_last=keep_last, max_in_flight_bytes=None) as handle:
        assert count(lambda: assert_same(expected, train(model, x))) == 5 + (5 - keep_last)
        # What is left of a layer is its input, and nothing else travels.
        assert handle.stats()["stored_bytes"] == (5 - keep_last) * ACTIVATION_BYTES
        assert_nothing_left(handle)
    assert count(lambda: train(model, x)) == 5


def test_without_recomputation_nothing_is_recomputed(device: torch.device) -> None:
    torch.manual_seed(0)
    model = Stack(*(Counted() for _ in range(3))).to(device)
    with offloaded(model):
        assert count(lambda: train(model, data(device))) == 3


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("options", [{}, {"fraction": 0.5}, {"fraction": "auto"}, {"recompute": True}], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_models_of_transformers_unchanged(kind: str, options: dict, padded: bool, device: torch.device) -> None:
    model = tiny(kind, device)
    expected = hf_step(model, device, padded=padded)
    with offloaded(model, keep_last=1, max_in_flight_bytes=None, **options) as handle:
        for _ in range(3):
            assert_same(expected, hf_step(model, device, padded=padded))
        stats = handle.stats()
        assert stats["stored_bytes"] > 0 < stats["fetched_bytes"]
        assert_nothing_left(handle)
    assert_same(expected, hf_step(model, device, padded=padded))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_checkpointing_of_transformers_is_combined_with(reentrant: bool, recompute: bool, device: torch.device) -> None:
    model = tiny("qwen2", device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    calls = forwards_of(model)
    expected = hf_step(model, device)
    once = len(calls)
    assert once == 8
    with offloaded(model, recompute=recompute, max_in_flight_bytes=1) as handle:
        calls.clear()
        assert_same(expected, hf_step(model, device))
        assert len(calls) == once, "layers are recomputed as often as without offload, once"
        stats = handle.stats()
        # Inputs of 2 x 96 x 64 values; cos and sin of the positions may travel with them.
        assert 4 * 2 * 96 * 64 * 4 <= stats["stored_bytes"] <= 5 * 2 * 96 * 64 * 4
        assert stats["fetched_bytes"] > 0
        assert_nothing_left(handle)
    calls.clear()
    assert_same(expected, hf_step(model, device))
    assert len(calls) == once


def test_recomputation_of_models_of_transformers_counts(device: torch.device) -> None:
    model = tiny("llama", device)
    calls = forwards_of(model)
    with offloaded(model, recompute=True, keep_last=1):
        hf_step(model, device)
        assert sorted(calls) == [0, 0, 1, 1, 2, 2, 3]
    calls.clear()
    hf_step(model, device)
    assert calls == [0, 1, 2, 3]
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_compiled_layers_of_models_of_transformers(how: str, device: torch.device) -> None:
    torch._dynamo.reset()
    model = tiny("llama", device)
    model.config.use_cache = False
    layers = model.model.layers
    for i, layer in enumerate(layers):
        if how == "in place":
            layer.compile(backend="aot_eager")
        else:
            layers[i] = torch.compile(layer, backend="aot_eager")
    expected = hf_step(model, device)
    with offloaded(model, recompute=True) as handle:
        assert_same(expected, hf_step(model, device))
        assert handle.stats()["fetched_bytes"] > 0
        assert_nothing_left(handle)


def test_copies_of_models_of_transformers(device: torch.device) -> None:
    model = tiny("qwen2", device)
    expected = hf_step(model, device)
    with offloaded(model, recompute=True) as handle:
        hf_step(model, device)
        before = handle.stats()["stored_bytes"]
        twin = copy.deepcopy(model)
        assert_same(expected, hf_step(twin, device))
        assert handle.stats()["stored_bytes"] == before > 0


@pytest.mark.parametrize("recompute", [False, True])
def test_adapters(recompute: bool, device: torch.device) -> None:
    peft = pytest.importorskip("peft")
    model = tiny("qwen2", device)
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)
    model = peft.get_peft_model(model, adapter)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    if recompute:
        model.enable_input_require_grads()
    expected = hf_step(model, device)
    with offloaded(model, recompute=recompute) as handle:
        assert_same(expected, hf_step(model, device))
        assert handle.stats()["fetched_bytes"] > 0
        assert_nothing_left(handle)


def test_the_cache_of_a_model_is_not_filled_twice(device: torch.device) -> None:
    model = tiny("qwen2", device)
    expected = hf_step(model, device)
    assert model.config.use_cache
    with offloaded(model, recompute=True, keep_last=0):
        assert_same(expected, hf_step(model, device))


def test_save_on_host_around_a_model_of_transformers(device: torch.device) -> None:
    model = tiny("llama", device)
    expected = hf_step(model, device)
    with forebay.save_on_host(min_bytes=4096, device=device.type):
        found = hf_step(model, device)
    assert_same(expected, found)
