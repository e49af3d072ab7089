"""One accelerator through torch's generic API: what the engine's backend ``torch`` calls, under the GIL.

The engine decides what happens and in which order; this file only says it to torch. Memory is a part, a tuple: the
tensor of bytes that it is in, or None; where it starts, an offset in that tensor or an address; how many bytes it has;
and whether it is on the device. The engine has checked that it is live memory of the right size.

Generic and special objects are not mixed: torch's own ``torch.cuda.Event`` does not work with a ``torch.Stream``.
"""

from __future__ import annotations

import math
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from forebay.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Part = tuple[torch.Tensor | None, int, int, bool]
"""Memory: the tensor of bytes that has it, offset or address, bytes, and whether it is on the device."""
Set = tuple[list[float], int]
"""A group's numbers, in the order of its rule, and the step that is computed."""
Segment = tuple[Part, int, Part, int, list[Part | None], Part | None, int]
"""Weight and its type, gradient and its type, the rule's columns, the master, and the number of the set."""

_CPU = torch.device("cpu")
_PAGE = 4096
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NO_ADDRESSES = ("mps", "meta", "privateuseone")
"""Types whose tensors do not say where their memory is."""


class _Nothing:
    """The stream or the event of a device that has none: all work has ended when a call returns."""


def serves(kind: str) -> bool:
    """Whether a type of device, neither ``cpu`` nor ``cuda``, is torch's accelerator here."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == kind and kind not in _NO_ADDRESSES


def why_not(kind: str) -> str:
    """Return why a type of device cannot be used."""
    if kind in _NO_ADDRESSES:
        return f"torch does not say where tensors on {kind} have their memory"
    accelerator = torch.accelerator.current_accelerator()
    found = "there is none" if accelerator is None else f"that is {accelerator.type}"
    return f"{kind} is not torch's accelerator on this machine: {found}"


def memory_of(device: torch.device) -> tuple[int, int]:
    """Return bytes that are free, and bytes in all; where torch does not say, more than anybody asks for."""
    module: Any = torch.get_device_module(device)
    for ask in (getattr(module, "mem_get_info", None), getattr(torch.accelerator, "get_memory_info", None)):
        if ask is None:
            continue
        try:
            free, total = ask(device)
        except (RuntimeError, NotImplementedError, TypeError):
            continue
        return int(free), int(total)
    try:
        total = int(module.get_device_properties(device).total_memory)
    except (AttributeError, RuntimeError, NotImplementedError):
        total = (1 << 63) - 1
    return total, total


class Driver:
    """One device.

    Parameters
    ----------
    name
        What torch calls it. With ``!`` at its end, a device that lacks streams, events or page-locked memory is
        refused; without, it works synchronously, and a warning says what is missing.
    """

    def __init__(self, name: str) -> None:
        strict = name.endswith("!")
        self.device = torch.device(name.removesuffix("!"))
        if self.device.index is None:
            self.device = torch.device(self.device.type, 0)
        kind = self.device.type
        if kind != "cuda" and not serves(kind):
            raise DeviceError(f"device {self.device} is not available: {why_not(kind)}")
        if self.device.index >= torch.accelerator.device_count():
            count = torch.accelerator.device_count()
            raise DeviceError(f"device {self.device} is not available: there are {count} of type {kind}")
        self._module: Any = torch.get_device_module(self.device)
        self._registers = kind == "cuda"
        self._fused: dict[str, bool] = {}
        self._template = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._found = {"streams": self._try(self._stream), "events": self._try(self._try_event)}
        self._found["page-locked memory"] = self._registers or self._try(self._try_pin)
        self.is_synchronous = not (self._found["streams"] and self._found["events"])
        missing = self.missing()
        if missing and strict:
            raise DeviceError(
                f"{self.device} has no {' and no '.join(missing)}, and the option asks for them; use backend='torch', "
                "which waits for each copy"
            )
        if missing:
            text = (
                f"{self.device} has no {' and no '.join(missing)}: forebay works there, but copies hide under nothing; "
                "python -m forebay.check shows what the device lacks"
            )
            warnings.warn(text, stacklevel=2)

    def _try(self, use: Callable[[], object]) -> bool:
        try:
            use()
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError):
            return False
        return True

    def _try_event(self) -> None:
        event = torch.Event(device=self.device)
        event.record(self._current())
        self._current().wait_event(event)
        event.query()
        event.synchronize()

    def _try_pin(self) -> None:
        if not torch.empty(1, dtype=torch.uint8, pin_memory=True).is_pinned():
            raise RuntimeError("memory is not page-locked where torch says so")

    def missing(self) -> list[str]:
        """Return what the device lacks."""
        return [what for what, found in self._found.items() if not found]

    def names(self) -> tuple[str, str]:
        """Return what the device is called, and its model."""
        try:
            model = str(self._module.get_device_name(self.device))
        except (AttributeError, RuntimeError, NotImplementedError):
            model = self.device.type
        return str(self.device), f"{model}, through torch {torch.__version__}"

    def pinning(self) -> str:
        """Return how memory is page-locked."""
        if self._registers:
            return "registers"
        return "allocates" if self._found["page-locked memory"] else "missing"

    def memory(self) -> tuple[int, int]:
        """Return bytes that are free, and bytes in all."""
        return memory_of(self.device)

    # Memory.

    def alloc(self, bytes_: int) -> tuple[int, torch.Tensor]:
        """Return the address and the tensor of new memory on the device."""
        with _plainly():
            data = torch.empty(bytes_, dtype=torch.uint8, device=self.device)
            if data.data_ptr() % 256:
                data = torch.empty(bytes_ + 256, dtype=torch.uint8, device=self.device)
                start = -data.data_ptr() % 256
                data = data[start : start + bytes_]
        return data.data_ptr(), data

    def pin(self, bytes_: int) -> tuple[int, torch.Tensor]:
        """Return the address and the tensor of new page-locked memory, zeroed, from the start of a page."""
        with _plainly():
            data = torch.empty(bytes_ + _PAGE, dtype=torch.uint8, pin_memory=True)
            start = -data.data_ptr() % _PAGE
            data = data[start : start + bytes_].zero_()
        return data.data_ptr(), data

    def register(self, address: int, bytes_: int) -> None:
        """Lock the pages of memory of the engine's."""
        code = torch.cuda.cudart().cudaHostRegister(address, bytes_, 1)  # type: ignore[no-untyped-call]
        if int(code):
            raise RuntimeError(f"cudaHostRegister of {bytes_} bytes failed with {code}")

    def unregister(self, address: int) -> None:
        """Unlock them."""
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def drain(self) -> None:
        """Wait for all work of the device."""
        synchronize = getattr(self._module, "synchronize", None) or torch.accelerator.synchronize
        synchronize(self.device)

    # Streams and events.

    def _current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device.index)

    def _stream(self) -> torch.Stream:
        return torch.Stream(device=self.device)

    def stream(self, _name: str) -> object:
        """Return a new stream; its name is for whoever watches these calls."""
        return _Nothing() if self.is_synchronous else self._stream()

    def borrow_stream(self, handle: int) -> object:
        """Return the stream of torch with a number of ``stream_handle``."""
        if self.is_synchronous:
            return _Nothing()
        number = handle - (1 << 64) if handle >= 1 << 63 else handle
        kind = self._current().device_type
        return torch.Stream(stream_id=number, device_index=self.device.index, device_type=kind)

    def event(self, timed: bool) -> object:
        """Return a new event."""
        return _Nothing() if self.is_synchronous else torch.Event(device=self.device, enable_timing=timed)

    def record(self, event: Any, stream: Any) -> None:
        """Mark the present end of a stream."""
        if not self.is_synchronous:
            event.record(stream)

    def wait(self, stream: Any, event: Any) -> None:
        """Make a stream wait for an event."""
        if not self.is_synchronous:
            stream.wait_event(event)

    def query(self, event: Any) -> bool:
        """Whether an event was reached."""
        return self.is_synchronous or bool(event.query())

    def synchronize(self, event: Any) -> None:
        """Wait for an event."""
        if not self.is_synchronous:
            event.synchronize()

    def elapsed_ns(self, start: Any, end: Any) -> int:
        """Return the time between two events that were reached."""
        return 0 if self.is_synchronous else max(0, int(start.elapsed_time(end) * 1e6))

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        """Give work to a stream, from whichever thread, and leave torch as it was."""
        if self.is_synchronous:
            with _plainly():
                yield
            self.drain()
            return
        current = self._current()
        if current == stream:
            with _plainly():
                yield
            return
        index = torch.accelerator.current_device_index()
        torch.accelerator.set_stream(stream)
        try:
            with _plainly():
                yield
        finally:
            torch.accelerator.set_stream(current)
            if index != self.device.index:
                torch.accelerator.set_device_index(index)

    # Work.

    def _bytes(self, part: Part) -> torch.Tensor:
        base, at, count, on_device = part
        if base is not None:
            return base[at : at + count]
        device = self.device if on_device else _CPU
        if device.type == "npu":
            return _npu_bytes(at, count, device)
        storage = torch._C._construct_storage_from_data_pointer(at, device, count)
        # The storage's own call: it makes no work on a stream.
        made: torch.Tensor = (self._template if on_device else _HOST).new_empty(0).set_(storage, 0, (count,), (1,))
        return made

    def _typed(self, part: Part, dtype: torch.dtype) -> torch.Tensor:
        return self._bytes(part).view(dtype)

    def copy(self, stream: Any, pairs: list[tuple[Part, Part]]) -> None:
        """Copy each first part to the second."""
        waits = self.is_synchronous or not self._found["page-locked memory"]
        with self._on(stream):
            for source, target in pairs:
                self._bytes(target).copy_(self._bytes(source), non_blocking=not waits)

    def copy_pairs(self, stream: Any, pairs: list[tuple[Part, Part]]) -> None:
        """Copy each first part to the second, all on the device."""
        with self._on(stream):
            targets, sources = (
                [self._bytes(target) for _, target in pairs],
                [self._bytes(source) for source, _ in pairs],
            )
            torch._foreach_copy_(targets, sources)

    def fill(self, stream: Any, part: Part, byte: int) -> None:
        """Set every byte."""
        with self._on(stream):
            self._bytes(part).fill_(byte)

    def powers(self, stream: Any, part: Part, base: float, first: int) -> None:
        """Write powers of a number."""
        with self._on(stream):
            into = self._typed(part, torch.float32)
            exponents = torch.arange(first, first + into.numel(), dtype=torch.float32, device=self.device)
            into.copy_(torch.pow(torch.full_like(exponents, base), exponents))

    def uniform(self, stream: Any, part: Part, seed: int, low: float, high: float) -> None:
        """Write the numbers that every backend has for this seed, in whole numbers of 64 bits that wrap around."""
        with self._on(stream):
            into = self._typed(part, torch.float32)
            z = torch.arange(into.numel(), dtype=torch.int64, device=self.device)
            z.mul_(_signed(0x9E3779B97F4A7C15)).add_(_signed(seed))
            z = _shifted(z, 30).bitwise_xor_(z).mul_(_signed(0xBF58476D1CE4E5B9))
            z = _shifted(z, 27).bitwise_xor_(z).mul_(_signed(0x94D049BB133111EB))
            z = _shifted(z, 31).bitwise_xor_(z)
            unit = _shifted(z, 40).to(torch.float64).mul_(2.0**-24)
            width = torch.tensor(high, dtype=torch.float32) - torch.tensor(low, dtype=torch.float32)
            into.copy_(unit.mul_(float(width)).add_(low))

    def count_differences(self, stream: Any, a: Part, b: Part, count: Part) -> None:
        """Add the number of words that differ."""
        with self._on(stream):
            differ = self._typed(a, torch.int32) != self._typed(b, torch.int32)
            self._typed(count, torch.int64).add_(differ.sum())

    def spin(self, stream: Any, ns: int) -> None:
        """Keep a stream busy for about so long, where torch has a call for it."""
        with self._on(stream):
            # What CUDA counts are cycles, of at most 2 GHz.
            self._module._sleep(2 * ns if self.device.type == "cuda" else ns)

    def update(
        self,
        stream: Any,
        rule: str,
        segments: list[Segment],
        sets: list[Set],
        grad_scale: Part | None,
        skip: Part | None,
    ) -> None:
        """Update parts of parameters by a rule."""
        with self._on(stream):
            scale = None if grad_scale is None else self._typed(grad_scale, torch.float32)[0]
            groups: dict[int, list[_Operands]] = {}
            for segment in segments:
                groups.setdefault(segment[6], []).append(_Operands(self, segment, scale))
            kept = []
            if skip is not None:
                written = [tensor for group in groups.values() for one in group for tensor in one.written()]
                kept = [(tensor, tensor.clone()) for tensor in written]
            for number, group in groups.items():
                numbers, step = sets[number]
                _RULES[rule](self, group, numbers, step)
                for one in group:
                    one.finish()
            if skip is not None:
                skipped = self._typed(skip, torch.float32)[0] != 0
                for tensor, before in kept:
                    tensor.copy_(torch.where(skipped, before, tensor))

    def try_fused(self, name: str, run: Callable[[], object]) -> bool:
        """Run a fused operation; whether the device has it."""
        if self._fused.get(name) is False:
            return False
        try:
            run()
        except NotImplementedError:
            self._fused[name] = False
            return False
        self._fused[name] = True
        return True


class _Operands:
    """What one segment's update reads and writes, as tensors; the weight that it changes is f32."""

    def __init__(self, driver: Driver, segment: Segment, scale: torch.Tensor | None) -> None:
        weight, weight_type, grad, grad_type, columns, master, _ = segment
        self.parameter = driver._typed(weight, _DTYPES[weight_type])
        self.state = [None if column is None else driver._typed(column, torch.float32) for column in columns]
        self.master = None if master is None else driver._typed(master, torch.float32)
        if self.master is not None:
            now = self.parameter.float()
            # A master whose rounding is not the parameter gives way to it.
            self.master.copy_(torch.where(self.master.to(self.parameter.dtype) != self.parameter, now, self.master))
            self.weight = self.master
        else:
            self.weight = self.parameter.float()
        self.grad = driver._typed(grad, _DTYPES[grad_type]).float()
        if scale is not None:
            self.grad = self.grad * scale

    def written(self) -> list[torch.Tensor]:
        """Return every tensor that an update writes."""
        found = [self.parameter, self.master, *self.state]
        return [tensor for tensor in found if tensor is not None]

    def finish(self) -> None:
        """Round the new weight to the parameter, where that is another tensor."""
        if self.weight.data_ptr() != self.parameter.data_ptr():
            self.parameter.copy_(self.weight)


def _column(group: list[_Operands], number: int) -> list[torch.Tensor]:
    return [tensor for one in group if (tensor := one.state[number]) is not None]


def _adam(driver: Driver, group: list[_Operands], numbers: Sequence[float], step: int, decoupled: bool) -> None:
    """Run Adam or AdamW: torch's fused operation, or the operations of its optimizer that runs one tensor at a time."""
    lr, beta1, beta2, eps, weight_decay, maximize, amsgrad = numbers[:7]
    weights, grads = [one.weight for one in group], [one.grad for one in group]
    means, squares, largest = _column(group, 0), _column(group, 1), _column(group, 2)
    count = torch.full((), float(step), dtype=torch.float32, device=driver.device)
    name = "_fused_adamw_" if decoupled else "_fused_adam_"

    def fused() -> None:
        getattr(torch, name)(
            weights,
            grads,
            means,
            squares,
            largest if amsgrad else [],
            [count] * len(group),
            amsgrad=bool(amsgrad),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            maximize=bool(maximize),
            grad_scale=None,
            found_inf=None,
        )

    if driver.try_fused(name, fused):
        return
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    for i, (weight, given) in enumerate(zip(weights, grads, strict=True)):
        grad = -given if maximize else given
        if weight_decay and decoupled:
            weight.mul_(1 - lr * weight_decay)
        elif weight_decay:
            grad = grad.add(weight, alpha=weight_decay)
        means[i].lerp_(grad, 1 - beta1)
        squares[i].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        under = squares[i]
        if amsgrad:
            under = torch.maximum(largest[i], squares[i], out=largest[i])
        divisor = (under.sqrt() / math.sqrt(correction2)).add_(eps)
        weight.addcdiv_(means[i], divisor, value=-lr / correction1)


def _sgd(driver: Driver, group: list[_Operands], numbers: Sequence[float], step: int) -> None:
    """Run SGD: torch's fused operation, or the operations of its optimizer that runs one tensor at a time."""
    lr, momentum, dampening, weight_decay, nesterov, maximize = numbers[:6]
    weights, grads = [one.weight for one in group], [one.grad for one in group]
    buffers = _column(group, 0)
    momentum = momentum if buffers else 0.0

    def fused() -> None:
        torch._fused_sgd_(
            weights,
            grads,
            buffers if momentum else [],
            weight_decay=weight_decay,
            momentum=momentum,
            lr=lr,
            dampening=dampening,
            nesterov=bool(nesterov),
            maximize=bool(maximize),
            is_first_step=step <= 1,
            grad_scale=None,
            found_inf=None,
        )

    if driver.try_fused("_fused_sgd_", fused):
        return
    for i, (weight, given) in enumerate(zip(weights, grads, strict=True)):
        grad = -given if maximize else given
        if weight_decay:
            grad = grad.add(weight, alpha=weight_decay)
        if momentum:
            if step <= 1:
                buffers[i].copy_(grad)
            else:
                buffers[i].mul_(momentum).add_(grad, alpha=1 - dampening)
            grad = grad.add(buffers[i], alpha=momentum) if nesterov else buffers[i]
        weight.add_(grad, alpha=-lr)


def _lion(driver: Driver, group: list[_Operands], numbers: Sequence[float], step: int) -> None:
    """Run Lion as its authors write it; torch has none."""
    lr, beta1, beta2, weight_decay, maximize = numbers[:5]
    for one, mean in zip(group, _column(group, 0), strict=True):
        grad = -one.grad if maximize else one.grad
        direction = mean.mul(beta1).add_(grad, alpha=1 - beta1).sign_()
        if weight_decay:
            one.weight.mul_(1 - lr * weight_decay)
        one.weight.add_(direction, alpha=-lr)
        mean.mul_(beta2).add_(grad, alpha=1 - beta2)


_RULES: dict[str, Callable[[Driver, list[_Operands], Sequence[float], int], None]] = {
    "adamw": lambda driver, group, numbers, step: _adam(driver, group, numbers, step, decoupled=True),
    "adam": lambda driver, group, numbers, step: _adam(driver, group, numbers, step, decoupled=False),
    "sgd": _sgd,
    "lion": _lion,
}

_HOST = torch.empty(0, dtype=torch.uint8, device=_CPU)


@contextmanager
def _plainly() -> Iterator[None]:
    """Run torch's operations as they are: without autograd, and without the modes that a caller may be in."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.no_grad():
        yield


def _npu_bytes(address: int, count: int, device: torch.device) -> torch.Tensor:
    """Return memory of an NPU as a tensor; torch_npu's storages have a description that plain ones lack."""
    import torch_npu  # type: ignore[import-not-found]

    storage = torch_npu._C._construct_storage_from_data_pointer(address, device, count)
    about = {"data_ptr": address, "device": device, "nbytes": count, "dtype": torch.uint8}
    about |= {"size": (count,), "stride": (1,), "storage_offset": 0}
    made: torch.Tensor = torch_npu._C._construct_NPU_Tensor_From_Storage_And_Metadata(about, storage)
    return made


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right as if the numbers had no sign."""
    return z.bitwise_right_shift(bits).bitwise_and_((1 << (64 - bits)) - 1)
