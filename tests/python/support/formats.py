"""The formats of state once more, with torch's operations: what a value becomes when it is kept in fewer bits."""

from __future__ import annotations

from typing import Any

import torch

from forebay._tensors import dense_strides, local

BF16, BLOCKS = torch.bfloat16, "8bit"
BLOCK = 256
"""Elements that share a scale."""

MASK = (1 << 64) - 1


def steps(ranges: list[tuple[int, int, int]]) -> torch.Tensor:
    """Return the shares that codes stand for: zero, so many for each halving between two powers of two, and one."""
    found = [0.0]
    for first, end, parts in ranges:
        found += [2.0**power * (1 + part / parts) for power in range(first, end) for part in range(parts)]
    return torch.tensor([*found, 1.0])


UNSIGNED = steps([(-25, -18, 2), (-18, -12, 8), (-12, 0, 16)])
SIGNED = steps([(-23, -18, 2), (-18, -11, 4), (-11, 0, 8)])


def random_key(seed: int, step: int, column: int, parameter: int) -> int:
    """Return the key of the random numbers of one column of one parameter at one step."""
    state = 0
    for number in (seed, step, column, parameter):
        x = ((state ^ number) + 0x9E3779B97F4A7C15) & MASK
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
        state = x ^ x >> 31
    return state >> 32


def random_bits(key: int, elements: int) -> torch.Tensor:
    """Return 32 random bits for each element, as int64."""
    low = (1 << 32) - 1

    def times(x: torch.Tensor, factor: int) -> torch.Tensor:
        # In two halves: the product of 32 bits each may not fit 64 with a sign.
        return (x * (factor & 0xFFFF) + ((x * (factor >> 16) & 0xFFFF) << 16)) & low

    x = torch.arange(elements) ^ key
    x = times(x ^ x >> 16, 0x7FEB352D)
    x = times((x ^ x >> 15) + key & low, 0x846CA68B)
    return x ^ x >> 16


def rounded(values: torch.Tensor, kept_as: Any, *, signed: bool, key: int | None = None) -> torch.Tensor:
    """Return flat f32 values as they are after they were kept in a format; with a key, rounded at random."""
    random = None if key is None else random_bits(key, values.numel())
    if kept_as == torch.float32 or not values.numel():
        return values.clone()
    if kept_as == BF16:
        if random is None:
            return values.to(BF16).float()
        bits = values.view(torch.int32).long() + (random >> 16)
        return (bits >> 16 << 16).to(torch.int32).view(torch.float32)
    found = torch.empty_like(values)
    for start in range(0, values.numel(), BLOCK):
        here = slice(start, start + BLOCK)
        found[here] = _block(values[here], signed, None if random is None else random[here])
    return found


def _block(values: torch.Tensor, signed: bool, random: torch.Tensor | None) -> torch.Tensor:
    shares = SIGNED if signed else UNSIGNED
    scale = values.abs().max()
    if scale < torch.finfo(torch.float32).tiny:
        return torch.copysign(torch.zeros_like(values), values)
    share = (values.abs() * (1 / scale)).clamp(max=1)
    code = (torch.searchsorted(shares, share, right=True) - 1).clamp(max=len(shares) - 2)
    # Codes are as far apart as the bits of their shares; below the first one they go on as far as one more.
    edges = shares.clone()
    edges[0] = 0.75 * shares[1]
    cut, width = (_bits(of) - _bits(edges[code]) for of in (share, edges[code + 1]))
    is_up = 2 * cut >= width if random is None else cut + (random * width >> 32) >= width
    code += is_up
    if not signed:
        code = torch.where(values > 0, code.clamp(min=1), code)
    return torch.copysign(shares[code] * scale, values)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32).long()


def kept(parameter: torch.Tensor, value: torch.Tensor, kept_as: Any, *, signed: bool, key: int | None = None) -> Any:
    """Return the state of a parameter as it is after it was kept in a format."""
    inner = local(parameter)
    strides = dense_strides(inner)
    flat = torch.empty(inner.numel())
    torch.as_strided(flat, inner.shape, strides).copy_(local(value).detach().cpu())
    new = rounded(flat, kept_as, signed=signed, key=key)
    return torch.as_strided(new, inner.shape, strides).to(value.device)


def format_for(kept_as: Any, elements: int) -> Any:
    """Return the format of a parameter of this many elements: one without a whole block keeps f32."""
    return torch.float32 if kept_as == BLOCKS and elements < BLOCK else kept_as


class Twin:
    """An optimizer with f32 state that is rounded after each step, as a format would: what another one has to equal.

    Parameters
    ----------
    optimizer
        An optimizer of forebay with f32 state.
    formats
        The format of each column.
    seed
        The seed of the random numbers; None to round to nearest.
    """

    SIGNED = ("exp_avg", "momentum_buffer")

    def __init__(self, optimizer: Any, formats: dict[str, Any], seed: int | None = None) -> None:
        self.optimizer, self.formats, self.seed = optimizer, formats, seed
        self._steps: dict[int, int] = {}

    def step(self) -> None:
        """Take a step, and round the state of what it has updated."""
        self.optimizer.step()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        columns = self.optimizer._rule.columns
        for place, parameter in enumerate(parameters):
            if parameter.grad is None:
                continue
            self._steps[place] = step = self._steps.get(place, 0) + 1
            state = self.optimizer.state[parameter]
            for number, name in enumerate(columns):
                if name not in state:
                    continue
                key = None if self.seed is None else random_key(self.seed, step, number, place)
                kept_as = format_for(self.formats[name], local(parameter).numel())
                state[name] = kept(parameter, state[name], kept_as, signed=name in self.SIGNED, key=key)
