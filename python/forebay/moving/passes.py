"""One call of ``move``: finds tensors, moves their storages, and puts new tensors in their places."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from forebay._device import capturing, default_device, is_cpu, is_gpu, is_supported
from forebay.errors import DeviceError, OptionError
from forebay.moving.containers import Slot, check_editable, check_mapping, rebind, slots, tensors_in
from forebay.moving.rebuild import Rebuild, gradient_of, is_strided
from forebay.moving.rooms import Home, Room, home_of, remember
from forebay.sleep.walk import StorageEntry, dense

SMALL_BYTES = 1 << 20
"""Storages of the host that are smaller are copied to a GPU together, if they are not in a slab."""

_turn = threading.RLock()
"""Held during a call: a room serves one at a time."""


def run(mapping: Any, target: torch.device, *, to_host: bool) -> dict[str, float | int]:
    """Move the tensors of a mapping to a device; return the numbers that ``move`` reports."""
    check_mapping(mapping)
    if capturing():
        raise DeviceError("move cannot be captured into a CUDA graph; call it outside the capture")
    begun = time.perf_counter()
    # Outside of inference mode: tensors that are made in it cannot be trained with later.
    with _turn, torch.inference_mode(False), torch.no_grad():
        one = Pass(target, to_host=to_host)
        one.find(mapping)
        if one.tensors:
            one.move()
        return one.report(begun)


def on_host(part: torch.Tensor) -> bool:
    """Whether a tensor is on the host."""
    return is_cpu(part.device)


class Pass:
    """The tensors and storages of one call."""

    def __init__(self, target: torch.device, *, to_host: bool) -> None:
        self._target, self._to_host = target, to_host
        self._slots: list[Slot] = []
        # The tensors that move, by id.
        self.tensors: dict[int, torch.Tensor] = {}
        # The storages that move, by identity. An empty one has nothing to move and is only made.
        self._entries: dict[int, StorageEntry] = {}
        self._homes: dict[int, Home] = {}
        self._empty: set[int] = set()
        # The slabs that are used.
        self._rooms: list[Room] = []

    # Finding.

    def find(self, mapping: Any) -> None:
        """Find what has to move; raise if something cannot."""
        for slot in slots(mapping):
            moves = [self._take(tensor, slot) for tensor in tensors_in(slot.value)]
            if any(moves):
                self._slots.append(slot)
        check_editable(self._slots)
        if self.tensors and is_gpu(self._target) and not is_gpu(default_device()):
            raise DeviceError(f"cannot move to {self._target}: torch finds no GPU; use 'cpu'")

    def _take(self, tensor: torch.Tensor, slot: Slot) -> bool:
        """Take a tensor and its gradient if they have to move; return whether they do."""
        if id(tensor) in self.tensors:
            return True
        if all(self._is_there(part) for part in dense(tensor)):
            return False
        self._check(tensor, slot.name)
        self.tensors[id(tensor)] = tensor
        if is_strided(tensor):
            for part in dense(tensor):
                if not self._is_there(part):
                    self._take_storage(part, slot)
        if (gradient := gradient_of(tensor)) is not None:
            self._take(gradient, slot._replace(name=f"{slot.name}.grad"))
        return True

    def _is_there(self, part: torch.Tensor) -> bool:
        return on_host(part) if self._to_host else part.device == self._target and not on_host(part)

    def _check(self, tensor: torch.Tensor, name: str) -> None:
        if not tensor.is_leaf:
            raise OptionError(f"cannot move {name}: it is part of an autograd graph; detach() it first")
        for part in dense(tensor):
            if not is_supported(part.device):
                raise OptionError(
                    f"cannot move {name}: it is on {part.device}, and has no data that forebay can read; leave it out"
                )

    def _take_storage(self, part: torch.Tensor, slot: Slot) -> None:
        storage = part.untyped_storage()
        identity, size = storage._cdata, storage.nbytes()
        home = home_of(part)
        if size and home is not None and self._is_usable(home, part, storage):
            self._homes.setdefault(identity, home)
        if identity in self._entries or identity in self._empty:
            return
        if size == 0:
            if part.numel():
                raise OptionError(f"cannot move {slot.name}: its storage is empty; wake it first if it sleeps")
            self._empty.add(identity)
            return
        self._entries[identity] = StorageEntry(
            "moved", slot.name, storage, identity, size, part.get_device(), 0, slot.container, slot.key
        )

    def _is_usable(self, home: Home, part: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether a home is of this device, and on the host has this very storage."""
        if self._to_host:
            return home.room.device == part.get_device()
        return home.room.device == self._target_number and home.has(storage)

    @property
    def _target_number(self) -> int:
        return self._target.index if is_gpu(self._target) else -1

    # Moving.

    def move(self) -> None:
        """Move the storages, and replace the tensors."""
        new = self._store() if self._to_host else self._fetch()
        for identity in self._empty:
            new[identity] = self._allocate(0)
        rebuild = Rebuild(new, self._target)
        made = {number: rebuild.tensor(tensor) for number, tensor in self.tensors.items()}
        for number, tensor in self.tensors.items():
            if is_strided(tensor):
                self._remember(tensor, made[number])
        rebind(self._slots, made)

    def _remember(self, old: torch.Tensor, new: torch.Tensor) -> None:
        for before, after in zip(dense(old), dense(new), strict=True):
            home = self._homes.get(before.untyped_storage()._cdata)
            if home is not None:
                remember(after, home)

    def _store(self) -> dict[int, torch.UntypedStorage]:
        """Copy storages into slabs: those that were there before into theirs, the others into one of them."""
        shared: dict[int, Room] = {}
        for identity, home in self._homes.items():
            shared.setdefault(self._entries[identity].device, home.room)
        by_room: dict[int, tuple[Room, list[StorageEntry]]] = {}
        for identity, entry in self._entries.items():
            if identity in self._homes:
                room, entry.number = self._homes[identity]
            else:
                if entry.device not in shared:
                    shared[entry.device] = Room(entry.device)
                room = shared[entry.device]
            by_room.setdefault(id(room), (room, []))[1].append(entry)
        new: dict[int, torch.UntypedStorage] = {}
        for room, entries in by_room.values():
            self._rooms.append(room)
            for entry, storage in zip(entries, room.store(entries), strict=True):
                new[entry.identity] = storage
                self._homes[entry.identity] = Home(room, entry.number)
        return new

    def _fetch(self) -> dict[int, torch.UntypedStorage]:
        """Copy storages to the device: out of their slabs, or from where they are."""
        new = {identity: self._allocate(entry.size) for identity, entry in self._entries.items()}
        by_room: dict[int, tuple[Room, list[StorageEntry]]] = {}
        others: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        for identity, old in self._entries.items():
            home = self._homes.get(identity)
            if home is None:
                others.append((old.storage, new[identity]))
                continue
            entry = StorageEntry(
                old.kind, old.name, new[identity], identity, old.size, self._target_number, 0, old.container, old.key
            )
            entry.number = home.number
            by_room.setdefault(id(home.room), (home.room, []))[1].append(entry)
        copy_together(others)
        for room, entries in by_room.values():
            self._rooms.append(room)
            room.fetch(entries)
        return new

    def _allocate(self, size: int) -> torch.UntypedStorage:
        return torch.empty(size, dtype=torch.uint8, device=self._target).untyped_storage()

    # Numbers.

    def report(self, begun: float) -> dict[str, float | int]:
        """Return the numbers of the pass."""
        size = sum(entry.size for entry in self._entries.values())
        seconds = time.perf_counter() - begun
        return {
            "bytes": size,
            "tensors": len(self.tensors),
            "seconds": seconds,
            "gbps": size / seconds / 1e9 if size and seconds else 0.0,
            "pin_s": sum(room.pin_s for room in self._rooms) if self._to_host else 0.0,
            "pinned_bytes": sum(room.pinned_bytes for room in self._rooms),
        }


def copy_together(pairs: list[tuple[torch.UntypedStorage, torch.UntypedStorage]]) -> None:
    """Copy storages to storages of a device; small ones of the host with one copy for all."""
    small = [(old, new) for old, new in pairs if old.nbytes() < SMALL_BYTES and is_cpu(old.device)]
    together = {id(old) for old, _ in small}
    for old, new in pairs:
        if id(old) not in together:
            _bytes(new).copy_(_bytes(old))
    if small:
        flat = torch.cat([_bytes(old) for old, _ in small]).to(small[0][1].device)
        pieces = torch.split(flat, [old.nbytes() for old, _ in small])
        torch._foreach_copy_([_bytes(new) for _, new in small], list(pieces))


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
