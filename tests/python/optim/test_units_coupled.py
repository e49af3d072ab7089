"""Optimizers that couple their parameters are refused by name, and everything is as it was."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

import forebay
from support.optim import give_gradients, make, train
from support.units import SHAPES, Momentum, Plain, Twins, assert_equal, contents


class Each(Plain):
    """The base of the classes below: ``every`` is called once in a step, before the parameters are updated."""

    factor: Any = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.every(found) is not False:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self.update(group, parameter, self.state[parameter])
        return loss

    def every(self, parameters: list[torch.Tensor]) -> Any:
        """Look at all parameters."""

    def update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Update one parameter."""
        state["sum"] = state.get("sum", 0) + parameter.grad
        parameter.sub_(state["sum"], alpha=group["lr"] * float(self.factor))


class Clips(Each):
    """Clips the norm of all gradients."""

    limit: ClassVar[float] = 1.0

    def every(self, parameters: list[torch.Tensor]) -> Any:
        """Look at all parameters."""
        if parameters:
            norm = torch.stack([p.grad.norm() for p in parameters]).norm()
            self.factor = torch.clamp(self.limit / (norm + 1e-6), max=1.0)


class ClipsQuietly(Clips):
    """The same, with a limit that only large gradients reach, and no trace of it on the object."""

    limit = 1000.0

    def every(self, parameters: list[torch.Tensor]) -> Any:
        """Look at all parameters."""
        super().every(parameters)
        factor, self.factor = self.factor, 1.0
        for parameter in parameters:
            parameter.grad.mul_(factor)


class Sums(Each):
    """Sums up the norms of all gradients, for somebody who reads the sum."""

    def every(self, parameters: list[torch.Tensor]) -> Any:
        """Look at all parameters."""
        for parameter in parameters:
            self.total = getattr(self, "total", 0) + parameter.grad.norm()


class SkipsInfinite(Each):
    """Skips the step if any gradient is not finite."""

    def every(self, parameters: list[torch.Tensor]) -> Any:
        """Look at all parameters."""
        return all(bool(p.grad.isfinite().all()) for p in parameters)


class RaisesForInfinite(Each):
    """Raises if any gradient is not finite, before anything is changed."""

    def every(self, parameters: list[torch.Tensor]) -> Any:
        """Look at all parameters."""
        if not all(bool(p.grad.isfinite().all()) for p in parameters):
            raise ArithmeticError("not finite")


class WaitsForAll(Each):
    """Does nothing until every parameter has a gradient."""

    def every(self, parameters: list[torch.Tensor]) -> Any:
        """Look at all parameters."""
        return len(parameters) == sum(len(group["params"]) for group in self.param_groups)


class Numbers(Each):
    """Treats parameters by their place in the group."""

    def every(self, parameters: list[torch.Tensor]) -> Any:
        """Look at all parameters."""
        for group in self.param_groups:
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    parameter.grad.mul_(place + 1)


class Lists(Each):
    """Has rates for each place in a list of the group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.param_groups[0]["rates"] = [0.1 * (i + 1) for i in range(len(self.param_groups[0]["params"]))]

    def every(self, parameters: list[torch.Tensor]) -> Any:
        """Look at all parameters."""
        group = self.param_groups[0]
        for rate, parameter in zip(group["rates"], group["params"], strict=False):
            if parameter.grad is not None:
                parameter.grad.mul_(rate)


class Shares(Each):
    """All parameters have one tensor of state together."""

    def every(self, parameters: list[torch.Tensor]) -> Any:
        """Look at all parameters."""
        if parameters and not hasattr(self, "common"):
            self.common = torch.zeros((), device=parameters[0].device)
        for parameter in parameters:
            self.state[parameter]["common"] = self.common

    def update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Update one parameter."""
        state["common"].add_(parameter.grad.sum())
        parameter.sub_(parameter.grad * state["common"], alpha=1e-3)


class Remembers(Each):
    """Has state of its parameters in an attribute."""

    def every(self, parameters: list[torch.Tensor]) -> Any:
        """Look at all parameters."""
        if not hasattr(self, "means"):
            self.means: dict[torch.Tensor, torch.Tensor] = {}
        for parameter in parameters:
            self.means[parameter] = self.means.get(parameter, 0) + parameter.grad


class Perturbs(Each):
    """Computes gradients again at other values, as sharpness-aware minimization does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        if closure is None:
            return super().step()
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter in parameters:
            parameter.add_(1.0)
        with torch.enable_grad():
            loss = closure()
        for parameter in parameters:
            parameter.sub_(1.0)
        super().step()
        return loss


class ClosesTwice(Each):
    """Calls the closure twice."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        super().step(closure)
        return super().step(closure)


class Replaces(Each):
    """Puts another dict in the place of its state."""

    def every(self, parameters: list[torch.Tensor]) -> Any:
        """Look at all parameters."""
        self.state = type(self.state)(dict, self.state)


class Regroups(Each):
    """Puts other lists into its groups."""

    def every(self, parameters: list[torch.Tensor]) -> Any:
        """Look at all parameters."""
        for group in self.param_groups:
            group["params"] = list(group["params"])


class Mixes(Each):
    """Draws one random number in each step, for all parameters."""

    def every(self, parameters: list[torch.Tensor]) -> Any:
        """Look at all parameters."""
        factor = float(torch.rand(()))
        for parameter in parameters:
            parameter.grad.mul_(factor)


class Wraps(Each):
    """Has another optimizer inside."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.inner = torch.optim.NAdam(self.param_groups)


class Locked(Each):
    """Has an attribute that cannot be copied."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.generator = (i for i in range(3))


COUPLED: list[tuple[Any, str]] = [
    (Clips, "factor depends on the parameters that a step of .*Clips is given"),
    (ClipsQuietly, "the value of a parameter of shape .* differs"),
    (Sums, "total depends on the parameters that a step of .*Sums is given"),
    (SkipsInfinite, "differs"),
    (RaisesForInfinite, "the value of a parameter of shape .* differs"),
    (WaitsForAll, "the value of a parameter of shape .* differs"),
    (Numbers, "the value of a parameter of shape .* differs"),
    (Lists, "differs"),
    (Shares, "Shares|common"),
    (Remembers, "the attribute means"),
    (Perturbs, "the value of a parameter of shape .* differs"),
    (ClosesTwice, "it calls the closure 2 times"),
    (Replaces, "Replaces replaces its state dict inside of its step"),
    (Regroups, "Regroups replaces its groups inside of its step"),
    (Mixes, "differs|random"),
    (Wraps, "Wraps has another optimizer in inner; offload that one"),
    (Locked, "its attribute generator cannot be copied"),
    (lambda p: torch.optim.LBFGS(p, max_iter=3), "LBFGS"),
]
IDS = [getattr(build, "__name__", "LBFGS").replace("<lambda>", "LBFGS") for build, _ in COUPLED]


@pytest.mark.parametrize(("build", "message"), COUPLED, ids=IDS)
def test_coupled_parameters_are_refused_by_name(device: torch.device, build: Any, message: str) -> None:
    parameters = make(SHAPES, device=device)
    optimizer = build(parameters)
    attributes, cls = dict(vars(optimizer)), type(optimizer)
    before, generators = contents(optimizer, parameters), torch.get_rng_state()
    with pytest.raises(forebay.OptionError, match=message):
        forebay.offload(optimizer)
    assert type(optimizer) is cls
    assert vars(optimizer).keys() == attributes.keys()
    assert all(vars(optimizer)[name] is value for name, value in attributes.items())
    assert_equal(contents(optimizer, parameters), before)
    assert torch.equal(torch.get_rng_state(), generators)


def test_the_small_copies_leave_nothing_behind(device: torch.device) -> None:
    parameters = make(SHAPES, device=device)
    optimizer = Momentum(parameters)
    optimizer.log = []
    optimizer.register_step_pre_hook(lambda *_: optimizer.log.append("hook"))
    give_gradients(parameters, 3)
    gradients = [parameter.grad for parameter in parameters]
    before, generators = contents(optimizer, parameters), torch.get_rng_state()
    forebay.offload(optimizer, unit_bytes=1)
    assert_equal(contents(optimizer, parameters), before)
    assert optimizer.log == []
    assert all(parameter.grad is gradient for parameter, gradient in zip(parameters, gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), generators)


class Turns(Momentum):
    """Couples its parameters only if an option says so."""

    def __init__(self, params: Any, coupled: bool = False) -> None:
        super().__init__(params, coupled=coupled)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        if self.param_groups[0]["coupled"]:
            found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            for parameter in found:
                parameter.grad.div_(len(found))
        return super().step(closure)


def test_an_option_that_is_switched_on_later_is_tried_out_then(device: torch.device) -> None:
    twins = Twins(Turns, make(SHAPES, device=device))
    twins.step(2)
    twins.optimizer.param_groups[0]["coupled"] = True
    give_gradients(twins.parameters, 2)
    before = contents(twins.optimizer, twins.parameters)
    with pytest.raises(forebay.OptionError, match=r"or make it so with forebay\.restore"):
        twins.optimizer.step()
    assert_equal(contents(twins.optimizer, twins.parameters), before)
    forebay.restore(twins.optimizer)
    twins.plain.param_groups[0]["coupled"] = True
    twins.step(range(2, 4))
    twins.check()


class Chooses(Momentum):
    """Computes several parameters in another way than a single one, unless ``foreach`` is False."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, foreach=None)

    def update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Update one parameter."""
        if group["foreach"] is not False and sum(p.grad is not None for p in group["params"]) > 1:
            parameter.grad.mul_(1.5)
        super().update(group, parameter, state)


def test_a_choice_by_all_parameters_is_refused_with_its_remedy(device: torch.device) -> None:
    parameters = make(SHAPES, device=device)
    with pytest.raises(forebay.OptionError, match=r"differs; set foreach=False in its groups"):
        forebay.offload(Chooses(parameters))

    def build(of: Any) -> Any:
        optimizer = Chooses(of)
        optimizer.param_groups[0]["foreach"] = False
        return optimizer

    twins = Twins(build, parameters)
    twins.step(3)
    twins.check()


class Large(Momentum):
    """Treats matrices and vectors in different ways, and couples matrices."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None and p.dim() == 2]
        for parameter in found:
            parameter.grad.div_(len(found))
        return super().step(closure)


def test_new_kinds_of_parameters_are_tried_out(device: torch.device) -> None:
    parameters = make([(5,), (7,), (9,)], device=device)
    optimizer = forebay.offload(Large(parameters), unit_bytes=1)
    train(optimizer, parameters, 1)
    more = make([(5, 4), (7, 3)], device=device)
    optimizer.add_param_group({"params": more})
    give_gradients([*parameters, *more], 1)
    with pytest.raises(forebay.OptionError, match=r"a parameter of shape \(5, 4\) differs"):
        optimizer.step()
