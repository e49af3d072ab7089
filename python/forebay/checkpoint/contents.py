"""The contents of a checkpoint: values of a model and its optimizers, by name, and checks of them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _get_fqns,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from forebay._device import CPU
from forebay._log import logger
from forebay._tensors import describe_like, is_dtensor, local
from forebay.checkpoint.arguments import check_belongs
from forebay.checkpoint.values import Encoded
from forebay.errors import CheckpointError, OptionError
from forebay.optim.base import Optimizer
from forebay.optim.packed import standing_for
from forebay.optim.state import MASTER

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import Metadata

    from forebay.checkpoint.reader import Reader

MASTER_SUFFIX = f".{MASTER}"
"""The end of the names of master weights, which torch's optimizers do not have."""

TRAINED_ONLY = "trained_only"
"""The name of the value that says that frozen parameters were left out."""

ROUNDING, UPDATES = "rounding", "updates"
"""The names of what random rounding goes on with: seeds by optimizer, and counters of updates by parameter."""


def ours(optimizers: list[torch.optim.Optimizer]) -> list[Optimizer]:
    """Return the optimizers that are forebay's."""
    return [one for one in optimizers if isinstance(one, Optimizer)]


def guarded(optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    """Return the optimizers that know whether their state can be trusted: forebay's, and those that run in units."""
    return [one for one in optimizers if hasattr(one, "check_trusted")]


def contents_of(
    model: torch.nn.Module | None, optimizers: list[torch.optim.Optimizer], laid_out: ExitStack, *, whole: bool
) -> dict[str, Any]:
    """Return the nested state of a model and its optimizers, as DCP takes it.

    With ``whole`` it also has tensors for state that a checkpoint may have and the optimizers lack. They exist until
    ``laid_out`` ends.
    """
    if model is None:
        if optimizers:
            raise OptionError(
                "an optimizer needs its model: state is saved under the names of the model's parameters; give the "
                "model too"
            )
        return {}
    check_belongs(model, optimizers)
    contents: dict[str, Any] = {"model": get_model_state_dict(model)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if is_dtensor(parameter):
            # A module's state dict has new tensors, without the attributes that describe the parameter's uneven shards.
            for key in _get_fqns(model, name):
                if key in contents["model"]:
                    describe_like(parameter, contents["model"][key])
    if optimizers:
        for one in ours(optimizers):
            # Otherwise DCP takes a step to create the state.
            one.prepare()
            laid_out.enter_context(one.state.laid_out(whole=whole))
        contents["optimizer"] = get_optimizer_state_dict(model, optimizers)
        if whole:
            # In a strict load DCP raises an error for parameters without state, even if they need none.
            for group in contents["optimizer"]["param_groups"]:
                for name in group["params"]:
                    contents["optimizer"]["state"].setdefault(name, {})
    return contents


def contents_to_save(
    model: torch.nn.Module | None,
    optimizers: list[torch.optim.Optimizer],
    extra: Mapping[str, Any] | None,
    *,
    trained_only: bool,
) -> dict[str, Any]:
    """Return the state of ``contents_of``, with the caller's ``extra`` values and perhaps without frozen parameters."""
    with ExitStack() as laid_out:
        contents = contents_of(model, optimizers, laid_out, whole=False)
    if trained_only:
        for name in frozen_names(model):
            contents["model"].pop(name.removeprefix("model."), None)
        contents[TRAINED_ONLY] = True
    if model is not None:
        contents.update(_rounding(model, ours(optimizers)))
    if extra is not None:
        tensors: dict[str, torch.Tensor] = {}
        contents["extra"] = Encoded(dict(extra), tensors, "extra")
        # Not nested: DCP would flatten lists and dicts, and lose empty ones and the types of keys.
        contents.update(tensors)
    return contents


def _rounding(model: torch.nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    """Return what a run needs to go on with the same random numbers, if state is rounded at random.

    They depend on the seed, and on the number of updates, which the state of some rules does not show.
    """
    seeds = [one._options.rounding_seed for one in optimizers]
    if not any(seed is not None for seed in seeds):
        return {}
    updates = {name: int(room.counter.item()) for name, room in _uncounted(model, optimizers).items()}
    return {ROUNDING: Encoded({"seeds": seeds}, {}, ROUNDING), **({UPDATES: updates} if updates else {})}


def _uncounted(model: torch.nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    """Return the state of parameters that is rounded at random and does not show how many updates it had, by name."""
    names: dict[torch.Tensor, str] = {}
    names |= {parameter: next(iter(_get_fqns(model, name))) for name, parameter in model.named_parameters()}
    found: dict[str, Any] = {}
    for one in optimizers:
        if one._options.rounding_seed is not None and not one._rule.shows_step:
            one._settle(None)
            rooms = [room for room in one.state.rooms.values() if room.taken is None and room.parameter in names]
            found.update((names[room.parameter], room) for room in rooms)
    return found


def go_on_rounding(model: torch.nn.Module | None, optimizers: list[torch.optim.Optimizer], reader: Reader) -> None:
    """Let random rounding go on where the checkpoint's run was. The seed stays the optimizer's own."""
    mine = ours(optimizers)
    if model is None or all(one._options.rounding_seed is None for one in mine):
        return
    for name, room in _uncounted(model, mine).items():
        if isinstance(updates := reader.objects.get(f"{UPDATES}.{name}"), int) and room.counter.item():
            room.counter.fill_(float(updates))
    saved = reader.value(ROUNDING)["seeds"] if ROUNDING in reader.objects else []
    for one, seed in zip(mine, saved, strict=False):
        own = one._options.rounding_seed
        if own is not None and seed is not None and own != seed:
            logger.warning(
                "%s: %s rounds with rounding_seed=%d, and the checkpoint was made with %d: the bits will not be those "
                "of a run without a restart",
                reader.path,
                one._label,
                own,
                seed,
            )


def frozen_names(model: torch.nn.Module | None) -> frozenset[str]:
    """Return the names, in a checkpoint, of a model's parameters that do not require gradients."""
    if model is None:
        return frozenset()
    named = [(name, one) for name, one in model.named_parameters(remove_duplicate=False) if not one.requires_grad]
    return frozenset(f"model.{key}" for name, _ in named for key in _get_fqns(model, name))


def extra_of(reader: Reader) -> dict[str, Any] | None:
    """Return the saved ``extra`` values."""
    if "extra" not in reader.objects:
        return None
    extra = reader.value("extra")
    return extra if isinstance(extra, dict) else None


def compare(
    path: Path,
    wanted: Mapping[str, Any],
    metadata: Metadata,
    strict: bool,
    spared: frozenset[str],
    formats: Mapping[str, str],
) -> list[str]:
    """Return the names that the checkpoint lacks; raise if it is a checkpoint of another model.

    It may lack the names in ``spared``. ``formats`` has the formats of tensors that are kept in fewer bits than f32.
    """
    found = metadata.state_dict_metadata
    for name, value in wanted.items():
        stored = found.get(name)
        if isinstance(stored, TensorStorageMetadata) and isinstance(value, torch.Tensor) and stored.size != value.shape:
            raise CheckpointError(
                f"{path}: {name} has shape {tuple(stored.size)} in the checkpoint and {tuple(value.shape)} here; make "
                "the model as it was when it was saved"
            )
        if stored is not None and isinstance(stored, TensorStorageMetadata) != isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{path}: {name} is a tensor in only one of checkpoint and model; make the model as it was when it was "
                "saved"
            )
    missing = [name for name in wanted if name not in found]
    if strict:
        both = [
            _listed("it lacks", _lacking([name for name in missing if name not in spared], found)),
            _listed("it also has", [_with_format(name, formats) for name in _foreign(wanted, found)]),
        ]
        if any(both):
            raise CheckpointError(
                f"{path}: not a checkpoint of this model and optimizer: {' and '.join(filter(None, both))}; "
                "strict=False loads what fits"
            )
    return missing


def _with_format(name: str, formats: Mapping[str, str]) -> str:
    return f"{name} ({formats[name]})" if name in formats else name


def _lacking(missing: list[str], found: Mapping[str, Any]) -> list[str]:
    """Return the missing names that have no other source."""
    # A parameter that never had a gradient may have no state at all. A master weight is made from the weight.
    has_state = {name.rsplit(".", 1)[0] for name in found if _is_state(name) and not name.endswith(MASTER_SUFFIX)}
    return [
        name
        for name in missing
        if not name.endswith(MASTER_SUFFIX)
        and not (_is_state(name) and name.rsplit(".", 1)[0] not in has_state)
        and not _is_option(name)
    ]


def _foreign(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return the names of the checkpoint that the model and the optimizer do not have."""
    has_optimizer = any(name.startswith("optimizer.") for name in wanted)
    return [
        name
        for name in found
        if name not in wanted
        and name.split(".", 1)[0] in ("model", "optimizer")
        and (has_optimizer or not name.startswith("optimizer."))
        and not name.endswith(MASTER_SUFFIX)
        and not _is_option(name)
    ]


def _is_state(name: str) -> bool:
    """Whether a name is state of an optimizer's parameter."""
    return name.startswith("optimizer.state.")


def _is_option(name: str) -> bool:
    """Whether a name is an option of a group: schedulers and versions of torch add some, and each has a default."""
    return name.startswith("optimizer.param_groups.") and not name.endswith(".params")


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what} {', '.join(names[:3])}{more}"


def add_options(contents: dict[str, Any], metadata: Metadata) -> None:
    """Add the options of groups that only the checkpoint has; torch's own optimizers accept them as well."""
    groups = contents.get("optimizer", {}).get("param_groups", [])
    for name, stored in metadata.state_dict_metadata.items():
        match metadata.planner_data.get(name):
            case ("optimizer", "param_groups", int(number), option) if number < len(groups):
                place: torch.Tensor | None = None
                if isinstance(stored, TensorStorageMetadata):
                    place = torch.empty(stored.size, dtype=stored.properties.dtype, device=CPU)
                groups[number].setdefault(option, place)


def set_contents(
    model: torch.nn.Module | None,
    optimizers: list[torch.optim.Optimizer],
    contents: dict[str, Any],
    wanted: Mapping[str, Any],
    missing: list[str],
    *,
    strict: bool,
) -> None:
    """Set the loaded values in a model and its optimizers, and reset state that the checkpoint lacks."""
    with torch.no_grad():
        for name in missing:
            # State that the checkpoint lacks starts from zero; a master weight is made from its weight below.
            value = wanted[name]
            if _is_state(name) and not name.endswith(MASTER_SUFFIX) and isinstance(value, torch.Tensor):
                if (packed := standing_for(value)) is not None:
                    packed.reset()
                else:
                    local(value).zero_()
                _forget_late(contents["optimizer"]["state"], name, optimizers)
            elif standing_for(value) is not None:
                # A compact master that the load sets to its weight.
                contents["optimizer"]["state"][_parameter_of(name)].pop(MASTER, None)
    options = StateDictOptions(strict=strict)
    if model is not None:
        set_model_state_dict(model, contents["model"], options=options)
        if optimizers:
            set_optimizer_state_dict(model, optimizers, contents["optimizer"], options=options)
    if any(name.endswith(MASTER_SUFFIX) for name in missing):
        for one in ours(optimizers):
            one._follow_weights(compact=False)


def _parameter_of(name: str) -> str:
    """Return the parameter's name in the name of its state."""
    return name.removeprefix("optimizer.state.").rsplit(".", 1)[0]


def _forget_late(state: dict[str, Any], name: str, optimizers: list[torch.optim.Optimizer]) -> None:
    """Remove state that a checkpoint lacks and that appears with a parameter's first update."""
    parameter, column = _parameter_of(name), name.rsplit(".", 1)[1]
    if any(one.state.is_late(column) for one in ours(optimizers)):
        state[parameter].pop(column, None)
