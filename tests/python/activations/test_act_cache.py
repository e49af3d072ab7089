"""Models of transformers keep their cache of keys and values, and their own switches, while layers are recomputed."""

import copy
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from support.budget import HOWS, PASSES, budgeted, recomputed
from support.models import forwards_of, hf_step, tiny
from support.offload import assert_nothing_left
from support.tensors import assert_same

transformers = pytest.importorskip("transformers")


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def words(device: torch.device, length: int = 64) -> torch.Tensor:
    return torch.randint(3, 97, (2, length), generator=torch.Generator().manual_seed(5)).to(device)


def gradients(model) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def generated(model, device: torch.device) -> list[torch.Tensor]:
    return [model.generate(words(device, 12), max_new_tokens=8, do_sample=False)]


def continued(model, device: torch.device) -> list[torch.Tensor]:
    with torch.no_grad():
        first = model(words(device)[:, :40], use_cache=True)
        return [model(words(device)[:, 40:], past_key_values=first.past_key_values).logits]


def after_a_prefix(model, device: torch.device) -> list[torch.Tensor]:
    """Train on what follows a prefix that is in the cache."""
    with torch.no_grad():
        cache = model(words(device)[:, :40], use_cache=True).past_key_values
    rest = words(device)[:, 40:]
    model(rest, past_key_values=cache, labels=rest).loss.backward()
    return gradients(model)


def piece_by_piece(model, device: torch.device) -> list[torch.Tensor]:
    """Train on two pieces, with gradients through the cache from the second to the first."""
    first = model(words(device)[:, :40], labels=words(device)[:, :40], use_cache=True)
    rest = words(device)[:, 40:]
    second = model(rest, past_key_values=first.past_key_values, labels=rest)
    (first.loss + second.loss).backward()
    return gradients(model)


def what_is_cached(model, device: torch.device) -> list[torch.Tensor]:
    out = model(words(device), labels=words(device))
    cache = out.past_key_values
    assert cache.get_seq_length() == 64
    found = [part.keys.detach().clone() for part in cache.layers]
    out.loss.backward()
    assert cache.get_seq_length() == 64, "nothing is added in the backward pass"
    return [*found, *gradients(model)]


def backward_twice(model, device: torch.device) -> list[torch.Tensor]:
    mask = torch.ones_like(words(device))
    mask[1, :9] = 0
    loss = model(words(device), attention_mask=mask, labels=words(device)).loss
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


RUNS = [generated, continued, after_a_prefix, piece_by_piece, what_is_cached, backward_twice]


@pytest.mark.filterwarnings("ignore:layer . gets a DynamicCache")
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_a_cache_is_what_it_is_without_forebay(run, how: str, device: torch.device) -> None:
    model = tiny("qwen2", device)
    expected = run(model, device)
    with recomputed(model, how) as handle:
        for _ in range(PASSES):
            assert_same(expected, run(model, device))
        hf_step(model, device)
        assert_nothing_left(handle)


@pytest.mark.parametrize("how", HOWS)
def test_caches_of_a_window(how: str, device: torch.device) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.Qwen2Config(
        **sizes, num_key_value_heads=2, vocab_size=97, use_sliding_window=True, sliding_window=20, max_window_layers=1
    )
    model = transformers.Qwen2ForCausalLM(config).to(device).train()
    assert "sliding_attention" in config.layer_types
    expected = hf_step(model, device)
    calls = forwards_of(model)
    with recomputed(model, how):
        for _ in range(PASSES):
            assert_same(expected, hf_step(model, device))
    assert len(calls) > 3 * PASSES, "layers are recomputed although they are given a cache"


def test_a_call_with_a_filled_cache_is_not_recomputed(device: torch.device) -> None:
    model = tiny("qwen2", device)
    calls = forwards_of(model)
    with recomputed(model, "option"):
        with pytest.warns(UserWarning, match="layer 0 gets a DynamicCache that is not empty") as caught:
            after_a_prefix(model, device)
        assert len(caught) == 1
        assert calls == [0, 1, 2, 3] * 2
        calls.clear()
        hf_step(model, device)
        assert len(calls) == 8


@pytest.mark.filterwarnings("ignore:layer . gets a StaticCache", "ignore:layer 0 .* are not recomputed")
@pytest.mark.parametrize("how", HOWS)
def test_a_cache_of_another_kind(how: str, device: torch.device) -> None:
    model = tiny("qwen2", device)

    def run() -> list[torch.Tensor]:
        cache = transformers.StaticCache(config=model.config, max_cache_len=64)
        model(words(device), labels=words(device), past_key_values=cache).loss.backward()
        return gradients(model)

    expected = run()
    with recomputed(model, how):
        for _ in range(PASSES):
            assert_same(expected, run())


@pytest.mark.parametrize("how", HOWS)
def test_switches_of_the_model_are_its_own(how: str, device: torch.device) -> None:
    model = tiny("qwen2", device)
    expected = hf_step(model, device)
    with recomputed(model, how):
        hf_step(model, device)
        assert not model.is_gradient_checkpointing
        twin = copy.deepcopy(model)
        calls = forwards_of(twin)
        assert_same(expected, hf_step(twin, device))
        assert len(calls) == 4, "a copy is not recomputed"
        recomputed(twin, how).remove()
        # What is off stays off, and what is recomputed stays so.
        model.gradient_checkpointing_disable()
        calls = forwards_of(model)
        assert_same(expected, hf_step(model, device))
        assert len(calls) > 4
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert model.is_gradient_checkpointing


def test_a_checkpoint_around_the_model_is_named_once(device: torch.device) -> None:
    model = tiny("qwen2", device)
    expected = hf_step(model, device)
    whole = model.model.forward
    model.model.forward = lambda *args, **kwargs: checkpoint(whole, *args, use_reentrant=False, **kwargs)
    with budgeted(model, 1 << 29):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                assert_same(expected, hf_step(model, device))
        ours = [str(one.message) for one in caught if "checkpoint that forebay" in str(one.message)]
        assert len(ours) == 1
        assert ours[0].endswith("the plan cannot be followed; remove that checkpoint")
