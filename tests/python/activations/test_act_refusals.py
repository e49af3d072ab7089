"""Wrong input: an error that names the option and the remedy, before anything has changed."""

import pytest
import torch

import forebay
from support.offload import Block, Stack, data, stack, train
from support.processes import in_child

CPU = torch.device("cpu")

WRONG = {
    "fraction": ([-0.1, 1.1, float("nan"), "half", None, True, "Auto"], "from 0.0 to 1.0"),
    "min_bytes": ([-1, 1.5, None, True, "1MiB"], "whole number of at least 0"),
    "keep_last": ([-1, 1.5, None, True], "whole number of at least 0"),
    "recompute": ([1, None, "yes"], "use True or False"),
    "max_in_flight_bytes": ([0, -5, 1.5, True], "whole number of at least 1, or None"),
    "pinned_budget_bytes": ([-5, 1.5, True], "whole number of at least 0, or None"),
    "layers": (["nowhere", [], [3], 7], "invalid layers"),
}


@pytest.mark.parametrize(
    ("option", "value"), [(name, value) for name, (values, _) in WRONG.items() for value in values]
)
def test_wrong_values_name_the_option(option: str, value: object) -> None:
    model = stack(CPU)
    before = [dict(module.__dict__) for module in model.modules()]
    with pytest.raises(forebay.OptionError, match=option) as caught:
        forebay.offload_activations(model, **{option: value})
    assert WRONG[option][1] in str(caught.value)
    assert [dict(module.__dict__) for module in model.modules()] == before


@pytest.mark.parametrize("option", ["fraction", "min_bytes", "max_in_flight_bytes", "pinned_budget_bytes"])
def test_the_context_checks_too(option: str) -> None:
    for value in WRONG[option][0]:
        with pytest.raises(forebay.OptionError, match=option):
            forebay.save_on_host(**{option: value})
    with pytest.raises(forebay.OptionError, match="fraction"):
        forebay.save_on_host(fraction="auto")
    with pytest.raises(forebay.OptionError, match="device"):
        forebay.save_on_host(device="tpu")


def test_a_model_without_layers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with pytest.raises(forebay.OptionError, match=r"Sequential has no layers that can be found.*layers=.*save_on_host"):
        forebay.offload_activations(model)
    forebay.offload_activations(model, layers=list(model)).remove()


def test_what_is_no_model() -> None:
    with pytest.raises(forebay.OptionError, match=r"invalid model: list; give a torch.nn.Module"):
        forebay.offload_activations([torch.nn.Linear(4, 4)])


def test_a_second_offload_of_the_same_layers() -> None:
    model = stack(CPU)
    first = forebay.offload_activations(model, layers=[model.layers[2]])
    with pytest.raises(forebay.OptionError, match=r"layer 2, a Block, is offloaded already; call remove\(\)"):
        forebay.offload_activations(model)
    forebay.offload_activations(model, layers=[model.layers[0]]).remove()
    first.remove()
    forebay.offload_activations(model).remove()


def test_an_unknown_option() -> None:
    with pytest.raises(forebay.OptionError, match=r"unknown option 'fractoin'; the options are layers, .*fraction"):
        forebay.offload_activations(stack(CPU), fractoin=0.5)


def test_layers_inside_each_other_or_twice() -> None:
    inner = Block()
    outer = Stack(inner)
    with pytest.raises(forebay.OptionError, match="a Block is inside a Stack that is listed too"):
        forebay.offload_activations(outer, layers=[outer, inner])
    with pytest.raises(forebay.OptionError, match="listed twice"):
        forebay.offload_activations(outer, layers=[inner, inner])


def test_a_model_compiled_as_a_whole() -> None:
    model = torch.compile(stack(CPU), backend="eager")
    with pytest.raises(forebay.OptionError, match=r"compile the layers instead.*save_on_host"):
        forebay.offload_activations(model)


def test_it_does_not_work_in_a_forked_child() -> None:
    model, x = stack(CPU), data(CPU)
    handle = forebay.offload_activations(model, min_bytes=0, fraction=1.0)
    train(model, x)
    assert in_child(lambda: train(model, x)).startswith("DeviceError: ")
    handle.remove()
