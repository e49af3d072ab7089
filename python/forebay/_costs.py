"""From the moments of a measuring pass to what the planner wants to know of it."""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING, Any

from forebay._passes import Kind

if TYPE_CHECKING:
    from forebay._passes import Pass
    from forebay._select import Clock

SELECT_NS = 8_000
"""What watching an operation takes on the host."""


def times_of(state: Pass, clock: Clock) -> list[dict[str, float]]:
    """Return what each call took, in seconds."""
    found: list[dict[str, float]] = [{} for _ in state.ways]
    backward = [point for point in state.points if point.what in ("open", "end")]
    enters = {point.call: point for point in state.points if point.what == "enter"}
    for point in state.points:
        if point.what == "leave" and point.call in enters:
            found[point.call]["forward_s"] = clock.ns(enters[point.call].mark, point.mark) / 1e9
    for point, after in itertools.pairwise(backward):
        if point.what == "open":
            found[point.call]["backward_s"] = clock.ns(point.mark, after.mark) / 1e9
    return found


def cost_of(state: Pass, clock: Clock, *, may_recompute: bool) -> dict[str, Any]:
    """Return what the calls of a measuring pass take, and what there is outside of them."""
    begin, known = state.points[0], state.book.kinds
    enters = {point.call: point for point in state.points if point.what == "enter"}
    leaves = {point.call: point for point in state.points if point.what == "leave"}
    backward = [point for point in state.points if point.what in ("open", "end")]
    after = {point.call: later for point, later in itertools.pairwise(backward)}
    opens = {point.call: point for point in backward if point.what == "open"}
    kinds = [known.get(i) or Kind(i, "not called", i, "it was not called") for i in range(len(state.ways))]
    rows: list[dict[str, Any]] = []
    for i, (kind, way) in enumerate(zip(kinds, state.ways, strict=True)):
        enter, leave, opened = enters.get(i), leaves.get(i), opens.get(i)
        forward_ns = clock.ns(enter.mark, leave.mark) if enter and leave else 0
        took = max(0, leave.peak - enter.now) if enter and leave else 0
        backward_ns, base, own = 0, 0, kind.saved_bytes
        if opened is not None and i in after:
            later = after[i]
            backward_ns = clock.ns(opened.mark, later.mark)
            base = max(0, opened.now - opened.held - begin.now)
            own = max(later.peak - begin.now - base - later.held, kind.saved_bytes)
        rows.append(
            {
                "name": f"layer {i}, {kind.name}",
                # There is no point in it where nothing is saved.
                "can_recompute": may_recompute and kind.reason is None and kind.saved_bytes > 0,
                "forward_ns": forward_ns,
                "backward_ns": backward_ns,
                "recompute_ns": int(forward_ns * kind.again),
                "select_ns": 0,
                "_host_ns": leave.host_ns - enter.host_ns if enter and leave else 0,
                "input_bytes": kind.input_bytes,
                "saved_bytes": kind.saved_bytes,
                "forward_base_bytes": max(0, enter.now - enter.held - begin.now) if enter else 0,
                "forward_saving_bytes": took,
                "forward_bare_bytes": took,
                "backward_base_bytes": base,
                "backward_bytes": own,
                "tensors": [dict(tensor) for tensor in kind.tensors],
                "_saving": not way.recompute,
                "_ops": kind.ops,
            }
        )
    seen = sorted(enters.keys() & leaves.keys())
    families: dict[Any, list[dict[str, Any]]] = {}
    for i in seen:
        families.setdefault(kinds[i].family, []).append(rows[i])
    for family in families.values():
        _complete(family)
    _fill(rows, kinds, seen)
    outside = [clock.ns(begin.mark, enters[i].mark) for i in seen[:1]]
    gaps = [clock.ns(leaves[i].mark, enters[j].mark) for i, j in itertools.pairwise(seen)]
    outside += [int(statistics.median(gaps)) * len(gaps)] if gaps else []
    outside += [clock.ns(leaves[i].mark, backward[0].mark) for i in seen[-1:] if backward]
    return {
        "layers": [{name: value for name, value in row.items() if not name.startswith("_")} for row in rows],
        "tail_bytes": max(0, backward[0].peak - backward[0].held - begin.now) if backward else 0,
        "outside_ns": sum(outside),
    }


def _complete(rows: list[dict[str, Any]]) -> None:
    """Give calls of one family both sorts of figures: those of one that saves and those of one that is recomputed."""
    saving = [row for row in rows if row["_saving"]]
    again = [row for row in rows if not row["_saving"]]
    most = max((row["forward_saving_bytes"] for row in saving), default=0)
    inputs = max(row["input_bytes"] for row in rows)
    for row in again:
        row["forward_saving_bytes"] = max(most, row["saved_bytes"])
        if row["backward_ns"]:
            row["backward_ns"] = max(row["forward_ns"], row["backward_ns"] - row["recompute_ns"])
    for row in saving:
        if again:
            row["forward_bare_bytes"] = max(other["forward_bare_bytes"] for other in again)
            row["forward_ns"] = _usual("forward_ns", again)
            row["recompute_ns"] = _usual("recompute_ns", again)
            row["backward_ns"] = row["backward_ns"] and (_usual("backward_ns", again) or row["backward_ns"])
        elif row["backward_ns"]:
            # It waited for its tensors one by one.
            row["backward_ns"] = min(row["backward_ns"], int(2.2 * row["forward_ns"]))
        if not row["input_bytes"]:
            row["input_bytes"] = inputs or min(row["saved_bytes"], row["forward_bare_bytes"])
            row["can_recompute"] = row["can_recompute"] and bool(again)
    for name in ("forward_ns", "backward_ns", "recompute_ns"):
        # Layers of one build take the same time but for noise, which is not to be planned for.
        usual = _usual(name, rows)
        for row in rows:
            if abs(row[name] - usual) * 3 <= usual:
                row[name] = usual
    host = statistics.median(row["_host_ns"] for row in again or rows)
    for row in rows:
        # Watching operations takes time on the host, forward and again; it shows where the host is the slower.
        row["select_ns"] = int(max(0, 2 * (host + SELECT_NS * row["_ops"] - row["forward_ns"])))
        # Times of operations were taken one by one, in one layer; they are shares of what recomputing takes.
        total = sum(tensor["recompute_ns"] for tensor in row["tensors"])
        if total > row["recompute_ns"] > 0:
            for tensor in row["tensors"]:
                tensor["recompute_ns"] = tensor["recompute_ns"] * row["recompute_ns"] // total


def _usual(name: str, rows: list[dict[str, Any]]) -> int:
    """Return the median of a time; calls that no gradient came to have none of a backward pass."""
    return int(statistics.median([row[name] for row in rows if row[name]] or [0]))


def _fill(rows: list[dict[str, Any]], kinds: list[Kind], seen: list[int]) -> None:
    """Give calls that this pass left out what those like them take, where those beside them were."""
    for i, row in enumerate(rows):
        if i in seen or not seen:
            continue
        like = [rows[j] for j in seen if kinds[j] is kinds[i]] or [
            rows[j] for j in seen if kinds[j].family == kinds[i].family
        ]
        beside = rows[max((j for j in seen if j < i), default=seen[0])]
        bases = {name: beside[name] for name in ("forward_base_bytes", "backward_base_bytes")}
        row |= (like[-1] if like else {}) | bases | {"name": row["name"]}
