"""What the tests of units share: optimizers that forebay does not know, and the comparison of two runs of one."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import forebay
from support.optim import clone, give_gradients
from support.tensors import same_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SHAPES = ((33, 7), (5,), (16, 24), (24, 16), (3, 2, 4), (1,))
SIZES = (1, 3000, None)
"""One parameter in each unit, some, and all in one."""


class Plain(torch.optim.Optimizer):
    """The base of the look-alikes: ``update`` is called for each parameter with a gradient."""

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(group, parameter, self.state[parameter])
        return loss

    def update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Update one parameter."""
        raise NotImplementedError


class Momentum(Plain):
    """One tensor of state, changed in place."""

    def update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Update one parameter."""
        if "mean" not in state:
            state["mean"] = torch.zeros_like(parameter)
        state["mean"].mul_(0.9).add_(parameter.grad)
        parameter.sub_(state["mean"], alpha=group["lr"])


class Rebinding(Plain):
    """State that is a new tensor after each step."""

    def update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Update one parameter."""
        state["mean"] = state.get("mean", torch.zeros_like(parameter)) * 0.9 + parameter.grad
        parameter.sub_(state["mean"], alpha=group["lr"])


class Swapping(Plain):
    """Two tensors that change places in each step, and one that is a view of another."""

    def update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Update one parameter."""
        if not state:
            state["now"], state["last"] = torch.zeros_like(parameter), torch.ones_like(parameter)
            state["pool"] = torch.zeros(parameter.numel() + 3, device=parameter.device)
            state["view"] = state["pool"][3:].view(parameter.shape)
        state["now"], state["last"] = state["last"], state["now"]
        state["now"].mul_(0.5).add_(parameter.grad)
        state["view"].add_(state["last"])
        state["pool"].mul_(0.9)
        parameter.sub_(state["now"] + state["last"] + state["view"], alpha=group["lr"])


class Pair(NamedTuple):
    """A tuple with names."""

    first: torch.Tensor
    second: torch.Tensor


class Nested(Plain):
    """State of every kind: lists that grow, dicts, tuples, numbers, and tensors of other shapes and types."""

    def update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Update one parameter."""
        gradient = parameter.grad
        if not state:
            state["step"], state["word"] = 0, "text"
            state["history"] = []
            state["recent"] = deque(maxlen=2)
            state["factors"] = {"rows": [gradient.new_zeros(s) for s in gradient.shape], "count": torch.tensor(0)}
            state["pair"] = Pair(torch.zeros_like(parameter), torch.zeros((), dtype=torch.float64))
            state["flags"] = (torch.zeros(parameter.shape, dtype=torch.bool), 3)
            state["spread"] = gradient.new_zeros(()).expand(4, 5)
        state["step"] += 1
        state["history"].append(gradient.clone())
        if len(state["history"]) > 3:
            state["history"].pop(0)
        state["recent"].append(gradient.mean())
        for i, rows in enumerate(state["factors"]["rows"]):
            rows.add_(gradient.sum(dim=[j for j in range(gradient.dim()) if j != i]))
        state["factors"]["count"] += 1
        state["pair"] = Pair(state["pair"].first + gradient, state["pair"].second + 1)
        state["flags"] = (gradient > 0, state["flags"][1] + 1)
        scale = sum(one.sum() for one in state["recent"]) + state["factors"]["rows"][0].sum() + state["pair"].second
        parameter.sub_(
            sum(state["history"]) * state["flags"][0] + state["pair"].first * scale * 1e-3, alpha=group["lr"]
        )


class Listed(Plain):
    """Nested state of the kinds that torch can load and checkpoints can hold."""

    def update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Update one parameter."""
        gradient = parameter.grad
        if not state:
            state["step"] = 0
            state["history"] = []
            state["factors"] = {"rows": [gradient.new_zeros(s) for s in gradient.shape], "count": torch.tensor(0.0)}
            state["pair"] = [torch.zeros_like(parameter), 3]
        state["step"] += 1
        state["history"] = [*state["history"][-2:], gradient.clone()]
        for i, rows in enumerate(state["factors"]["rows"]):
            rows.add_(gradient.sum(dim=[j for j in range(gradient.dim()) if j != i]))
        state["factors"]["count"] += 1
        state["pair"] = [state["pair"][0] + gradient, state["pair"][1] + 1]
        scale = state["factors"]["count"] + state["factors"]["rows"][0].sum() + state["step"]
        parameter.sub_(sum(state["history"]) + state["pair"][0] * scale * 1e-3, alpha=group["lr"])


class ScheduleFree(Plain):
    """Counters in groups, and a switch between training and evaluation, as in the package schedulefree."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, lr, beta=beta, k=0, weight_sum=0.0, train_mode=False)

    def train(self) -> None:
        """Prepare for steps."""
        self._switch(True, lambda beta: 1 - beta)

    def eval(self) -> None:
        """Prepare for evaluation."""
        self._switch(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def _switch(self, training: bool, weight: Callable[[float], float]) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not training:
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"].to(parameter.device), weight(group["beta"]))
                group["train_mode"] = training

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("call train() before step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["scheduled_lr"] = group["lr"] * min(1.0, (group["k"] + 1) / 3)
            group["weight_sum"] += group["scheduled_lr"] ** 2
            weight = group["scheduled_lr"] ** 2 / group["weight_sum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "z" not in state:
                    state["z"] = parameter.clone()
                parameter.lerp_(state["z"], weight)
                parameter.add_(parameter.grad, alpha=group["scheduled_lr"] * (group["beta"] * (1 - weight) - 1))
                state["z"].sub_(parameter.grad, alpha=group["scheduled_lr"])
            group["k"] += 1
        return loss


class Counting(Momentum):
    """Counters on the object: a number, a list, a dict, a tensor, and attributes that appear in a step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.count, self.trail, self.table = 0, [0], {"steps": 0}
        self.clock = torch.zeros(())
        self.numbers = {"nested": [1, 2]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient, and count."""
        self.count += 1
        self.trail.append(self.count)
        self.table["steps"] += 1
        self.clock.add_(1)
        self.late = getattr(self, "late", 0) + 2
        self.numbers["nested"][0] *= 2
        self.state["all"] = {"steps": self.count}
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
        return super().step(closure)

    def update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Update one parameter."""
        super().update(group, parameter, state)
        parameter.add_(float(self.clock) * 1e-3 + self.count * 1e-4 + self.late * 1e-5 + len(self.trail) * 1e-5)


class Idle(Momentum):
    """Parameters without a gradient move on with their momentum. A closure is not called."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Update every parameter."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if parameter.grad is not None:
                    self.update(group, parameter, state)
                elif "mean" in state:
                    state["mean"].mul_(0.9)
                    parameter.sub_(state["mean"], alpha=group["lr"])


class Noisy(Momentum):
    """Random numbers for each parameter, in order."""

    def update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Update one parameter."""
        super().update(group, parameter, state)
        parameter.add_(torch.randn(parameter.shape, device=parameter.device), alpha=0.01)


KNOWN_NOT = (Momentum, Rebinding, Swapping, Nested, Listed, Counting, Idle, Noisy)
"""Classes that forebay does not know, and that can run in units."""


def described(value: Any) -> Any:
    """Return a value such that two are equal if they are so bit for bit."""
    if isinstance(value, torch.Tensor):
        return Same(value.detach().clone())
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [type(value).__name__, *(described(item) for item in value)]
    return repr(value)


class Same:
    """A tensor that is equal to another with the same bits, type, shape and strides."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Same)
            and same_bits(self.tensor, other.tensor)
            and self.tensor.stride() == other.tensor.stride()
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Same({self.tensor})"


def contents(optimizer: Any, parameters: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return copies of everything that a step may change."""
    hidden = ("state", "param_groups", "defaults", "step")
    attributes = {k: v for k, v in vars(optimizer).items() if k not in hidden and not k.startswith("_")}
    return {
        "parameters": [described(parameter) for parameter in parameters],
        "state": [described(optimizer.state.get(parameter, {})) for parameter in parameters],
        "others": {key: described(value) for key, value in optimizer.state.items() if isinstance(key, str)},
        "groups": [{k: described(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "attributes": {key: described(value) for key, value in attributes.items()},
    }


def assert_equal(mine: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that two contents are equal, part by part."""
    for part, values in expected.items():
        assert mine[part] == values, f"{part} differ"


def random_state(device: torch.device) -> list[torch.Tensor]:
    """Return the state of torch's generators of random numbers: on the CPU, and on this device."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_random_state(device: torch.device, state: list[torch.Tensor]) -> None:
    """Set the generators to a state of ``random_state``."""
    torch.set_rng_state(state[0])
    for of_device in state[1:]:
        torch.cuda.set_rng_state(of_device, device)


class Twins:
    """The same optimizer twice: one runs plainly, the other in units."""

    def __init__(
        self,
        build: Callable[[list[torch.nn.Parameter]], Any],
        parameters: Sequence[torch.Tensor],
        unit_bytes: int | None = 1,
        **options: Any,
    ) -> None:
        self.plain_parameters, self.parameters = clone(parameters), clone(parameters)
        self.plain, self.optimizer = build(self.plain_parameters), build(self.parameters)
        assert forebay.offload(self.optimizer, unit_bytes=unit_bytes, **options) is self.optimizer

    def step(self, steps: int | range = 1, *, without: Sequence[int] = (), closure: bool = False) -> None:
        """Take the same steps with both; the parameters at the places ``without`` have no gradient."""
        device = self.parameters[0].device
        for number in range(steps) if isinstance(steps, int) else steps:
            generators, drawn = random_state(device), []
            for optimizer, parameters in ((self.plain, self.plain_parameters), (self.optimizer, self.parameters)):
                set_random_state(device, generators)
                give_gradients(parameters, number)
                for place in without:
                    parameters[place].grad = None
                found = optimizer.step(*[lambda: torch.tensor(2.5)] * closure)
                assert found == (2.5 if closure and not isinstance(optimizer, Idle) else None)
                drawn.append(random_state(device))
            assert all(map(torch.equal, *drawn)), "other random numbers were drawn"

    def check(self) -> None:
        """Assert that both are equal, bit for bit."""
        assert_equal(contents(self.optimizer, self.parameters), contents(self.plain, self.plain_parameters))
