"""CUDA without a GPU: tensors that say they are on the GPU, in the memory of the CPU.

Some test files ask for ``.cuda()`` everywhere and look at ``is_cuda``, but need nothing that only a GPU has. Within
``PretendCuda`` they run on the CPU. Each storage is either of the host or of the pretended GPU:

- what is made without ``device="cuda"``, copied to the CPU or pinned is of the host, and so is all memory of forebay's
  engine;
- what is computed from tensors of the host alone is of the host; everything else is of the pretended GPU.

It shows which tensors code takes for the GPU's. It shows nothing about streams, copies or speed. ``pytest -p
pretend_cuda`` runs a whole session in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Self
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

HOST = torch.device("cpu")
IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class _Stream:
    """A stream and an event in one: there is nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def _nothing(self, *_: Any, **__: Any) -> Self:
        return self

    wait = wait_stream = wait_event = record = record_event = synchronize = _nothing

    def query(self) -> bool:
        """Return that all work has ended."""
        return True


class PretendCuda(TorchFunctionMode):
    """Within this context, CUDA seems to be there."""

    def __init__(self) -> None:
        super().__init__()
        # Kept alive, so that no other storage gets their number.
        self._host: dict[int, torch.UntypedStorage] = {}
        self._pinned: set[int] = set()
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Self:
        stream = _Stream()
        fakes: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: HOST,
            "current_stream": lambda *_: stream,
            "default_stream": lambda *_: stream,
            "stream": lambda *_: contextlib.nullcontext(),
            "Stream": _Stream,
            "Event": _Stream,
            "synchronize": lambda *_: None,
            "empty_cache": lambda: None,
            "manual_seed": lambda *_: None,
            "manual_seed_all": lambda *_: None,
            "is_current_stream_capturing": lambda: False,
        }
        for name, fake in fakes.items():
            self._patches.enter_context(mock.patch.object(torch.cuda, name, fake))
        self._patches.enter_context(self._moves())
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[arg-type]
        self._patches.close()

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is of the host."""
        tensor = getattr(tensor, "_local_tensor", tensor)
        return tensor.untyped_storage()._cdata in self._host or _is_engines(tensor)

    @contextlib.contextmanager
    def _moves(self) -> Iterator[None]:
        """Let ``forebay.move`` move between the pretended GPU and the host."""
        import forebay
        from forebay.moving import passes

        def move(mapping: Any, device: Any) -> Any:
            return passes.run(mapping, HOST, to_host=str(device) == "cpu")

        with (
            mock.patch.object(passes, "on_host", self.is_host),
            mock.patch.object(passes, "default_device", return_value=HOST),
            mock.patch.object(forebay, "move", move, create=True),
        ):
            yield

    def put_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a tensor's memory the host's."""
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        if not _is_engines(tensor):
            self._host[storage._cdata] = storage
            self._pinned.discard(storage._cdata)
        return tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func is IS_CUDA or getattr(func, "__self__", None) is torch.Tensor.is_cuda:
            return not self.is_host(args[0])
        if name == "is_pinned":
            return _is_engines(args[0]) or args[0].untyped_storage()._cdata in self._pinned
        if name == "type" and len(args) == 1 and not kwargs:
            found = func(*args)
            return found if self.is_host(args[0]) else found.replace("torch.", "torch.cuda.")
        if name == "pin_memory":
            pinned = self.put_on_host(args[0].clone())
            self._pinned.add(pinned.untyped_storage()._cdata)
            return pinned
        if name == "cpu":
            return args[0] if self.is_host(args[0]) else self.put_on_host(args[0].clone())
        if name == "cuda":
            return args[0].clone() if self.is_host(args[0]) else args[0]
        args, kwargs, asked = self._mapped(args, kwargs)
        return self._placed(func, name, args, kwargs, asked)

    def _mapped(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any], str | None]:
        """Replace CUDA by the CPU in arguments; return the arguments, and the device that was asked for."""
        asked: list[str] = ["cpu"] if kwargs.pop("pin_memory", False) else []

        def one(value: Any) -> Any:
            is_name = isinstance(value, str) and value.startswith(("cuda", "cpu"))
            if not is_name and not isinstance(value, torch.device):
                return value
            # An object, not a string: most are what ``tensor.device`` said of a tensor on the pretended GPU.
            asked.append("cuda" if isinstance(value, torch.device) or value.startswith("cuda") else "cpu")
            return HOST

        args = tuple(map(one, args))
        kwargs = {key: one(value) if key == "device" else value for key, value in kwargs.items()}
        return args, kwargs, asked[0] if asked else None

    def _placed(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], asked: str | None) -> Any:
        inputs = [value for value in _flat((args, kwargs)) if isinstance(value, torch.Tensor)]
        from_host = bool(inputs) and all(map(self.is_host, inputs))
        moves = asked is not None and name == "to" and (asked == "cpu") != self.is_host(args[0])
        if moves:
            kwargs["copy"] = True
        result = func(*args, **kwargs)
        # As with torch, what is made without a device is on the CPU.
        to_host = (asked == "cpu" if moves else from_host) if inputs else asked != "cuda"
        if to_host:
            for value in _flat(result):
                if isinstance(value, torch.Tensor):
                    self.put_on_host(value)
        return result


def _is_engines(tensor: torch.Tensor) -> bool:
    """Whether torch has not allocated a tensor's memory: then it is that of forebay's engine."""
    storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
    return storage.nbytes() > 0 and not storage.resizable()


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [one for part in value for one in _flat(part)]
    if isinstance(value, dict):
        return _flat(list(value.values()))
    return [value]


_session = PretendCuda()


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    """Begin before test files are read: they may look whether there is a GPU."""
    _session.__enter__()


def pytest_unconfigure() -> None:
    """End with the session."""
    _session.__exit__(None, None, None)
