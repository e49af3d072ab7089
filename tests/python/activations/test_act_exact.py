"""Gradients with offload are those without, bit for bit, whatever shares memory with what."""

import pytest
import torch

import forebay
from support.models import FUNCTIONS
from support.offload import (
    ACTIVATION_BYTES,
    WIDTH,
    Of,
    Stack,
    assert_nothing_left,
    compare,
    data,
    offloaded,
    stack,
    train,
)


@pytest.mark.parametrize("what", FUNCTIONS)
@pytest.mark.parametrize("window", [1, None])
def test_gradients_are_the_same(what: str, window: int | None, device: torch.device) -> None:
    torch.manual_seed(0)
    model = Stack(*(Of(FUNCTIONS[what]) for _ in range(3))).to(device)
    x = data(device) / 8
    if what == "a tensor and its transpose":
        x = x[:WIDTH]
    compare(model, lambda: train(model, x), max_in_flight_bytes=window, min_bytes=256)


@pytest.mark.parametrize("fraction", [0.3, 0.7, 1.0, "auto"])
@pytest.mark.parametrize("window", [1, 30_000, None])
@pytest.mark.parametrize("recompute", [False, True])
def test_options_change_no_bit(fraction: object, window: int | None, recompute: bool, device: torch.device) -> None:
    model = stack(device, depth=6)
    x = data(device)
    compare(
        model,
        lambda: train(model, x, passes=4),
        fraction=fraction,
        max_in_flight_bytes=window,
        recompute=recompute,
        keep_last=1,
    )


def test_views_of_one_storage_travel_once_and_keep_their_layout(device: torch.device) -> None:
    base = torch.randn(128, 64, device=device)
    views = [base, base.t(), base[3:100, 5:60], base[::3], base.view(64, 128), base.as_strided((5, 7), (64, 2), 9)]
    context = forebay.save_on_host(min_bytes=0, max_in_flight_bytes=1, device=device.type)
    packed = [context.pack_hook(view) for view in views]
    back = [context.unpack_hook(one) for one in packed]
    assert context.stats()["stored_bytes"] == base.nbytes
    for view, copy in zip(views, back, strict=True):
        assert copy.data_ptr() != view.data_ptr()
        assert (copy.shape, copy.stride(), copy.storage_offset()) == (view.shape, view.stride(), view.storage_offset())
        assert torch.equal(copy, view)
    del packed, back
    assert_nothing_left(context)


def test_what_two_operations_save_is_fetched_once(device: torch.device) -> None:
    model = Stack(*(Of(lambda x, weight: x.sin() * x.cos() @ weight) for _ in range(6))).to(device)
    handle = compare(model, lambda: train(model, data(device)), max_in_flight_bytes=2 * ACTIVATION_BYTES)
    stats = handle.stats()
    assert stats["fetched_bytes"] <= stats["stored_bytes"]


def test_a_small_part_of_a_large_storage_travels_alone(device: torch.device) -> None:
    base = torch.randn(1000, 64, device=device)
    part = base[500:520, ::2]
    context = forebay.save_on_host(min_bytes=0, max_in_flight_bytes=1, device=device.type)
    packed = context.pack_hook(part)
    assert context.stats()["stored_bytes"] < 64 * 20 * 4
    copy = context.unpack_hook(packed)
    assert copy.stride() == part.stride()
    assert torch.equal(copy, part)


def test_memory_used_again_at_the_same_address_is_not_the_same_tensor(device: torch.device) -> None:
    context = forebay.save_on_host(min_bytes=0, max_in_flight_bytes=1, device=device.type)
    packed, addresses = [], set()
    # Each is freed as soon as it is saved, so a later one is where it was. How soon depends on what else is free.
    while len(packed) < 20 or len(addresses) == len(packed) < 2000:
        tensor = torch.full((64, 64), float(len(packed)), device=device)
        addresses.add(tensor.data_ptr())
        packed.append(context.pack_hook(tensor))
        del tensor
    assert len(addresses) < len(packed), "the allocator did not use an address again: nothing was tested"
    for value, one in enumerate(packed):
        assert torch.equal(context.unpack_hook(one), torch.full((64, 64), float(value), device=device))


def test_random_numbers_are_untouched(device: torch.device) -> None:
    torch.manual_seed(0)
    model = Stack(*(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.3)) for _ in range(4)))
    model.to(device)
    x = data(device)

    def run() -> list[torch.Tensor]:
        torch.manual_seed(3)
        return train(model, x)

    for recompute in (False, True):
        compare(model, run, recompute=recompute)


def test_off_is_a_true_no_op(device: torch.device) -> None:
    model = stack(device)
    before = [dict(module.__dict__) for module in model.modules()]
    handle = offloaded(model, fraction=0.0)
    assert [dict(module.__dict__) for module in model.modules()] == before
    train(model, data(device))
    assert handle.stats()["stored_bytes"] == handle.stats()["pinned_bytes"] == 0
    handle.remove()


def test_removing_restores_the_model(device: torch.device) -> None:
    model = stack(device)
    before = [dict(module.__dict__) for module in model.modules()]
    with offloaded(model, recompute=True):
        assert [dict(module.__dict__) for module in model.modules()] != before
    assert [dict(module.__dict__) for module in model.modules()] == before
