"""Activation offload: saved tensors are copied to the host during the forward pass and fetched during the backward."""

from __future__ import annotations

import itertools
import re
import warnings
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch.autograd.graph import saved_tensors_hooks

from forebay import _checks, _device, _trace
from forebay.activations import saved as _saved
from forebay.activations.budget.controller import Budget
from forebay.activations.budget.layer import PlannedLayer
from forebay.activations.call import Begins, Ends, Layer, is_offloaded
from forebay.activations.find import compiled_around, find_layers
from forebay.activations.saved import Saver
from forebay.activations.switch import Switch
from forebay.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
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
    "budget_bytes",
    "backend",
)


def _budget(value: Any) -> tuple[int | None, float | None]:
    """Return a budget as bytes, or as a share of the device's memory."""
    if isinstance(value, str) and (found := re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]+)?)%", value)):
        share = float(found[1]) / 100
        if 0 < share <= 1:
            return None, share
    elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value, None
    raise OptionError(
        f"invalid budget_bytes: {value!r}; give a whole number above 0, the bytes that one pass may allocate, or a "
        'string like "80%", the share of the GPU\'s memory that may be in use'
    )


class ActivationOffload:
    """What :func:`offload_activations` returns: it shows figures and plans, and removes the offload."""

    alive: ClassVar[weakref.WeakSet[ActivationOffload]] = weakref.WeakSet()
    """Every offload of this process, until it is removed and forgotten."""
    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(
        self,
        saver: Saver,
        layers: list[Layer],
        undo: list[Callable[[], None]],
        budget: Budget | None = None,
        idle: str | None = None,
    ) -> None:
        # What a trace says about it; set by who makes it.
        self.number = next(self._numbers)
        self.model_name, self.settings = "model", dict[str, Any]()
        self._layer_names: dict[int, str] = {}
        self._is_removed = False
        ActivationOffload.alive.add(self)
        self._saver, self._layers, self._undo, self._budget = saver, layers, undo, budget
        # Why nothing is offloaded or recomputed; None if something is.
        self._idle = idle

    def stats(self) -> dict[str, float]:
        """Return sums since the beginning.

        Returns
        -------
        dict
            ``stored_bytes``, ``fetched_bytes`` and ``kept_bytes`` of saved tensors; ``pinned_bytes``, and
            ``pinned_peak_bytes``, the most of them in use at once; ``stalls`` and ``stall_s``, how often and how long
            the computation waited for a copy; the present ``fraction`` and ``max_in_flight_bytes``; ``store_gbps`` and
            ``fetch_gbps``, the rates of the copies.
        """
        return self._saver.stats()

    def table(self) -> list[dict[str, Any]]:
        """Return statistics of each layer, with the times of the last pass that was measured.

        Under a budget each call of a layer has a row, and ``layer`` is its place in the order of the forward pass. When
        there is a plan, a row also has the ``choice``, ``planned_kept_bytes``, ``planned_offloaded_bytes``,
        ``predicted_forward_s`` and ``predicted_backward_s``, and the times are those measured under that plan. A last
        row, with ``layer`` None, is for the whole pass. It has ``predicted_peak_bytes``, ``peak_bytes``,
        ``predicted_pass_s`` and ``pass_s``. Its ``peak_error`` and ``time_error`` are the errors of both predictions,
        relative to the measured values. Figures that were not measured are None.
        """
        counts = ("stored_bytes", "fetched_bytes", "kept_bytes", "stalls")
        times = ("stall", "forward", "backward")
        names = (*counts, *(f"{name}_s" for name in times))
        rows: dict[int, dict[str, Any]] = {}
        for number, layer in enumerate(self._layers if self._budget is None else self._budget.called()):
            about: dict[str, Any] = {"layer": number, "module": type(layer.module).__name__, "kept": layer.keep}
            rows[number] = about | dict.fromkeys(names, 0)
        for engine in self._saver.engines.values():
            for stats in engine.core.table():
                if stats.layer in rows:
                    for name in counts:
                        rows[stats.layer][name] += getattr(stats, name)
                    for name in times:
                        rows[stats.layer][f"{name}_s"] += getattr(stats, f"{name}_ns") / 1e9
        return [*rows.values(), *self._compare(rows)]

    def _compare(self, rows: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
        """Add the plan and what was measured under it; return the row of the whole pass."""
        figures = self._budget.figures() if self._budget is not None else None
        if figures is None or figures.run.measured is None:
            return []
        plan, measured = figures.run.planned.plan, figures.run.measured
        for number, (chosen, times) in enumerate(zip(plan.layers, measured.calls, strict=True)):
            if number not in rows:
                continue
            rows[number] |= {
                "kept": chosen.word == "keep",
                "choice": chosen.word,
                "planned_kept_bytes": chosen.kept_bytes,
                "planned_offloaded_bytes": chosen.offloaded_bytes,
                "predicted_forward_s": chosen.forward_ns / 1e9,
                "predicted_backward_s": chosen.backward_ns / 1e9,
                "forward_s": None if times.forward_ns is None else times.forward_ns / 1e9,
                "backward_s": None if times.backward_ns is None else times.backward_ns / 1e9,
            }
        peak, seconds = measured.peak_bytes, measured.pass_s
        return [
            {
                "layer": None,
                "module": "pass",
                "budget_bytes": plan.budget_bytes,
                "predicted_peak_bytes": plan.peak_bytes,
                "peak_bytes": peak,
                "peak_error": plan.peak_bytes / peak - 1 if peak else None,
                "predicted_pass_s": plan.pass_ns / 1e9,
                "pass_s": seconds,
                "time_error": plan.pass_ns / 1e9 / seconds - 1 if seconds else None,
            }
        ]

    def __del__(self) -> None:
        # A trace says what became of it.
        with suppress(Exception):
            _trace.leaves(self)

    def describe(self, model: torch.nn.Module, settings: dict[str, Any]) -> Self:
        """Keep what a trace says about it, and return it."""
        names = {id(module): name for name, module in model.named_modules()}
        self._layer_names = {id(layer.module): names.get(id(layer.module), "") for layer in self._layers}
        self.model_name, self.settings = type(model).__name__, settings
        return self

    def layer_names(self) -> list[str]:
        """Return the names of the layers, in the order of the numbers that the engine has for them."""
        layers = self._layers if self._budget is None else self._budget.called()
        return [self._layer_names.get(id(layer.module)) or f"layer {at}" for at, layer in enumerate(layers)]

    @property
    def is_removed(self) -> bool:
        """Whether ``remove`` was called."""
        return self._is_removed

    def trace_owners(self) -> list[int]:
        """Return the numbers under which its engines report to a trace."""
        return [engine.core.trace_owner() for engine in self._saver.engines.values()]

    def plan(self) -> dict[str, Any] | None:
        """Return the plan in force as plain data; None without a budget, or before the first plan."""
        figures = self._budget.figures() if self._budget is not None else None
        return figures.run.as_dict() if figures is not None else None

    def explain(self) -> str:
        """Return the plan of each layer as text, with the errors of its predictions."""
        if self._idle is not None:
            return self._idle
        if self._budget is None:
            leave = f"{self._saver.stats()['fraction']:.0%} of the bytes leave"
            return f"no budget; {leave if self._saver.engines else 'nothing has run yet'}"
        figures = self._budget.figures()
        if figures is None:
            return "no plan yet; the first two passes only measure"
        text = figures.run.planned.plan.explain()
        (row,) = self._compare({})
        text += f"measured: {row['pass_s'] * 1e3:.1f} ms a pass, predicted {row['time_error']:+.1%}"
        if row["peak_bytes"]:
            text += f"; {row['peak_bytes'] / 2**30:.2f} GiB at the peak, predicted {row['peak_error']:+.1%}"
        return "\n".join([text, *figures.notes])

    def reserve(self, pinned_bytes: int) -> None:
        """Pin ``pinned_bytes`` in all for each GPU of the model now, instead of in the first forward pass.

        This helps if ranks run collectives, because pinning between collectives would delay them.
        """
        wanted = _checks.whole("pinned_bytes", pinned_bytes, 0)
        for device in dict.fromkeys(layer.device_of() for layer in self._layers):
            if _device.is_supported(device):
                self._saver.engine(device).core.reserve(wanted)

    def remove(self) -> None:
        """Remove the hooks. Graphs that exist still work; pinned memory is freed with the last of them."""
        _trace.leaves(self)
        self._is_removed = True
        for undo in self._undo:
            undo()
        for layer in self._layers:
            layer.remove()
        self._undo, self._layers = [], []
        if self._budget is not None:
            self._budget.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def offload_activations(
    model: torch.nn.Module,
    *,
    budget_bytes: int | str | None = None,
    layers: Iterable[torch.nn.Module] | str | None = None,
    min_bytes: int = 1 << 20,
    fraction: float | str = "auto",
    keep_last: int = 1,
    recompute: bool | str = "auto",
    max_in_flight_bytes: int | None = None,
    pinned_budget_bytes: int | None = None,
    backend: str | None = None,
    **unknown: Any,
) -> ActivationOffload:
    """Offload the tensors that a model's layers save: to the host in the forward pass, back in the backward pass.

    Gradients are the same, bit for bit. The model is not changed. Gradient checkpointing of ``transformers`` may be
    switched on and off before and after, as trainers do: while it is on, the inputs of layers are offloaded, and under
    a budget the plan decides instead of it. Layers may be compiled, before or after; the whole model may not.

    Parameters
    ----------
    model
        Any module, on a GPU or on the CPU.
    budget_bytes
        Memory limit. Each layer is kept, offloaded or recomputed, whichever takes the least time within the limit. An
        int: the bytes that one pass, forward and backward, may allocate, new gradients included. ``"80%"``: the share
        of the GPU's memory that may be in use overall. Both count as torch's ``max_memory_allocated`` does. The first
        two passes of a shape only measure and take as little memory as possible. The first passes that follow a plan
        are compared with it. These passes reset torch's peak statistics. ``table`` and ``explain`` show the plan.
    layers
        The modules whose saved tensors are offloaded, in the order in which they run; or the name of a ModuleList. By
        default the modules that FSDP2 wraps below the root, otherwise the outermost ModuleList with most parameters.
    min_bytes
        Tensors smaller than this stay on the GPU.
    fraction
        The share of the bytes that is offloaded, from 0.0 to 1.0. ``"auto"`` offloads everything in the first passes
        and measures the layers and the link. It then offloads only what can be copied without waiting.
    keep_last
        The number of last layers that are not offloaded, because the backward pass uses their tensors first.
    recompute
        Recompute each layer in the backward pass and offload its inputs. By default the plan decides if there is a
        budget, and nothing is recomputed otherwise. With a budget and ``False``, tensors are kept or offloaded.
    max_in_flight_bytes
        The most bytes that may be on their way to the host and still on the GPU, and the most that may be fetched
        ahead. By default the bytes that the largest layer saves.
    pinned_budget_bytes
        The most host memory to pin, for each GPU. When it is used up, tensors stay on the GPU, with one warning.
    backend
        ``"torch"`` or ``"torch_async"``: as in the optimizers.
    """
    if unknown:
        raise OptionError(f"unknown option {', '.join(map(repr, unknown))}; the options are {', '.join(_OPTIONS)}")
    if not isinstance(model, torch.nn.Module):
        raise OptionError(f"invalid model: {type(model).__name__}; give a torch.nn.Module")
    share = _checks.share("fraction", fraction, auto=True)
    settings = {
        "budget_bytes": budget_bytes,
        "layers": layers if isinstance(layers, str) else None,
        "min_bytes": min_bytes,
        "fraction": fraction,
        "keep_last": keep_last,
        "recompute": recompute,
        "max_in_flight_bytes": max_in_flight_bytes,
        "pinned_budget_bytes": pinned_budget_bytes,
        "backend": backend,
    }
    least = _checks.whole("min_bytes", min_bytes, 0)
    last = _checks.whole("keep_last", keep_last, 0)
    if not isinstance(recompute, bool) and recompute != "auto":
        raise OptionError(f"invalid recompute: {recompute!r}; use True or False, or leave it out")
    in_flight = _checks.whole("max_in_flight_bytes", max_in_flight_bytes, 1, optional=True)
    budget = _checks.whole("pinned_budget_bytes", pinned_budget_bytes, 0, optional=True)
    if budget_bytes is not None:
        limits = _budget(budget_bytes)
        for name, given, default in (
            ("fraction", fraction, "auto"),
            ("keep_last", keep_last, 1),
            ("max_in_flight_bytes", max_in_flight_bytes, None),
        ):
            if given != default:
                raise OptionError(f"invalid {name}: {given!r}; budget_bytes decides that, so leave {name} out")
        if recompute is True:
            raise OptionError(
                "invalid recompute: True; budget_bytes decides what is recomputed, so leave it out, or use False"
            )
    recompute, may_recompute = recompute is True, recompute is not False
    if recompute and share is None:
        # Inputs are few bytes: all of them can be copied without waiting.
        share = 1.0
    found = find_layers(model, layers)
    if (compiled := compiled_around(model, found)) is not None:
        raise OptionError(
            f"{compiled} is compiled as a whole, so its layers are not called one by one; compile the layers instead, "
            "`for layer in layers: layer.compile()`, or put `with forebay.save_on_host():` around the forward pass"
        )
    for number, module in enumerate(found):
        if is_offloaded(module):
            raise OptionError(
                f"layer {number}, a {type(module).__name__}, is offloaded already; "
                "call remove() of the first offload_activations, or pass other layers"
            )
    if backend is not None:
        _checks.one_of("backend", backend, _device.BACKENDS)
    driven = {} if backend is None else {"backend": backend}
    saver = Saver(None, least, lambda where: _saved.open_engine(where, share, in_flight, budget, **driven))
    if budget_bytes is not None:
        planned = _planned(model, found, saver, *limits, may_recompute=may_recompute, pinned_budget_bytes=budget)
        return planned.describe(model, settings)
    if share == 0.0 and not recompute:
        return ActivationOffload(saver, [], [], idle="no budget; 0% of the bytes leave").describe(model, settings)
    wrapped = [
        Layer(saver, number, module, keep=number >= len(found) - last, recompute=recompute)
        for number, module in enumerate(found)
    ]
    switch = Switch(model, wrapped)
    hook = model.register_forward_pre_hook(Begins(wrapped, switch), prepend=True)
    switch.install()
    for layer in wrapped:
        layer.install()
    return ActivationOffload(saver, wrapped, [switch.remove, hook.remove]).describe(model, settings)


def _planned(
    model: torch.nn.Module,
    found: list[torch.nn.Module],
    saver: Saver,
    limit: int | None,
    share: float | None,
    *,
    may_recompute: bool,
    pinned_budget_bytes: int | None,
) -> ActivationOffload:
    """Set a model up to follow a plan."""
    tensor = next((t for t in (*model.parameters(), *model.buffers()) if _device.is_supported(t.device)), None)
    whole = _device.total_memory(tensor.device) if tensor is not None else None
    if limit is not None and whole is not None and limit >= whole:
        idle = (
            f"budget_bytes is {limit}, and {tensor.device if tensor is not None else ''} has only {whole} bytes: "
            "nothing is offloaded or recomputed"
        )
        warnings.warn(f"{idle}; use a smaller budget, or remove this call", stacklevel=3)
        return ActivationOffload(saver, [], [], idle=idle)
    budget = Budget(
        saver,
        limit,
        share,
        may_recompute=may_recompute,
        pinned_budget_bytes=pinned_budget_bytes,
        model=model,
    )
    wrapped = [PlannedLayer(saver, number, module, budget) for number, module in enumerate(found)]
    budget.adopt(wrapped)
    switch = Switch(model, list(wrapped))
    begins = model.register_forward_pre_hook(Begins(list(wrapped), switch, budget.model_begins), prepend=True)
    ends = model.register_forward_hook(Ends(budget.model_ends), always_call=True)
    switch.install()
    for layer in wrapped:
        layer.install()
    return ActivationOffload(saver, list(wrapped), [switch.remove, begins.remove, ends.remove], budget)


_savers: dict[tuple[Any, ...], Saver] = {}


class save_on_host(saved_tensors_hooks):  # noqa: N801 -- a context manager, named as torch names its own
    """Offload what any code saves for its backward pass, like ``torch.autograd.graph.save_on_cpu``.

    Pinned memory is kept between uses with the same options; ``close`` frees it.

    Parameters
    ----------
    min_bytes
        Tensors smaller than this stay on the GPU.
    fraction
        The share of the bytes that is offloaded, from 0.0 to 1.0.
    max_in_flight_bytes
        The most bytes that may be on their way to the host and still on the GPU, and the most that may be fetched
        ahead. By default four times the bytes of the largest tensor.
    pinned_budget_bytes
        The most host memory to pin, for each GPU. When it is used up, tensors stay on the GPU, with one warning.
    device
        The type of the devices whose tensors are offloaded: by default GPUs; ``"cpu"`` to try it without a GPU.
    """

    def __init__(
        self,
        *,
        min_bytes: int = 1 << 20,
        fraction: float = 1.0,
        max_in_flight_bytes: int | None = None,
        pinned_budget_bytes: int | None = None,
        device: str | None = None,
    ) -> None:
        share = _checks.share("fraction", fraction)
        least = _checks.whole("min_bytes", min_bytes, 0)
        in_flight = _checks.whole("max_in_flight_bytes", max_in_flight_bytes, 1, optional=True)
        budget = _checks.whole("pinned_budget_bytes", pinned_budget_bytes, 0, optional=True)
        gpu = _device.gpu_type()
        device = gpu if device is None else device
        _checks.one_of("device", device, tuple(dict.fromkeys((gpu, *_device.SUPPORTED_TYPES))))
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
        """Free pinned memory when the last graph that uses it is freed."""
        _savers.pop(self._key, None)
