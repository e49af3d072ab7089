"""Steps that two small copies of an optimizer take, one plainly and one in units, and the comparison of the two."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forebay._tensors import is_dtensor, local, state_like
from forebay.errors import OptionError
from forebay.optim.units import trees
from forebay.optim.units.counters import Counters, bits, described
from forebay.optim.units.standins import Row, random_like, random_state, raw_step, set_random_state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.optim.units.parameters import Member


class Trial(NamedTuple):
    """One step of the small copies."""

    scale: float = 1.0
    """The size of the gradients. A limit of a norm has an effect on large ones only."""
    without: str = ""
    """Which parameters have no gradient: ``"last"`` or ``"all"``."""
    closure: bool = False
    poisoned: bool = False
    """Whether one gradient is NaN: some optimizers then skip the whole step."""


TRIALS = (
    Trial(),
    Trial(scale=1e-3, without="last"),
    Trial(scale=1e3),
    Trial(without="all"),
    Trial(closure=True),
    Trial(scale=1e-2),
    Trial(poisoned=True),
)


class Verdict(NamedTuple):
    """How an optimizer behaves."""

    skips_idle: bool = True
    """Whether it leaves parameters without a gradient as they are."""
    calls_closure: bool = True


class CoupledError(Exception):
    """A step in units is not the step on all parameters; the text names what differs."""


def run_trials(
    theirs: Any,
    chosen: Sequence[Member],
    plain: tuple[Any, list[Row]],
    in_units: tuple[Any, list[Row]],
    *,
    closures: bool,
) -> Verdict:
    """Take the steps of all trials with both copies; raise if they differ, return how the optimizer behaves.

    Parameters
    ----------
    theirs
        The optimizer's own class.
    chosen
        The parameters that were copied.
    plain, in_units
        Both copies with their parameters. The second runs in units of one parameter.
    closures
        Whether each step has a closure. Otherwise the step of one trial has.
    """
    pair = (plain, in_units)
    devices = {local(real).device for _, real in chosen}
    takes_closure = "closure" in inspect.signature(raw_step(theirs)).parameters
    verdict = Verdict()
    for number, trial in enumerate(TRIALS):
        for _, rows in pair:
            _give(rows, chosen, trial, number)
        idle = [stand_in for _, _, stand_in in plain[1] if stand_in.grad is None]
        before = [_contents(plain[0], one) for one in idle]
        calls: list[list[int]] = [[], []]
        arguments: list[tuple[Any, ...]] = [(), ()]
        if takes_closure and (trial.closure or closures):
            arguments = [(_closure(of, rows),) for of, (_, rows) in zip(calls, pair, strict=True)]
        generators = random_state(devices)
        error: Exception | None = None
        results: list[Any] = []
        try:
            results.append(raw_step(theirs)(plain[0], *arguments[0]))
        except Exception as raised:
            if not trial.poisoned:
                raise
            error = raised
        drawn = random_state(devices)
        set_random_state(generators)
        if arguments[0] and not calls[0] and error is None:
            verdict = verdict._replace(calls_closure=False)
            in_units[0]._units.verdict = verdict._replace(skips_idle=False)
        try:
            results.append(in_units[0].step(*arguments[1]))
        except OptionError:
            # It names what cannot be done in units.
            raise
        except Exception as raised:
            if error is not None:
                _compare_values(plain, in_units)
                return verdict
            raise CoupledError(f"in units it raises {type(raised).__name__}: {raised}") from raised
        if error is not None:
            raise CoupledError(f"only the step on all raises {type(error).__name__}: {error}")
        if len(calls[0]) != len(calls[1]):
            raise CoupledError(f"it calls the closure {len(calls[0])} times")
        _compare(plain, in_units)
        if described(results[0], _tensor) != described(results[1], _tensor):
            raise CoupledError("the result of the step differs")
        now = random_state(devices)
        if [described(value, _tensor) for _, value in drawn] != [described(value, _tensor) for _, value in now]:
            raise CoupledError("it draws other random numbers")
        stays = before == [_contents(plain[0], one) for one in idle]
        verdict = verdict._replace(skips_idle=verdict.skips_idle and stays)
    return verdict


def _closure(calls: list[int], rows: list[Row]) -> Callable[[], torch.Tensor]:
    """Return a closure whose gradients depend on the parameters' values when it is called."""
    gradients = [stand_in.grad for _, _, stand_in in rows]

    def closure() -> torch.Tensor:
        calls.append(1)
        with torch.no_grad():
            for (_, _, stand_in), gradient in zip(rows, gradients, strict=True):
                inner = local(stand_in).detach()
                factor = 1 + float(inner.flatten()[0].real) if inner.numel() else 1.0
                stand_in.grad = None if gradient is None else gradient * factor
        return torch.tensor(0.5)

    return closure


def _give(rows: list[Row], chosen: Sequence[Member], trial: Trial, number: int) -> None:
    """Set the gradients of one trial."""
    training = [index for index, (_, _, stand_in) in enumerate(rows) if stand_in.requires_grad]
    for index, ((_, _, stand_in), (_, real)) in enumerate(zip(rows, chosen, strict=True)):
        stand_in.grad = None
        lacks = trial.without == "all" or (trial.without == "last" and index == training[-1])
        if index not in training or lacks:
            continue
        inner = local(stand_in).detach()
        numbers = random_like(inner, 1000 * (number + 1) + index) * trial.scale
        # The last one: an optimizer that looks at all gradients before it changes anything is found out then.
        if trial.poisoned and index == training[-1]:
            numbers.fill_(float("nan"))
        stand_in.grad = _like_gradient(stand_in, real, numbers)


def _like_gradient(stand_in: torch.Tensor, real: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers as a gradient of the kind that the parameter has now, or as a usual one."""
    if is_dtensor(stand_in):
        return state_like(stand_in, numbers)
    gradient = real.grad
    if gradient is None:
        return numbers
    numbers = numbers.to(gradient.dtype)
    if gradient.layout == torch.sparse_coo:
        return numbers.to_sparse(gradient.sparse_dim())
    return numbers


def _tensor(tensor: torch.Tensor) -> Any:
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    parts = trees.parts(tensor.detach(), "")
    return [(str(part.dtype), tuple(part.shape), tuple(part.stride()), bits(part)) for part in parts]


def _contents(optimizer: Any, stand_in: torch.Tensor) -> Any:
    tree = dict.get(optimizer.state, stand_in)
    return [_tensor(stand_in), [] if not tree else described(tree, _tensor)]


def _compare(plain: tuple[Any, list[Row]], in_units: tuple[Any, list[Row]]) -> None:
    """Raise if the two copies differ."""
    in_units[0].synchronize()
    _compare_values(plain, in_units)
    for (_, real, mine), (_, _, theirs) in zip(plain[1], in_units[1], strict=True):
        what = f"of a parameter of shape {tuple(real.shape)}"
        gradients = [None if one.grad is None else _tensor(one.grad) for one in (mine, theirs)]
        if gradients[0] != gradients[1]:
            raise CoupledError(f"the gradient {what} differs")
        found = [dict.get(one.state, p) for one, p in ((plain[0], mine), (in_units[0], theirs))]
        if described(found[0], _tensor) != described(found[1], _tensor):
            raise CoupledError(f"the state {what} differs")
    numbers = [Counters(one, one.state, waits=True).now() for one, _ in (plain, in_units)]
    for name in {**numbers[0], **numbers[1]}:
        if numbers[0].get(name) != numbers[1].get(name):
            raise CoupledError(f"{name} differs")


def _compare_values(plain: tuple[Any, list[Row]], in_units: tuple[Any, list[Row]]) -> None:
    """Raise if the parameters of the two copies differ."""
    for (_, real, mine), (_, _, theirs) in zip(plain[1], in_units[1], strict=True):
        if _tensor(mine) != _tensor(theirs):
            raise CoupledError(f"the value of a parameter of shape {tuple(real.shape)} differs")
