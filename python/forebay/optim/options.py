"""The options that every optimizer takes in addition to those of torch's class, and their checks."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args

import torch

from forebay import _core
from forebay._checks import one_of, positive, share, switch, whole
from forebay._device import BACKENDS, device_named, with_backend
from forebay.errors import OptionError
from forebay.optim.packed import BF16, BLOCKS, COMPACT, F32

StateFormat = torch.dtype | Literal["8bit"]
Placement = Literal["stream", "resident", "host", "hybrid"]
GradSource = Literal["grad", "decoupled_grad", "main_grad"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
GRAD_SOURCES: tuple[GradSource, ...] = get_args(GradSource)


NO_NORM = (
    "skip_nonfinite needs max_grad_norm: without it no norm is computed; give a max_grad_norm, math.inf does not clip"
)
"""What is wrong with ``skip_nonfinite`` alone."""


class Keywords(TypedDict, total=False):
    """Options as the user gives them; documented at :class:`forebay.optim.base.Optimizer`."""

    placement: Placement
    chunk_bytes: int
    slots: int
    master_weights: bool | Literal["compact"] | None
    state_dtype: StateFormat | Mapping[str, StateFormat]
    stochastic_rounding: bool
    rounding_seed: int
    max_grad_norm: float | None
    skip_nonfinite: bool
    pinned_budget_bytes: int | None
    resident_bytes: int | None
    resident_fraction: float | None
    grad_source: GradSource
    device: torch.device | str | None
    host_fraction: float | Literal["auto"] | None
    host_threads: int | None
    host_kernel: Literal["portable", "avx2", "avx512"] | None
    backend: Literal["torch", "torch_async"] | None


@dataclass(frozen=True)
class Options:
    """The checked options of one optimizer. The engine reads the ones it needs by attribute."""

    placement: str
    chunk_bytes: int
    slots: int
    master_weights: bool | str | None
    max_grad_norm: float | None
    skip_nonfinite: bool
    pinned_budget_bytes: int | None
    grad_source: str
    device: torch.device | None
    # The part of the state that the host updates; None to measure the fastest part.
    host_fraction: float | None = 0.0
    host_threads: int | None = None
    host_kernel: str | None = None
    # How a GPU is driven; None for the engine's own way, where it has one.
    backend: str | None = None
    # How much of the state stays on the device, in bytes or as a share.
    resident_bytes: int | None = None
    resident_fraction: float | None = None
    # The format of the columns of state, by the engine's name; the second is of columns that have one of their own.
    state_format: str = F32
    column_formats: tuple[tuple[str, str], ...] = ()
    # The seed with which columns in fewer bits are rounded at random; None to round them to nearest.
    rounding_seed: int | None = None

    @property
    def is_resident(self) -> bool:
        """Whether state is in torch's memory on the parameters' device."""
        return self.placement == "resident"

    @property
    def streams(self) -> bool:
        """Whether state goes through the ring on the device."""
        return not self.is_resident and self.host_fraction != 1.0

    @property
    def updates_on_host(self) -> bool:
        """Whether the host updates any of the state."""
        return self.host_fraction != 0.0

    @property
    def reduces_state(self) -> bool:
        """Whether any column is kept in fewer bits than f32."""
        return {self.state_format, *dict(self.column_formats).values()} != {F32}

    def formats_of(self, columns: Sequence[str], follows: Mapping[str, str]) -> list[str]:
        """Return the format of each column. One without a format of its own has that of the column that it follows."""
        named = dict(self.column_formats)
        return [named.get(name, named.get(follows.get(name, name), self.state_format)) for name in columns]

    @property
    def has_compact_masters(self) -> bool:
        """Whether masters of bf16 parameters are compact."""
        return self.master_weights == COMPACT

    def master_format(self, dtype: torch.dtype) -> str:
        """Return the format of the masters of parameters of this type; empty if they have none."""
        if dtype == torch.float32 or self.master_weights is False:
            return ""
        return COMPACT if self.has_compact_masters and dtype == torch.bfloat16 else F32

    def keeps_master(self, dtype: torch.dtype) -> bool:
        """Whether parameters of this type have a master."""
        return bool(self.master_format(dtype))

    def open(self, device: str, rule: str) -> _core.Optimizer:
        """Return a new engine for a device; it pins and allocates nothing yet."""
        name = with_backend(device, self.backend)
        if name.startswith("torch:") and self.updates_on_host:
            raise OptionError(
                f"placement {self.placement!r} is not for {name.removeprefix('torch:').rstrip('!')} through torch: its "
                "updates have the bits of torch's kernels, and the host's threads cannot give those; use 'stream'"
            )
        if name.startswith("torch:") and self.has_compact_masters:
            raise OptionError(
                f"master_weights='compact' is not for {name.removeprefix('torch:').rstrip('!')} through torch, whose "
                "operations take f32 masters; use master_weights=True"
            )
        if name.startswith("torch:") and self.reduces_state:
            raise OptionError(
                f"state_dtype is not for {name.removeprefix('torch:').rstrip('!')} through torch, whose operations "
                "take f32 state; leave it out"
            )
        return _core.Optimizer(name, rule, self)


def check_options(owner: type, given: Mapping[str, Any], call: str = "") -> Options:
    """Return the checked options; raise an error that names the remedy if one is invalid.

    Parameters
    ----------
    owner
        The optimizer's class; an unknown name raises Python's usual error for its constructor.
    given
        The options by name.
    call
        The function that takes options alone, if it is not the constructor.
    """
    known = Keywords.__annotations__ if call else inspect.signature(owner).parameters
    for name in given:
        if name not in Keywords.__annotations__:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            call = call or f"{owner.__qualname__}.__init__()"
            raise TypeError(f"{call} got an unexpected keyword argument {name!r}{hint}")
    options = resolve(**given)
    _check_columns(owner, options)
    return options


def _check_columns(owner: type, options: Options) -> None:
    """Raise if a format is given for a column that the optimizer's rule does not have."""
    known = _core.Rule(owner.rule).columns if hasattr(owner, "rule") else []
    for name, _ in options.column_formats:
        if name not in known:
            raise OptionError(
                f"invalid state_dtype: {owner.__name__} has no column {name!r}; it has {', '.join(known)}"
            )


def resolve(
    *,
    placement: str = "stream",
    chunk_bytes: int = 16 << 20,
    slots: int = 4,
    master_weights: bool | str | None = None,
    state_dtype: StateFormat | Mapping[str, StateFormat] = torch.float32,
    stochastic_rounding: bool = False,
    rounding_seed: int = 0,
    max_grad_norm: float | None = None,
    skip_nonfinite: bool = False,
    pinned_budget_bytes: int | None = None,
    resident_bytes: int | None = None,
    resident_fraction: float | None = None,
    grad_source: str = "grad",
    device: torch.device | str | None = None,
    host_fraction: float | str | None = None,
    host_threads: int | None = None,
    host_kernel: str | None = None,
    backend: str | None = None,
) -> Options:
    """Check every option; the signature has the defaults."""
    one_of("placement", placement, PLACEMENTS)
    one_of("grad_source", grad_source, GRAD_SOURCES)
    # The smallest slot holds one kernel's work on the widest state: four columns and two operands of 64 f32.
    whole("chunk_bytes", chunk_bytes, 6 * 64 * 4)
    whole("slots", slots, 2)
    if backend is not None:
        one_of("backend", backend, BACKENDS)
    one_format, by_column = _check_formats(state_dtype)
    whole("rounding_seed", rounding_seed, 0)
    if rounding_seed >= 1 << 63:
        raise OptionError(f"invalid rounding_seed: {rounding_seed}; give a whole number below 2**63")
    if not isinstance(stochastic_rounding, bool):
        raise OptionError(f"invalid stochastic_rounding: {stochastic_rounding!r}; use True or False")
    if stochastic_rounding and {one_format, *dict(by_column).values()} == {F32}:
        raise OptionError(
            "stochastic_rounding=True needs state in fewer bits, and all of it is f32; give "
            "state_dtype=torch.bfloat16 or '8bit', or leave it out"
        )
    if skip_nonfinite and max_grad_norm is None:
        raise OptionError(NO_NORM)
    if pinned_budget_bytes is not None:
        whole("pinned_budget_bytes", pinned_budget_bytes, 0)
        if placement == "resident":
            raise OptionError(
                "pinned_budget_bytes contradicts placement 'resident', which pins no state; leave one of them out"
            )
    _check_resident(placement, resident_bytes, resident_fraction)
    return Options(
        placement=placement,
        chunk_bytes=chunk_bytes,
        slots=slots,
        master_weights=COMPACT if master_weights == COMPACT else switch("master_weights", master_weights, COMPACT),
        max_grad_norm=positive("max_grad_norm", max_grad_norm, without="for no clipping"),
        skip_nonfinite=bool(skip_nonfinite),
        pinned_budget_bytes=pinned_budget_bytes,
        grad_source=grad_source,
        device=None if device is None else device_named(device),
        host_fraction=_check_host(placement, host_fraction, host_threads, host_kernel),
        host_threads=host_threads,
        host_kernel=host_kernel,
        backend=backend,
        resident_bytes=resident_bytes,
        resident_fraction=resident_fraction,
        state_format=one_format,
        column_formats=by_column,
        rounding_seed=rounding_seed if stochastic_rounding else None,
    )


def _check_formats(value: Any) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the engine's name of the format of all columns, and of those that have their own."""
    if isinstance(value, Mapping):
        for column in value:
            if not isinstance(column, str):
                raise OptionError(f"invalid state_dtype: column {column!r}; give names of columns, such as 'exp_avg'")
        return F32, tuple((name, _format(one, f" for {name}")) for name, one in value.items())
    return _format(value, ", or a dict of these by column"), ()


def _format(value: Any, more: str) -> str:
    known = {torch.float32: F32, torch.bfloat16: BF16, "8bit": BLOCKS}
    if not isinstance(value, (torch.dtype, str)) or value not in known:
        raise OptionError(f"invalid state_dtype: {value!r}; use torch.float32, torch.bfloat16 or '8bit'{more}")
    return known[value]


def _check_resident(placement: str, size: object, fraction: object) -> None:
    for name, value in (("resident_bytes", size), ("resident_fraction", fraction)):
        if value is not None and placement == "resident":
            raise OptionError(
                f"{name}={value!r} contradicts placement 'resident', which keeps all state there; leave one of them out"
            )
    if size is not None and fraction is not None:
        raise OptionError("resident_bytes and resident_fraction are two ways to say the same; give one of them")
    whole("resident_bytes", size, 0, optional=True)
    if fraction is not None:
        share("resident_fraction", fraction)


def _check_host(placement: str, fraction: object, threads: object, kernel: object) -> float | None:
    """Return the part that the host updates; None to measure the fastest part."""
    if fraction is not None and placement != "hybrid":
        raise OptionError(f"host_fraction={fraction!r} contradicts placement {placement!r}; use it with 'hybrid'")
    if placement in ("stream", "resident"):
        for name, value in (("host_threads", threads), ("host_kernel", kernel)):
            if value is not None:
                raise OptionError(f"{name}={value!r} contradicts placement {placement!r}; use 'host' or 'hybrid'")
        return 0.0
    if kernel is not None and not isinstance(kernel, str):
        raise OptionError(f"invalid host_kernel: {kernel!r}; use 'portable', 'avx2' or 'avx512'")
    cores = _core.check_host(kernel)
    # Compared here: a number may be larger than the extension can take.
    if threads is not None and whole("host_threads", threads, 1) > cores:
        raise OptionError(f"invalid host_threads: {threads}; this process may use {cores} cores; give 1 to {cores}")
    if placement == "host":
        return 1.0
    return None if fraction is None else share("host_fraction", fraction, auto=True)
