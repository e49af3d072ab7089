"""The options that every optimizer takes in addition to those of torch's class, and their checks."""

from __future__ import annotations

import difflib
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

import torch

from forebay import _core
from forebay._checks import one_of, positive, share, switch, whole
from forebay._device import BACKENDS, device_named, with_backend
from forebay.errors import OptionError
from forebay.optim.compact import COMPACT, F32

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    state_dtype: torch.dtype
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
    return resolve(**given)


def resolve(
    *,
    placement: str = "stream",
    chunk_bytes: int = 16 << 20,
    slots: int = 4,
    master_weights: bool | str | None = None,
    state_dtype: torch.dtype = torch.float32,
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
    if state_dtype != torch.float32:
        raise OptionError(f"invalid state_dtype: {state_dtype}; state is kept in torch.float32")
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
    )


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
