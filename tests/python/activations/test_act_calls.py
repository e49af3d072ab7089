"""How a layer is called: whatever it is given, and whoever calls it, a recomputed call is the same call."""

import pytest
import torch
from budget_helpers import PASSES, budgeted, recomputed
from offload_helpers import (
    assert_same,
    data,
    offloaded,
    stack,
    train,
)

import forebay

LARGE = 1 << 29


OFFLOADS = {
    "fraction": offloaded,
    "recompute": lambda model: recomputed(model, "option"),
    "budget": lambda model: budgeted(model, LARGE),
}


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("how", ["fraction", "budget", "context"])
def test_a_module_inside_a_layer_compiled_in_place(how: str, device: torch.device) -> None:
    torch._dynamo.reset()
    model, x = stack(device), data(device)
    for layer in model.layers:
        layer.up.compile(backend="aot_eager")
    expected = train(model, x)
    context = forebay.save_on_host(min_bytes=1024, device=device.type) if how == "context" else OFFLOADS[how](model)
    with context:
        for _ in range(PASSES):
            assert_same(expected, train(model, x))
    assert context.stats()["stored_bytes"] > 0
