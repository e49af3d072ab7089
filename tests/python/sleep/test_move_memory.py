"""``forebay.move``: the pinned memory, when it is used again, when it is freed, and what is copied with what."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

import forebay
from forebay.moving import passes, rooms
from support.moving import Place, adam_state, copies, tensors_of
from support.tensors import assert_same, bits, needs_cuda, same_bits

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20


def addresses(state: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors_of(state)]


@pytest.fixture(autouse=True)
def no_room_is_left() -> Iterator[None]:
    """Check that rooms are freed with their tensors, whatever a test does."""
    yield
    gc.collect()
    assert not len(rooms._homes)


def test_tensors_return_to_their_old_places(place: Place) -> None:
    state = adam_state(place, (300, 40), (17,), (3, 3, 3))
    places, pinned = [], []
    for step in range(4):
        for tensor in tensors_of(state):
            tensor.add_(step)
        kept = copies(state)
        report = place.to_host(state)
        assert_same(kept, copies(state))
        places.append(addresses(state))
        pinned.append(report["pinned_bytes"])
        if step:
            assert report["pin_s"] < 0.1
        place.back(state)
        assert_same(kept, copies(state))
    assert places == [places[0]] * 4
    assert pinned == [pinned[0]] * 4
    assert pinned[0] >= sum(tensor.nbytes for tensor in tensors_of(state))


def test_storages_are_exact_and_hosts_memory_can_be_written(place: Place) -> None:
    state = adam_state(place, (5, 3), (7,))
    place.to_host(state)
    for tensor in tensors_of(state):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.data_ptr() % 64 == 0
        tensor.mul_(-2)
    kept = copies(state)
    place.back(state)
    assert_same(kept, copies(state))


def test_larger_state_grows_the_slab_and_smaller_state_fits(place: Place) -> None:
    state = adam_state(place, (64, 64))
    small = place.to_host(state)["pinned_bytes"]
    place.back(state)
    key = torch.nn.Parameter(place.random(512, 512))
    state[key] = {"exp_avg": place.random(512, 512, seed=1)}
    first = next(iter(state.values()))
    first["exp_avg"] = place.random(100, 100, seed=2)
    kept = copies(state)
    large = place.to_host(state)["pinned_bytes"]
    assert large > small + MIB
    assert_same(kept, copies(state))
    place.back(state)
    del state[key]
    assert place.to_host(state)["pinned_bytes"] == large
    place.back(state)


def test_a_tensor_that_somebody_holds_is_not_overwritten(place: Place) -> None:
    state = adam_state(place, (100, 10))
    values = next(iter(state.values()))
    place.to_host(state)
    held, view = values["exp_avg"], values["exp_avg_sq"][3:5]
    kept = bits(held), bits(view)
    before = addresses(state)
    place.back(state)
    for tensor in tensors_of(state):
        tensor.fill_(-1)
    place.to_host(state)
    assert_same((bits(held), bits(view)), kept)
    now = addresses(state)
    assert now[0] == before[0]
    assert now[1] != before[1]
    assert now[2] != before[2]
    assert all(tensor.eq(-1).all() for tensor in tensors_of(state))
    # Its range is free again, and is used for others.
    pinned = place.back(state)["pinned_bytes"]
    del held, view
    values["late"] = place.random(100, 10, seed=5)
    assert place.to_host(state)["pinned_bytes"] == pinned
    place.back(state)


def test_a_tensor_outlives_its_mapping_and_its_room(place: Place) -> None:
    state = adam_state(place, (50, 50))
    place.to_host(state)
    values = next(iter(state.values()))
    room = weakref.ref(rooms.home_of(values["exp_avg"]).room)  # type: ignore[union-attr]
    # Without a view, which would hold the tensor.
    row = torch.empty(0).set_(values["exp_avg"].untyped_storage(), 350, (50,), (1,))
    kept = bits(row)
    del state, values
    gc.collect()
    assert room() is None
    more = [torch.full((2500,), 3.0) for _ in range(20)]
    assert torch.equal(bits(row), kept)
    assert more


def test_the_room_lives_with_tensors_on_the_device(place: Place) -> None:
    state = adam_state(place, (50, 50))
    place.to_host(state)
    room = weakref.ref(rooms.home_of(next(tensors_of(state))).room)  # type: ignore[union-attr]
    place.back(state)
    gc.collect()
    assert room() is not None
    # What a framework replaces is not the room's any more.
    for values in state.values():
        values.update({key: value.clone() for key, value in values.items() if isinstance(value, torch.Tensor)})
    gc.collect()
    assert room() is None
    kept = copies(state)
    place.to_host(state)
    assert_same(kept, copies(state))


def test_mappings_have_rooms_of_their_own_and_may_be_put_together(place: Place) -> None:
    first, second = adam_state(place, (40,)), adam_state(place, (50,))
    place.to_host(first)
    place.to_host(second)
    kept = copies(first) + copies(second)
    both: dict[Any, Any] = {"first": first, "second": second, "third": {"x": {"late": place.random(9)}}}
    old = addresses(first) + addresses(second)
    place.back(both)
    place.to_host(both)
    assert addresses(first) + addresses(second) == old
    assert_same(kept, copies(first) + copies(second))
    place.back(first)
    assert all(place.is_on_host(tensor) for tensor in tensors_of(second))


def test_a_tensor_with_another_storage_is_not_taken_for_the_old_one(place: Place) -> None:
    mapping = {"a": place.random(30), "b": place.random(30, seed=1)}
    place.to_host(mapping)
    # Both are on the host still, one of them elsewhere.
    mapping["a"].set_(place.on_host(torch.arange(30.0)).untyped_storage(), 0, (30,), (1,))
    kept = bits(mapping["b"])
    place.back(mapping)
    assert torch.equal(mapping["a"].cpu(), torch.arange(30.0))
    assert torch.equal(bits(mapping["b"]), kept)
    mapping["a"].data = mapping["b"].clone()
    place.to_host(mapping)
    assert_same((bits(mapping["a"]), bits(mapping["b"])), (kept, kept))


def test_what_comes_from_elsewhere_on_the_host(place: Place) -> None:
    whole = place.on_host(place.random(4000))
    mapping: dict[str, Any] = {f"small {i}": place.on_host(place.random(i + 1, 7, seed=i)) for i in range(40)}
    mapping |= {"large": place.on_host(place.random(600, 700)), "row": whole[100:200], "rest": whole[50:].view(-1, 10)}
    mapping["number"] = place.on_host(torch.tensor(4.0))
    kept = {name: bits(value) for name, value in mapping.items()}
    report = place.back(mapping)
    assert report["pinned_bytes"] == 0
    assert report["bytes"] == sum(value.nbytes for name, value in mapping.items() if name[0] in "sln") + 16_000
    assert not any(place.is_on_host(value) for value in mapping.values())
    assert {name: bits(value).tolist() for name, value in mapping.items()} == {
        name: value.tolist() for name, value in kept.items()
    }
    mapping["row"].fill_(5.0)
    assert mapping["rest"].flatten()[50:150].eq(5).all()


def test_storages_of_all_sizes_travel_whole(place: Place) -> None:
    sizes = (1, 63, 64, 65, 4097, 8 * MIB - 1, 8 * MIB + 1, 33 * MIB + 3)
    mapping = {size: place.random(1).new_zeros(size, dtype=torch.uint8).random_() for size in sizes}
    kept = {size: value.cpu().clone() for size, value in mapping.items()}
    for _ in range(2):
        report = place.to_host(mapping)
        assert report["bytes"] == sum(sizes)
        assert report["seconds"] > 0
        assert report["gbps"] == pytest.approx(report["bytes"] / report["seconds"] / 1e9)
        assert all(same_bits(kept[size], value) for size, value in mapping.items())
        place.back(mapping)
        assert all(same_bits(kept[size], value) for size, value in mapping.items())


@pytest.mark.parametrize("together", [False, True], ids=["rooms of their own", "one room"])
def test_threads_move_mappings_of_their_own(place: Place, together: bool) -> None:
    states = [adam_state(place, (600 + i, 500), (i + 1,)) for i in range(4)]
    if together:
        place.to_host(states)
        place.back(states)
    kept = [copies(state) for state in states]
    errors: list[BaseException] = []

    def work(state: Any) -> None:
        try:
            for _ in range(10):
                place.to_host(state)
                place.back(state)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(state,)) for state in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert_same(kept, [copies(state) for state in states])


@pytest.mark.parametrize("direction", ["to_host", "back"])
@pytest.mark.parametrize("error", [forebay.DeviceError, KeyboardInterrupt])
def test_a_transfer_that_fails_changes_nothing(
    place: Place, direction: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = adam_state(place, (70, 9), (5,))
    kept = copies(state)
    place.to_host(state)
    if direction == "to_host":
        place.back(state)
    tensors = list(tensors_of(state))
    move = getattr(place, direction)

    def fail(*_: Any) -> None:
        raise error("the wire broke")

    for target in (rooms.Mover, passes):
        with monkeypatch.context() as patch:
            patch.setattr(target, "finish" if target is rooms.Mover else "rebind", fail)
            with pytest.raises(error, match="the wire broke"):
                move(state)
        assert all(old is new for old, new in zip(tensors, tensors_of(state), strict=True))
        assert_same(kept, copies(state))
    # Otherwise their ranges on the host stay in use.
    tensors.clear()
    pinned = move(state)["pinned_bytes"]
    assert_same(kept, copies(state))
    place.to_host(state)
    place.back(state)
    assert place.to_host(state)["pinned_bytes"] == pinned


@needs_cuda
def test_host_memory_is_pinned() -> None:
    state = {"a": torch.ones(1000, device="cuda"), "number": torch.tensor(3.0, device="cuda")}
    forebay.move(state, "cpu")
    assert all(value.is_pinned() and not value.is_cuda for value in state.values())
    forebay.move(state, "cuda")
    assert all(value.is_cuda for value in state.values())


@needs_cuda
def test_work_before_and_after_is_waited_for() -> None:
    state = {"a": torch.zeros(1 << 24, device="cuda"), "small": torch.zeros(100, device="cuda")}
    for step in range(5):
        torch.cuda._sleep(20_000_000)
        for value in state.values():
            value.add_(1)
        forebay.move(state, "cpu")
        assert all(value.eq(step + 1).all() for value in state.values())
        forebay.move(state, "cuda")
        assert all(value.eq(step + 1).all() for value in state.values())


@needs_cuda
def test_a_move_is_not_captured() -> None:
    state = {"a": torch.ones(10, device="cuda")}
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        # torch warns of a graph with nothing in it.
        torch.ones(1, device="cuda")
        with pytest.raises(forebay.DeviceError, match="outside the capture"):
            forebay.move(state, "cpu")
    assert state["a"].is_cuda
