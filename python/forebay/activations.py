"""Activation offload: what a forward pass saves leaves the GPU under it and returns under the backward pass."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.autograd.graph import saved_tensors_hooks

from forebay import _saved
from forebay._layers import Layer, find_layers, wrap_checkpoints
from forebay._saved import Saver
from forebay.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

__all__ = ["ActivationOffload", "offload_activations", "save_on_host"]

_OPTIONS = (
    "layers",
    "min_bytes",
    "fraction",
    "keep_last",
    "recompute",
    "max_in_flight_bytes",
    "pinned_budget_bytes",
)


def _whole(name: str, value: Any, least: int, *, optional: bool = False) -> int | None:
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        extra = ", or None" if optional else ""
        raise OptionError(f"invalid {name}: {value!r}; give a whole number of at least {least}{extra}")
    return value


def _share(value: Any, *, auto: bool) -> float | None:
    if auto and value == "auto":
        return None
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
    if not good or not 0 <= value <= 1:
        extra = ', or "auto"' if auto else ""
        raise OptionError(f"invalid fraction: {value!r}; give a number from 0.0 to 1.0{extra}")
    return float(value)


class ActivationOffload:
    """What :func:`offload_activations` returns: figures, and the way back."""

    def __init__(self, saver: Saver, layers: list[Layer], undo: list[Callable[[], None]]) -> None:
        self._saver, self._layers, self._undo = saver, layers, undo

    def stats(self) -> dict[str, float]:
        """Return sums since the beginning.

        Returns
        -------
        dict
            ``stored_bytes``, ``fetched_bytes`` and ``kept_bytes`` of saved tensors; ``pinned_bytes`` and how many of
            them were used at most, ``pinned_peak_bytes``; ``stalls`` and ``stall_s``, how often and how long the
            computation waited for a copy; the present ``fraction`` and ``max_in_flight_bytes``; ``store_gbps`` and
            ``fetch_gbps``, the rates of the copies.
        """
        return self._saver.stats()

    def table(self) -> list[dict[str, Any]]:
        """Return the same for each layer, with the times of the last pass that could be read."""
        names = ("stored_bytes", "fetched_bytes", "kept_bytes", "stalls", "stall_s", "forward_s", "backward_s")
        rows: dict[int, dict[str, Any]] = {}
        for layer in self._layers:
            about: dict[str, Any] = {"layer": layer.number, "module": type(layer.module).__name__, "kept": layer.keep}
            rows[layer.number] = about | dict.fromkeys(names, 0)
        for engine in self._saver.engines.values():
            for number, figures in engine.core.table():
                for name, figure in zip(names, figures, strict=True):
                    if number in rows:
                        rows[number][name] += figure / 1e9 if name.endswith("_s") else figure
        return list(rows.values())

    def reserve(self, pinned_bytes: int) -> None:
        """Pin memory now, in all so many bytes for each GPU of the model, instead of in the first forward pass.

        Worth its while where several ranks run collectives: pinning in the middle of them takes time at a bad moment.
        """
        wanted = _whole("pinned_bytes", pinned_bytes, 0) or 0
        for device in dict.fromkeys(layer.device for layer in self._layers if layer.is_ready()):
            self._saver.engine(device).core.reserve(wanted)

    def remove(self) -> None:
        """Take the hooks off. Graphs that exist still work; pinned memory goes with the last of them."""
        for undo in self._undo:
            undo()
        for layer in self._layers:
            layer.remove()
        self._undo, self._layers = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def offload_activations(
    model: torch.nn.Module,
    *,
    layers: Iterable[torch.nn.Module] | str | None = None,
    min_bytes: int = 1 << 20,
    fraction: float | str = "auto",
    keep_last: int = 1,
    recompute: bool = False,
    max_in_flight_bytes: int | None = None,
    pinned_budget_bytes: int | None = None,
    **unknown: Any,
) -> ActivationOffload:
    """Have the tensors that a model's layers save leave the GPU in the forward pass and return in the backward pass.

    Gradients are the same, bit for bit. The model is not changed; call ``compile`` and
    ``gradient_checkpointing_enable`` before this.

    Parameters
    ----------
    model
        Any module, on a GPU or on the CPU.
    layers
        The modules whose saved tensors are offloaded, in the order in which they run; or the name of a ModuleList. By
        default what FSDP2 wraps below the root, else the outermost ModuleList with most parameters.
    min_bytes
        Smaller tensors stay.
    fraction
        How much of the bytes leaves, from 0.0 to 1.0. ``"auto"`` offloads everything in the first passes, measures the
        layers and the wire, and from then on offloads what hides under the computation.
    keep_last
        The last layers stay as they are: their tensors are wanted again at once.
    recompute
        Recompute each layer in the backward pass and offload what is left, its inputs.
    max_in_flight_bytes
        How many bytes may be on their way out and still on the GPU, and how many may be fetched ahead. By default what
        the largest layer saves.
    pinned_budget_bytes
        Most bytes of host memory to pin, for each GPU; beyond that tensors stay on the GPU, with one warning.
    """
    if unknown:
        raise OptionError(f"unknown option {', '.join(map(repr, unknown))}; the options are {', '.join(_OPTIONS)}")
    if not isinstance(model, torch.nn.Module):
        raise OptionError(f"invalid model: {type(model).__name__}; give a torch.nn.Module")
    if hasattr(model, "_orig_mod") and hasattr(model, "dynamo_ctx"):
        raise OptionError(
            "the model is compiled as a whole, so its layers are not called one by one; compile the layers instead, "
            "`for layer in layers: layer.compile()`, or put `with forebay.save_on_host():` around the forward pass"
        )
    share = _share(fraction, auto=True)
    least = _whole("min_bytes", min_bytes, 0) or 0
    last = _whole("keep_last", keep_last, 0) or 0
    if not isinstance(recompute, bool):
        raise OptionError(f"invalid recompute: {recompute!r}; use True or False")
    in_flight = _whole("max_in_flight_bytes", max_in_flight_bytes, 1, optional=True)
    budget = _whole("pinned_budget_bytes", pinned_budget_bytes, 0, optional=True)
    if recompute and share is None:
        # Inputs alone are few bytes: all of them hide.
        share = 1.0
    found = find_layers(model, layers)
    for number, module in enumerate(found):
        if isinstance(module.__dict__.get("_compiled_call_impl"), Layer):
            raise OptionError(
                f"layer {number}, a {type(module).__name__}, is offloaded already; "
                "call remove() of the first offload_activations, or pass other layers"
            )
    saver = Saver(None, least, lambda where: _saved.open_engine(where, share, in_flight, budget))
    if share == 0.0 and not recompute:
        return ActivationOffload(saver, [], [])
    wrapped = [
        Layer(saver, number, module, keep=number >= len(found) - last, recompute=recompute)
        for number, module in enumerate(found)
    ]
    undo = wrap_checkpoints(model, wrapped)
    for layer in wrapped:
        layer.install()
    return ActivationOffload(saver, wrapped, undo)


_savers: dict[tuple[Any, ...], Saver] = {}


class save_on_host(saved_tensors_hooks):  # noqa: N801 -- a context manager, named as torch names its own
    """Offload what any code saves for its backward pass, like ``torch.autograd.graph.save_on_cpu``.

    Pinned memory is kept between uses with the same options; ``close`` gives it back.

    Parameters
    ----------
    min_bytes
        Smaller tensors stay.
    fraction
        How much of the bytes leaves, from 0.0 to 1.0.
    max_in_flight_bytes
        How many bytes may be on their way out and still on the GPU, and how many may be fetched ahead. By default four
        of the largest tensors.
    pinned_budget_bytes
        Most bytes of host memory to pin, for each GPU; beyond that tensors stay on the GPU, with one warning.
    device
        ``"cuda"``: tensors on GPUs are offloaded. ``"cpu"``: those on the CPU, where there is no GPU to try it on.
    """

    def __init__(
        self,
        *,
        min_bytes: int = 1 << 20,
        fraction: float = 1.0,
        max_in_flight_bytes: int | None = None,
        pinned_budget_bytes: int | None = None,
        device: str = "cuda",
    ) -> None:
        share = _share(fraction, auto=False)
        least = _whole("min_bytes", min_bytes, 0) or 0
        in_flight = _whole("max_in_flight_bytes", max_in_flight_bytes, 1, optional=True)
        budget = _whole("pinned_budget_bytes", pinned_budget_bytes, 0, optional=True)
        if device not in ("cuda", "cpu"):
            raise OptionError(f'invalid device: {device!r}; use "cuda" or "cpu"')
        self._key = (device, least, share, in_flight, budget)
        saver = _savers.get(self._key)
        if saver is None:
            saver = Saver(device, least, lambda where: _saved.open_engine(where, share, in_flight, budget))
            _savers[self._key] = saver
        self._saver = saver
        super().__init__(saver.pack, saver.unpack)

    def __enter__(self) -> None:
        for engine in self._saver.engines.values():
            engine.core.begin_pass()
        super().__enter__()

    def stats(self) -> dict[str, float]:
        """Return sums since the beginning, as :meth:`ActivationOffload.stats` does."""
        return self._saver.stats()

    def close(self) -> None:
        """Give pinned memory back, once the last graph that uses it is gone."""
        _savers.pop(self._key, None)
