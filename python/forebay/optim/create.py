"""Creating state: which columns each parameter has, and where they are."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from forebay import _core
from forebay._device import is_gpu
from forebay._log import logger
from forebay._progress import watch
from forebay._tensors import check_parameter, host_tensor, local, state_like
from forebay.errors import OptionError
from forebay.optim.gather import Flat, Table
from forebay.optim.packed import COMPACT, F32, CompactMaster, Moment, Packed
from forebay.optim.state import MASTER, STEP, Room, resident_column
from forebay.optim.values import check_layout

if TYPE_CHECKING:
    from forebay._core import HostView
    from forebay.optim.base import Optimizer


def create(optimizer: Optimizer, flat: Flat, found: list[torch.Tensor], *, only: bool = False) -> None:
    """Create state for all parameters that can have a gradient and have none yet.

    Parameters
    ----------
    optimizer
        The optimizer.
    flat
        Its parameters.
    found
        Parameters that get state in any case: they have a gradient, or state to be loaded.
    only
        Whether the other parameters get none yet.
    """
    state, homes = optimizer.state, optimizer._homes
    numbers = [optimizer.numbers(group) for group in optimizer.param_groups]
    columns = [optimizer._rule.keeps(of_group) for of_group in numbers]
    is_known = flat.complete or homes.keys() >= set(map(id, found))
    if flat.created == columns and is_known and not state.edited:
        return
    check_columns(optimizer, optimizer.param_groups)
    check_masters(optimizer, flat)
    if not optimizer._has_stepped:
        forget_replaced(optimizer, flat)
    if optimizer._options.is_resident:
        # A parameter that was replaced would otherwise stay in memory.
        state.forget_taken(keep=set(map(id, flat.parameters)))
    wanted = set(map(id, found))
    new: list[int] = []
    for place, parameter in enumerate(flat.parameters):
        if id(parameter) in homes:
            state.complete(state.rooms[id(parameter)])
        elif id(parameter) in wanted or (parameter.requires_grad and not only):
            group = flat.groups[place]
            name = optimizer._name(group, flat.positions[place])
            check_parameter(parameter, name, optimizer._label)
            for column, value in dict.get(state, parameter, {}).items():
                if column in (*columns[group], MASTER) and value is not None:
                    check_layout(name, parameter, column, value, " as assigned")
            new.append(place)
    for places, is_resident in _divided(optimizer, flat, new, numbers):
        _add(optimizer, flat, places, numbers, is_resident=is_resident)
    state.edited = False
    if not only or flat.created is not None:
        flat.settle(columns, optimizer._tables, homes)


def check_masters(optimizer: Optimizer, flat: Flat) -> None:
    """Raise if masters are to be compact and no parameter is bf16."""
    if not optimizer._options.has_compact_masters or optimizer._tables or not flat.parameters:
        return
    dtypes = {local(parameter).dtype for parameter in flat.parameters}
    if torch.bfloat16 not in dtypes:
        found = ", ".join(sorted(map(str, dtypes)))
        name = optimizer._name(flat.groups[0], flat.positions[0])
        raise OptionError(
            f"master_weights='compact' is for bf16 parameters, and {name} and all others are {found}; use "
            "master_weights=True, or cast the model first"
        )


def forget_replaced(optimizer: Optimizer, flat: Flat) -> None:
    """Free the state of parameters that are in no group any more, and keep the rest.

    Frameworks replace the parameters of the groups before the first step, by their shards for example.
    """
    here = set(map(id, flat.parameters))
    replaced = [room.parameter for room in optimizer.state.rooms.values() if id(room.parameter) not in here]
    if not replaced:
        return
    for parameter in replaced:
        optimizer.state.pop(parameter, None)
    optimizer._start_over()


def check_columns(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Raise if a group needs other columns than its state was created with."""
    for index, group in enumerate(groups):
        needed = optimizer._rule.keeps(optimizer.numbers(group))
        for parameter in group["params"]:
            if id(parameter) not in optimizer._homes:
                continue
            kept = optimizer.state.rooms[id(parameter)].own
            # A column that appears late and is not used for a while stays as it is.
            changed = [] if optimizer._rule.appears_late else [name for name in kept if name not in needed]
            changed += [name for name in needed if name not in kept]
            if changed:
                switch = optimizer.switches.get(changed[0], changed[0])
                raise OptionError(
                    f"{switch} was switched {'off' if changed[0] in kept else 'on'} for group {index} after its state "
                    "was created; make a new optimizer"
                )


def _divided(
    optimizer: Optimizer, flat: Flat, new: list[int], numbers: list[list[float]]
) -> list[tuple[list[int], bool]]:
    """Divide parameters into those whose state is on the device and those whose state is not.

    Whole parameters in the order of the groups, which is mostly that of the forward: what a forward needs first has its
    gradient last, so that nothing hides its update.
    """
    options, rule = optimizer._options, optimizer._rule
    if not new or options.is_resident or (options.resident_bytes is None and options.resident_fraction is None):
        return [(new, options.is_resident)] if new else []
    compute = optimizer._compute

    def size(place: int) -> int:
        inner = local(flat.parameters[place])
        master = options.master_format(inner.dtype)
        return rule.state_bytes(numbers[flat.groups[place]], optimizer._formats, master, inner.numel())

    sizes = {place: size(place) for place in new}
    rooms = optimizer.state.rooms.values()
    known = {id(room.parameter): room.bytes for room in rooms}
    budget = options.resident_bytes
    if budget is None:
        budget = int((options.resident_fraction or 0.0) * (sum(known.values()) + sum(sizes.values())))
    budget -= sum(known[id(room.parameter)] for room in rooms if room.is_resident)
    chosen: list[int] = []
    for place in new:
        inner = local(flat.parameters[place])
        if sizes[place] <= budget and sizes[place] and inner.device == compute:
            chosen.append(place)
            budget -= sizes[place]
    taken = set(chosen)
    parts = [(chosen, True), ([place for place in new if place not in taken], False)]
    return [(places, is_resident) for places, is_resident in parts if places]


def _add(optimizer: Optimizer, flat: Flat, new: list[int], numbers: list[list[float]], *, is_resident: bool) -> None:
    """Create a table for the parameters at these places of ``flat``."""
    engine, compute = optimizer._open()
    options, state, rule = optimizer._options, optimizer.state, optimizer._rule
    parameters = [flat.parameters[place] for place in new]
    names = [optimizer._name(flat.groups[place], flat.positions[place]) for place in new]
    groups = [flat.groups[place] for place in new]
    inner = [local(parameter) for parameter in parameters]
    master = [options.master_format(tensor.dtype) for tensor in inner]
    columns = [
        (*rule.keeps(numbers[group]), *([MASTER] if has_master else []))
        for group, has_master in zip(groups, master, strict=True)
    ]
    formats = [
        {**dict(zip(rule.columns, rule.formats_for(optimizer._formats, tensor.numel()), strict=True)), MASTER: of}
        for tensor, of in zip(inner, master, strict=True)
    ]
    packed: list[dict[str, Packed]] = [{} for _ in new]
    views: list[dict[str, torch.Tensor]] = [{} for _ in new]
    if is_resident:
        for name, tensor in zip(names, inner, strict=True):
            if tensor.device != compute:
                raise OptionError(
                    f"{name} is on {tensor.device}, this optimizer computes on {compute}; placement 'resident' cannot "
                    "bring it there, use 'stream'"
                )
        for parameter, kept, of, as_f32, reduced in zip(parameters, columns, formats, views, packed, strict=True):
            for name in kept:
                if of[name] == COMPACT:
                    reduced[name] = CompactMaster.resident(parameter)
                elif of[name] != F32:
                    reduced[name] = Moment.resident(rule, parameter, name, of[name])
                elif not state.is_late(name):
                    as_f32[name] = resident_column(parameter)
    # Where nothing goes through the device, a parameter on the host is updated in place.
    in_place = not is_gpu(compute) and options.host_fraction == 1.0 and not is_resident
    on_host = [tensor.device != compute or in_place for tensor in inner]
    if not optimizer._tables:
        optimizer._open_ring(engine, compute)
    sizes = [tensor.numel() for tensor in inner]
    begun = time.perf_counter()
    faulted = _core.bytes_faulted_in()
    state_sizes = [
        rule.state_bytes(numbers[group], optimizer._formats, of, size)
        for group, of, size in zip(groups, master, sizes, strict=True)
    ]
    to_pin = 0 if is_resident else sum(state_sizes)
    with watch("pinning optimizer state", to_pin, lambda: _core.bytes_faulted_in() - faulted):
        tensors = list(zip(names, sizes, groups, master, on_host, new, strict=True))
        number = engine.add(tensors, numbers, is_resident, optimizer._formats)
    logger.info(
        "%s: state of %d parameters, %d elements, created in %.2f s",
        optimizer._label,
        len(sizes),
        sum(sizes),
        time.perf_counter() - begun,
    )
    optimizer._tables.append(Table(parameters, is_resident=is_resident))
    rows = zip(parameters, columns, formats, views, packed, strict=True)
    for index, (parameter, kept, of, as_f32, reduced) in enumerate(rows):
        optimizer._homes[id(parameter)] = (number, index)

        def view(name: str, index: int = index) -> HostView:
            found = engine.view(number, index, name)
            assert found is not None
            return found

        for name in () if is_resident else kept:
            if of[name] == COMPACT:
                reduced[name] = CompactMaster.over(parameter, view)
            elif of[name] != F32:
                reduced[name] = Moment.over(rule, parameter, name, of[name], view)
            else:
                as_f32[name] = state_like(parameter, host_tensor(view(name), inner[index]))
        step = torch.frombuffer(view(STEP), dtype=torch.float32)[0]
        room = Room(parameter, kept, step, as_f32, is_resident=is_resident, packed=reduced, bytes=state_sizes[index])
        state.place(room)
