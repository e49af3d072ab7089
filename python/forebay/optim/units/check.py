"""Whether an optimizer's step on some of its parameters is the step on all, tried out on small copies.

An optimizer may couple its parameters: by a norm over all gradients, by a count of all parameters, by a line search.
Its step still runs if it is given only some of the parameters, and computes something else. So before the first use two
small copies of the optimizer take the same steps, one plainly and one in units of one parameter, and everything is
compared bit for bit: parameters, gradients, state, groups, attributes, results and random numbers.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from forebay._tensors import local
from forebay.errors import OptionError
from forebay.optim.units.standins import Row, constructed, copy_of, small_copy, small_state, two_of_each, undisturbed
from forebay.optim.units.trials import CoupledError, Verdict, run_trials

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from forebay.optim.units.parameters import Member


class UntriedError(Exception):
    """The optimizer's own step raised on small copies of its parameters; the cause is what it raised."""


def check(
    optimizer: torch.optim.Optimizer,
    theirs: Any,
    members: Sequence[Member],
    in_units: Callable[[Any], None],
) -> Verdict:
    """Raise if an optimizer cannot run in units; return how it behaves.

    Raises an ``UntriedError`` if the optimizer's own step raises.

    Parameters
    ----------
    optimizer
        The optimizer.
    theirs
        Its own class.
    members
        Its parameters.
    in_units
        Makes a small copy run in units.
    """
    chosen = two_of_each(members, optimizer.state)
    failure: Exception | None = None
    name = theirs.__qualname__
    attempts = [(make, closures) for closures in (False, True) for make in (_with_state, _without_state, _constructed)]

    def attempt(make: Any, *, closures: bool, one_by_one: bool = False) -> Verdict:
        with undisturbed({local(real).device for _, real in chosen}):
            plain, other = (make(optimizer, theirs, chosen) for _ in range(2))
            if one_by_one:
                for group in [*plain[0].param_groups, *other[0].param_groups]:
                    group["foreach"] = False
            in_units(other[0])
            return run_trials(theirs, chosen, plain, other, closures=closures)

    def remedy(make: Any, *, closures: bool) -> str:
        if any(group.get("foreach", False) is not False for group in optimizer.param_groups):
            # Torch may choose between implementations by all parameters of a step, and their bits differ.
            with suppress(Exception):
                attempt(make, closures=closures, one_by_one=True)
                return "set foreach=False in its groups: each parameter is then updated without a look at the others"
        return "keep it as it is, or make it so with forebay.restore"

    for make, closures in attempts:
        try:
            return attempt(make, closures=closures)
        except CoupledError as error:
            raise OptionError(
                f"{name} cannot run in units: on small copies of its parameters, a step on one after the other is not "
                f"the step on all of them; {error}; {remedy(make, closures=closures)}"
            ) from None
        except OptionError:
            raise
        except Exception as error:
            failure = failure or error
    assert failure is not None
    raise UntriedError(str(failure)) from failure


def _rows(chosen: Sequence[Member]) -> list[Row]:
    return [(group, real, small_copy(real, index)) for index, (group, real) in enumerate(chosen)]


def _with_state(optimizer: torch.optim.Optimizer, theirs: Any, chosen: Sequence[Member]) -> tuple[Any, list[Row]]:
    rows = _rows(chosen)
    held = {stand_in: dict.get(optimizer.state, real) for _, real, stand_in in rows}
    state = {stand_in: small_state(held[stand_in], real) for _, real, stand_in in rows if held[stand_in] is not None}
    return copy_of(optimizer, theirs, rows, state=state), rows


def _without_state(optimizer: torch.optim.Optimizer, theirs: Any, chosen: Sequence[Member]) -> tuple[Any, list[Row]]:
    rows = _rows(chosen)
    return copy_of(optimizer, theirs, rows, state={}), rows


def _constructed(optimizer: torch.optim.Optimizer, theirs: Any, chosen: Sequence[Member]) -> tuple[Any, list[Row]]:
    rows = _rows(chosen)
    return constructed(optimizer, theirs, rows), rows
