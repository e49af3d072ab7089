"""Parameters on the host travel through the ring with their state, and come to the same bits.

``forebay.AdamW`` does this where it computes on a GPU and parameters are on the CPU, as with FSDP2's
``CPUOffloadPolicy``. The CPU backend lets the engine be told so too, which tests it on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import forebay
from forebay import _core
from forebay._tensors import look
from forebay.optim.options import check_options

PLAIN = [[1e-2, 0.9, 0.999, 1e-8, 0.1, False, False], [3e-3, 0.8, 0.95, 1e-6, 0.0, True, False]]
GROUPS = [*PLAIN, *([*numbers[:-1], True] for numbers in PLAIN)]
"""The numbers of groups: first without amsgrad, then with it."""
OPTIONS = check_options(forebay.AdamW, {"slots": 2, "chunk_bytes": 6144})
STEPS = 4


@dataclass
class Spec:
    """One parameter: its size, types, whether it has amsgrad, and which of the two kinds of numbers."""

    elements: int
    dtype: torch.dtype
    grad_dtype: torch.dtype
    amsgrad: bool = False
    kind: int = 0

    @property
    def group(self) -> int:
        """Its group, one of those with amsgrad where it has that."""
        return self.kind + len(PLAIN) * self.amsgrad


SPECS = [
    Spec(1, torch.float32, torch.float32),
    Spec(5000, torch.float32, torch.float32, kind=1),  # several chunks by itself
    Spec(0, torch.float32, torch.float32),
    Spec(777, torch.float32, torch.bfloat16),
    Spec(2049, torch.bfloat16, torch.bfloat16),
    Spec(63, torch.bfloat16, torch.float32, amsgrad=True),
    Spec(130, torch.float16, torch.float16, amsgrad=True, kind=1),
    Spec(4097, torch.float32, torch.float32, amsgrad=True),
]
WITHOUT_GRADIENT = 3
"""This one has no gradient in the second step."""


def train(on_host: list[bool], scale: float | None) -> tuple[list[torch.Tensor], dict[tuple[int, str], torch.Tensor]]:
    """Return the parameters and all state after a few steps."""
    generator = torch.Generator().manual_seed(3)
    parameters = [torch.randn(spec.elements, generator=generator).to(spec.dtype) for spec in SPECS]
    engine = _core.Optimizer("cpu", "adamw", OPTIONS)
    engine.open_ring(0, None, 0)
    tensors = [
        (f"parameter {i}", spec.elements, spec.group, "" if spec.dtype == torch.float32 else "f32", is_there, i)
        for i, (spec, is_there) in enumerate(zip(SPECS, on_host, strict=True))
    ]
    table = engine.add(tensors, GROUPS)
    coefficient = None if scale is None else torch.tensor(scale)
    for step in range(STEPS):
        gradients = [torch.randn(spec.elements, generator=generator).to(spec.grad_dtype) for spec in SPECS]
        before = [parameter.clone() for parameter in parameters]
        found = [look(parameters), look(gradients)]
        if step == 1:
            here = [(i, i) for i in range(len(SPECS)) if i != WITHOUT_GRADIENT]
            found = [looked.spread(here, len(SPECS)) for looked in found]
        engine.step(
            [(*found, [spec.group for spec in SPECS])], GROUPS, 0, 0 if coefficient is None else coefficient.data_ptr()
        )
        # Nothing is waited for here: parameters on the host are final when the step returns.
        for i, (parameter, old) in enumerate(zip(parameters, before, strict=True)):
            assert torch.equal(parameter, old) == ((step, i) == (1, WITHOUT_GRADIENT) or parameter.numel() == 0), i
    engine.synchronize()
    state = {}
    for i in range(len(SPECS)):
        for kind in ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param"):
            view = engine.view(table, i, kind)
            if view is not None and len(view):
                state[i, kind] = torch.frombuffer(view, dtype=torch.float32).clone()
    engine.close()
    return parameters, state


@pytest.mark.parametrize("scale", [None, 0.37])
@pytest.mark.parametrize("on_host", ["all", "some"])
def test_parameters_on_the_host_end_with_the_same_bits(on_host, scale):
    placed = [True] * len(SPECS) if on_host == "all" else [i % 2 == 1 for i in range(len(SPECS))]
    parameters, state = train(placed, scale)
    expected, expected_state = train([False] * len(SPECS), scale)
    for i, (ours, theirs) in enumerate(zip(parameters, expected, strict=True)):
        assert torch.equal(ours, theirs), f"parameter {i}"
    assert state.keys() == expected_state.keys()
    for key, value in state.items():
        assert torch.equal(value, expected_state[key]), key
    assert [state[i, "step"].item() for i in range(len(SPECS))] == [
        STEPS - (i == WITHOUT_GRADIENT) for i in range(len(SPECS))
    ]


def test_parameters_on_the_host_travel_through_the_ring():
    """Parameter and gradient take room in a slot, so that as much state needs more chunks."""
    chunks = []
    for on_host in (False, True):
        parameter, gradient = torch.ones(10_000), torch.ones(10_000)
        engine = _core.Optimizer("cpu", "adamw", OPTIONS)
        engine.open_ring(0, None, 0)
        engine.add([("weight", 10_000, 0, "", on_host, 0)], GROUPS)
        engine.step([(look([parameter]), look([gradient]), [0])], GROUPS, 0, 0)
        chunks.append(engine.stats()["chunks"])
        engine.close()
    assert chunks[1] > 1.5 * chunks[0]
