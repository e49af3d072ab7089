"""The options of ``forebay.AdamW``, checked together when they are given."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from forebay import _core
from forebay.errors import OptionError

PLACEMENTS = ("stream", "resident", "host", "hybrid")


@dataclass(frozen=True)
class Options:
    """What the user asked for, beyond what ``torch.optim.AdamW`` knows."""

    placement: str
    chunk_bytes: int
    slots: int
    master_weights: bool | None
    max_grad_norm: float | None
    skip_nonfinite: bool
    pinned_budget_bytes: int | None
    device: torch.device | None
    # The part of the state that the host updates; None to find the part that makes both ends finish together.
    host_fraction: float | None = 0.0
    host_threads: int | None = None
    host_kernel: str | None = None

    @property
    def streams(self) -> bool:
        """Whether state goes through the ring on the device."""
        return self.placement != "resident" and self.host_fraction != 1.0

    @property
    def updates_on_host(self) -> bool:
        """Whether the host updates any of it."""
        return self.host_fraction != 0.0

    def keeps_master(self, dtype: torch.dtype) -> bool:
        """Whether parameters of this type have a master."""
        if dtype == torch.float32:
            return False
        return self.master_weights is not False


def _whole(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"invalid {name}: {value!r}; give a whole number of at least {least}")
    return value


def check_numbers(**numbers: Any) -> dict[str, Any]:
    """Let torch's own class check the numbers of a group; return the keys that a group has in this version of torch."""
    try:
        return dict(torch.optim.AdamW([torch.zeros(1)], **numbers).defaults)
    except ValueError as error:
        raise OptionError(str(error)) from error


def check_options(
    *,
    placement: str,
    chunk_bytes: int,
    slots: int,
    master_weights: bool | None,
    state_dtype: torch.dtype,
    max_grad_norm: float | None,
    skip_nonfinite: bool,
    pinned_budget_bytes: int | None,
    device: torch.device | str | None,
    host_fraction: float | str | None = None,
    host_threads: int | None = None,
    host_kernel: str | None = None,
) -> Options:
    """Refuse what cannot work, naming the option and the remedy."""
    if placement not in PLACEMENTS:
        raise OptionError(f"invalid placement: {placement!r}; use one of {PLACEMENTS}")
    # One kernel's worth of the widest state: four kinds and two operands of 64 f32.
    _whole("chunk_bytes", chunk_bytes, 6 * 64 * 4)
    _whole("slots", slots, 2)
    if master_weights not in (None, True, False):
        raise OptionError(f"invalid master_weights: {master_weights!r}; use True, False or None")
    if state_dtype != torch.float32:
        raise OptionError(f"invalid state_dtype: {state_dtype}; state is kept in torch.float32")
    if max_grad_norm is not None and not (
        isinstance(max_grad_norm, (int, float)) and max_grad_norm > 0 and not math.isnan(max_grad_norm)
    ):
        raise OptionError(f"invalid max_grad_norm: {max_grad_norm!r}; give a positive number, or None for no clipping")
    if skip_nonfinite and max_grad_norm is None:
        raise OptionError("skip_nonfinite needs max_grad_norm: without it no norm is computed")
    if pinned_budget_bytes is not None:
        _whole("pinned_budget_bytes", pinned_budget_bytes, 0)
        if placement == "resident":
            raise OptionError("pinned_budget_bytes contradicts placement 'resident', which pins no state")
    fraction = _check_host(placement, host_fraction, host_threads, host_kernel)
    try:
        where = None if device is None else torch.device(device)
    except RuntimeError as error:
        raise OptionError(f"invalid device: {device!r}; use 'cpu', 'cuda' or 'cuda:N'") from error
    if where is not None and where.type not in ("cpu", "cuda"):
        raise OptionError(f"invalid device: {device!r}; use 'cpu', 'cuda' or 'cuda:N'")
    if where is not None and where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return Options(
        placement=placement,
        chunk_bytes=chunk_bytes,
        slots=slots,
        master_weights=master_weights,
        max_grad_norm=max_grad_norm,
        skip_nonfinite=bool(skip_nonfinite),
        pinned_budget_bytes=pinned_budget_bytes,
        device=where,
        host_fraction=fraction,
        host_threads=host_threads,
        host_kernel=host_kernel,
    )


def _check_host(placement: str, fraction: object, threads: object, kernel: object) -> float | None:
    """Return the part that the host updates, None to find it."""
    if fraction is not None and placement != "hybrid":
        raise OptionError(f"host_fraction={fraction!r} contradicts placement {placement!r}; it belongs to 'hybrid'")
    if placement in ("stream", "resident"):
        for name, value in (("host_threads", threads), ("host_kernel", kernel)):
            if value is not None:
                raise OptionError(f"{name}={value!r} contradicts placement {placement!r}; use 'host' or 'hybrid'")
        return 0.0
    if kernel is not None and not isinstance(kernel, str):
        raise OptionError(f"invalid host_kernel: {kernel!r}; use 'portable', 'avx2' or 'avx512'")
    cores = _core.check_host(kernel)
    # Compared here: a number may be larger than the extension can take.
    if threads is not None and _whole("host_threads", threads, 1) > cores:
        raise OptionError(f"invalid host_threads: {threads}; this process may use {cores} cores; give 1 to {cores}")
    if placement == "host":
        return 1.0
    if fraction is None or fraction == "auto":
        return None
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0.0 <= fraction <= 1.0:
        raise OptionError(f"invalid host_fraction: {fraction!r}; give a number from 0.0 to 1.0, or 'auto'")
    return float(fraction)
