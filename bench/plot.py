"""Draw a result as one SVG file that needs nothing outside it.

Rows of ``bench/step.py`` become bars, step time beside GPU memory; rows of ``bench/activations.py`` become points, time
against peak memory; some rows of ``bench/overlap.py`` become timelines of one step; those of ``bench/quality.py``
become lines of loss against steps.

usage: python bench/plot.py RESULTS.json OUT.svg
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, TOP, ROW = 900, 92, 34
# Where the bars of the two panels begin and end; the names are left of them, the numbers right of each bar.
TIME, MEMORY = (252, 512), (600, 806)
MIB, GIB = 1 << 20, 1 << 30
# Memory is on a logarithmic scale, which begins here.
LEAST = 4 * MIB
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; } .small { font-size: 12px; fill: #59636e; }
.title { font-size: 16px; font-weight: 600; } .back { fill: #ffffff; } .grid { stroke: #d1d9e0; }
.peer { fill: #8c959f; } .forebay { fill: #0969da; } .own { font-weight: 600; }
.floor { stroke: #bc4c00; stroke-width: 2; } .driver { fill-opacity: 0.35; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .small { fill: #9198a1; } .back { fill: #0d1117; } .grid { stroke: #30363d; }
  .peer { fill: #6e7681; } .forebay { fill: #4493f8; } .floor { stroke: #f0883e; }
}
"""


def size_text(value: float) -> str:
    """Return bytes as people read them."""
    return f"{value / GIB:.3g} GiB" if value >= GIB else f"{value / MIB:.3g} MiB"


def time_x(ms: float, longest_ms: float) -> float:
    """Return where a time lies."""
    return TIME[0] + (TIME[1] - TIME[0]) * ms / longest_ms


def memory_x(value: float, most: float) -> float:
    """Return where a number of bytes lies."""
    share = math.log(max(value, LEAST) / LEAST) / math.log(most / LEAST)
    return MEMORY[0] + (MEMORY[1] - MEMORY[0]) * share


def bar(kind: str, left: float, right: float, y: float) -> str:
    """Return a bar; nothing is drawn as a hairline."""
    return f'<rect class="{kind}" x="{left:.1f}" y="{y + 8}" width="{max(1.0, right - left):.1f}" height="18" rx="2"/>'


def text(kind: str, x: float, y: float, words: str, anchor: str = "start") -> str:
    """Return a line of text."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def workload(row: dict[str, Any]) -> tuple[int, str]:
    """Return what makes rows comparable."""
    return row["params"], row["dtype"]


def draw(found: dict[str, Any]) -> str:
    """Return the SVG."""
    rows = [row for row in found["rows"] if row.get("torch_peak_bytes") is not None]
    if not rows:
        sys.exit("error: no row has GPU memory: run bench/step.py on a GPU")
    main = next((row for row in rows if row["dtype"] == "float32"), rows[0])
    # Rows of another workload go last, below a gap: their times do not compare.
    order = [row for row in rows if workload(row) == workload(main)]
    others = [row for row in rows if workload(row) != workload(main)]
    tops = [TOP + ROW * i for i in range(len(order))] + [TOP + ROW * (len(order) + i) + 30 for i in range(len(others))]
    bottom = tops[-1] + ROW
    longest_ms = max(row["median_step_s"] for row in rows) * 1e3
    most = max(max(row["torch_peak_bytes"], row["driver_peak_bytes"], LEAST * 2) for row in rows)

    machine = found["machine"]
    about = (
        f"{main['params'] / 1e9:.2f}e9 f32 parameters in {main['tensors']} tensors, medians of {main['steps']} steps; "
        f"{machine['gpu']}, torch {machine['torch']}, commit {str(found['commit'])[:12]}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 66}" role="img">',
        f"<title>AdamW step: time and extra GPU memory</title><style>{STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{bottom + 66}"/>',
        text("title", 20, 28, "AdamW step: time and extra GPU memory"),
        text("small", 20, 48, about),
        text("small", TIME[0], TOP - 12, "step, ms"),
        text("small", MEMORY[0], TOP - 12, "peak above parameters and gradients (log)"),
    ]
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000) if longest_ms / s <= 6)
    ticks = [(time_x(ms, longest_ms), f"{ms}") for ms in range(0, int(longest_ms) + 1, step)]
    powers = range(int(math.log(most / LEAST, 16)) + 1)
    ticks += [(memory_x(LEAST * 16**power, most), size_text(LEAST * 16**power)) for power in powers]
    for x, words in ticks:
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom + 4}"/>')
        parts.append(text("small", x, bottom + 20, words, "middle"))
    if others:
        parts.append(text("small", 20, tops[len(order)] - 4, "other workloads: times do not compare with those above"))

    for row, y in zip([*order, *others], tops, strict=True):
        own = row["name"].startswith("forebay")
        kind, ms = "forebay" if own else "peer", row["median_step_s"] * 1e3
        parts.append(text("own" if own else "", 20, y + 22, row["label"]))
        parts.append(bar(kind, TIME[0], time_x(ms, longest_ms), y))
        if row["floor_step_s"]:
            x = time_x(row["floor_step_s"] * 1e3, longest_ms)
            parts.append(f'<line class="floor" x1="{x:.1f}" x2="{x:.1f}" y1="{y + 4}" y2="{y + 30}"/>')
        parts.append(text("", time_x(ms, longest_ms) + 8, y + 22, f"{ms:.0f}"))
        by_torch, by_driver = row["torch_peak_bytes"], row["driver_peak_bytes"]
        end = memory_x(max(by_torch, by_driver), most)
        parts.append(bar(f"{kind} driver", MEMORY[0], end, y))
        parts.append(bar(kind, MEMORY[0], memory_x(by_torch, most), y))
        parts.append(text("", end + 8, y + 22, size_text(by_torch)))
    legend = "pale: all that the driver took, pinned memory's mapping included. Numbers are torch's count."
    parts.append(text("small", 20, bottom + 42, "orange: the least time that the wire allows for the row's bytes;"))
    parts.append(text("small", 20, bottom + 58, legend))
    return "\n".join([*parts, "</svg>", ""])


# Where points of activations lie, in pixels; both scales are logarithmic.
FIELD = (76, 92, 860, 520)


def ticks_between(least: float, most: float, wanted: tuple[float, ...]) -> list[float]:
    """Return round numbers inside a range."""
    powers = (10.0**power for power in range(6))
    return [value * power for power in powers for value in wanted if least <= value * power <= most]


def draw_activations(found: dict[str, Any]) -> str:
    """Return the SVG of time against peak memory; budgets are joined by a line."""
    rows = [row for row in found["rows"] if row.get("torch_peak_bytes")]
    if not rows:
        sys.exit("error: no row has GPU memory: run bench/activations.py on a GPU")
    points = [(row["torch_peak_bytes"] / GIB, row["median_s"] * 1e3, row) for row in rows]
    left, top, right, bottom = FIELD
    sides = [(min(p[i] for p in points) * 0.9, max(p[i] for p in points) * 1.15) for i in (0, 1)]

    def place(gib: float, ms: float) -> tuple[float, float]:
        across, up = (
            math.log(value / low) / math.log(high / low) for value, (low, high) in zip((gib, ms), sides, strict=True)
        )
        return left + (right - left) * across, bottom - (bottom - top) * up

    machine = found["machine"]
    about = (
        f"12 layers of Qwen2-7B shape, {found['tokens'][0]} x {found['tokens'][1]} tokens, bf16, medians of "
        f"{rows[0]['steps']} steps; {machine['gpu']}, torch {machine['torch']}, commit {str(found['commit'])[:12]}"
    )
    height = bottom + 66
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>Forward and backward: time against peak memory</title><style>{STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{height}"/>',
        text("title", 20, 28, "Forward and backward: time against peak memory"),
        text("small", 20, 48, about),
        text("small", 20, top - 14, "ms (log)"),
        text("small", right, bottom + 42, "peak above weights and gradients, GiB (log)", "end"),
    ]
    for gib in ticks_between(*sides[0], (1, 2, 3, 4, 6, 9)):
        x, _ = place(gib, sides[1][0])
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(text("small", x, bottom + 18, f"{gib:.0f}", "middle"))
    for ms in ticks_between(*sides[1], (1, 2, 3, 4, 5, 6, 7, 8)):
        _, y = place(sides[0][0], ms)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(text("small", left - 8, y + 4, f"{ms:.0f}", "end"))
    budgets = sorted(place(gib, ms) for gib, ms, row in points if row.get("options", {}).get("budget_bytes"))
    if budgets:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in budgets)
        parts.append(f'<polyline points="{path}" fill="none" stroke="#0969da" stroke-width="1.5"/>')
    taken: list[tuple[float, float, float]] = []
    for gib, ms, row in sorted(points, key=lambda point: point[:2]):
        x, y = place(gib, ms)
        own, budget = row["name"].startswith("forebay"), row.get("options", {}).get("budget_bytes")
        parts.append(
            f'<circle class="{"forebay" if own else "peer"}" cx="{x:.1f}" cy="{y:.1f}" r="{5 if budget else 4}"/>'
        )
        words = f"{budget / GIB:.0f} GiB: {ms:.0f}" if budget else f"{row['label']}: {ms:.0f}"
        size = 6.6 * len(words)
        start = x - size if x > (left + right) * 0.72 else x
        # Budgets are named below their points, all others above, where there is room.
        near = [20 + 15 * n for n in range(9)] if budget else [-9 - 15 * n for n in range(9)]
        free = [
            at
            for at in near
            if not any(abs(y + at - v) < 14 and start < high and low < start + size for low, high, v in taken)
        ]
        at = free[0] if free else near[0]
        taken.append((start, start + size, y + at))
        if abs(at) > 25:
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{y + at:.1f}"/>')
        parts.append(text("own" if budget else "small", start, y + at, words))
    parts.append(text("small", 20, bottom + 42, "the line joins the budgets of offload_activations(budget_bytes=...)"))
    return "\n".join([*parts, "</svg>", ""])


# Where the bars of timelines begin and end, and what is drawn of a result, as far as it is there.
SPAN, LANE = (130, 870), 19
LANE_STYLE = """
.before { fill-opacity: 0.45; } .idle { fill: #f6f8fa; }
.forward { fill: #54aeff; } .backward { fill: #0969da; } .step { fill: #8c959f; }
.fetch { fill: #1a7f37; } .update { fill: #bc4c00; } .store { fill: #8250df; }
@media (prefers-color-scheme: dark) { .idle { fill: #161b22; } }
"""
SHOWN = ("stream", "overlap", "clip-overlap", "speculate")


def draw_timelines(found: dict[str, Any]) -> str:
    """Return the SVG of one step of several rows, with one scale for all."""
    drawn = [row for row in found["rows"] if row.get("timeline")]
    rows = [row for row in drawn if row["name"] in SHOWN] or drawn
    if not rows:
        sys.exit("error: no row has a timeline: run bench/overlap.py without --no-profile")
    longest_ms = max(row["timeline"]["step_ms"] for row in rows)
    lanes = list(rows[0]["timeline"]["lanes_ms"])
    height = 34 + LANE * len(lanes) + 12
    top, bottom = 64, 64 + height * len(rows)

    def place(ms: float) -> float:
        return SPAN[0] + (SPAN[1] - SPAN[0]) * ms / longest_ms

    def box(kind: str, begin: float, end: float, y: float, percent: float = 100) -> str:
        x, tall = place(begin), max(1.5, (LANE - 5) * percent / 100)
        wide = max(0.3, place(end) - x)
        return (
            f'<rect class="{kind}" x="{x:.1f}" y="{y + LANE - 5 - tall:.1f}" width="{wide:.1f}" height="{tall:.1f}"/>'
        )

    machine = found["machine"]
    about = (
        f"{found['params'] / 1e9:.2f}e9 bf16 parameters in the shape of {found['shape']}, {rows[0]['tokens']} tokens; "
        f"{machine['gpu'] or 'CPU'}, torch {machine['torch']}, commit {str(found['commit'])[:12]}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 48}" role="img">',
        f"<title>One of several back-to-back training steps</title><style>{STYLE}{LANE_STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{bottom + 48}"/>',
        text("title", 20, 28, "One of several back-to-back training steps"),
        text("small", 20, 48, about),
    ]
    step = next(s for s in (unit * 10.0**power for power in range(-3, 6) for unit in (1, 2, 5)) if longest_ms / s <= 10)
    for number in range(int(longest_ms / step) + 1):
        x = place(number * step)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top + 6}" y2="{bottom - 8}"/>')
        parts.append(text("small", x, bottom + 8, f"{number * step:g} ms", "middle"))
    for index, row in enumerate(rows):
        line, y = row["timeline"], top + height * index
        # What runs before this step's backward begins belongs to the step before.
        own = next(begin for name, begin, _ in line["parts_ms"] if name == "backward")
        parts.append(text("own", 20, y + 20, f"{row['label']}: {row['median_step_s'] * 1e3:.0f} ms"))
        for number, lane in enumerate(lanes):
            at = y + 30 + LANE * number
            parts.append(text("small", 20, at + 11, lane))
            parts.append(box("idle", 0, line["step_ms"], at))
            for begin, end, percent in line["lanes_ms"][lane]:
                middle = (begin + end) / 2
                kind = lane if lane != "compute" else next(name for name, _, last in line["parts_ms"] if middle < last)
                earlier = lane != "compute" and begin < own
                parts.append(box(f"{kind} before" if earlier else kind, begin, end, at, percent))
    legend = "light blue: forward, blue: backward, grey: step(). Height: how busy the lane is. Pale: the step before."
    parts.append(text("small", 20, bottom + 30, legend))
    return "\n".join([*parts, "</svg>", ""])


# Where the lines of losses lie: left, top, right, bottom of each panel.
TRAINED, HELD_OUT, APART = (76, 156, 444, 366), (508, 156, 876, 366), (76, 424, 876, 610)
COLOURS = {
    "f32": "#8c959f",
    "compact": "#0969da",
    "bf16": "#1a7f37",
    "bf16-stochastic": "#4ac26b",
    "8bit": "#bc4c00",
    "8bit-stochastic": "#fb8f44",
    "torchao": "#8250df",
    "torch": "#bf3989",
}
LINE_STYLE = "polyline { fill: none; stroke-width: 1.6; } .spread { fill: #8c959f; fill-opacity: 0.2; }"

Points = list[tuple[float, float]]


def over_seeds(found: dict[str, Any], row: dict[str, Any], kind: str, take: Callable[[Any], float]) -> Points:
    """Return a kind of loss of a row, one of its seeds' losses for each step."""
    losses = zip(*(one[kind] for one in row["runs"]), strict=True)
    return [(step, take(values)) for step, values in zip(found["noted_steps"][kind], losses, strict=True)]


def round_ticks(low: float, high: float, most: int) -> list[float]:
    """Return round numbers inside a range, not more than so many."""
    units = (unit * 10.0**power for power in range(-9, 9) for unit in (1, 2, 5))
    unit = next(unit for unit in units if (high - low) / unit < most)
    return [unit * n for n in range(math.ceil(low / unit), math.floor(high / unit) + 1)]


def draw_quality(found: dict[str, Any]) -> str:
    """Return the SVG of losses in training: on what is trained, on what is held out, and how far apart from f32."""
    rows = [row for row in found["rows"] if "runs" in row]
    base = next((row for row in rows if row["name"] == "f32"), None)
    if base is None:
        sys.exit("error: the row f32 has no losses: run bench/quality.py with it")
    steps, height = found["options"]["steps"], APART[3] + 66
    machine, model = found["machine"], found["model"]
    about = (
        f"{base['runs'][0]['parameters'] / 1e6:.2f}e6 bf16 parameters, {model['batch']} x {model['length']} bytes "
        f"a step, means of {len(base['runs'])} seeds; {machine['gpu'] or 'CPU'}, torch {machine['torch']}, "
        f"commit {str(found['commit'])[:12]}"
    )
    title = "Formats of optimizer state: loss of a small language model"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{title}</title><style>{STYLE}{LINE_STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{height}"/>',
        text("title", 20, 28, title),
        text("small", 20, 48, about),
    ]
    for n, row in enumerate(rows):
        x, y, colour = 20 + 293 * (n % 3), 74 + 20 * (n // 3), COLOURS[row["name"]]
        parts.append(f'<line x1="{x}" x2="{x + 22}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="3"/>')
        parts.append(text("small", x + 28, y, f"{row['label']}: {row['mean']:.4f}"))

    def panel(
        name: str, field: tuple[int, ...], words: str, lines: dict[str, Points], sides: tuple[float, ...]
    ) -> None:
        left, top, right, bottom = field
        low, high = sides

        def place(step: float, value: float) -> tuple[float, float]:
            return left + (right - left) * step / steps, bottom - (bottom - top) * (value - low) / (high - low)

        parts.append(text("small", left, top - 10, words))
        parts.append(f'<clipPath id="{name}"><path d="M{left} {top}H{right}V{bottom}H{left}Z"/></clipPath>')
        for step in round_ticks(0, steps, 6):
            x, _ = place(step, low)
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
            parts.append(text("small", x, bottom + 18, f"{step:g}", "middle"))
        for value in round_ticks(low, high, 6):
            _, y = place(0, value)
            parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(text("small", left - 8, y + 4, f"{value:.6g}", "end"))
        if name == "apart":
            edge = [place(step, value) for step, value in [*spread[0], *reversed(spread[1])]]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in edge)
            parts.append(f'<polygon class="spread" clip-path="url(#{name})" points="{path}"/>')
        for of, points in lines.items():
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
            # It lies on f32's own line.
            dashes = ' stroke-dasharray="5 5"' if of == "compact" else ""
            parts.append(f'<polyline clip-path="url(#{name})" points="{path}" stroke="{COLOURS[of]}"{dashes}/>')

    def sides_of(lines: dict[str, Points], begin: float) -> tuple[float, float]:
        values = [value for points in lines.values() for step, value in points if step >= begin * steps]
        margin = 0.06 * (max(values) - min(values)) or 1e-6
        return min(values) - margin, max(values) + margin

    trained, held_out = (
        {row["name"]: over_seeds(found, row, kind, statistics.fmean) for row in rows}
        for kind in ("trained", "held_out")
    )

    def less_base(points: Points) -> Points:
        return [(step, value - mean) for (step, value), (_, mean) in zip(points, held_out["f32"], strict=True)]

    apart = {name: less_base(points) for name, points in held_out.items()}
    spread = [less_base(over_seeds(found, base, "held_out", side)) for side in (min, max)]
    # The first steps are the same everywhere, and would take most of the room.
    panel("trained", TRAINED, "training loss, nats per byte (means of steps)", trained, sides_of(trained, 0.1))
    panel("held-out", HELD_OUT, "held-out loss, nats per byte", held_out, sides_of(held_out, 0.1))
    among = {**apart, "least": spread[0], "most": spread[1]}
    panel("apart", APART, "held-out loss less that of f32 state and f32 masters", apart, sides_of(among, 0.25))
    parts.append(text("small", 20, height - 24, "grey: the seeds of f32 lie in it. Numbers: held-out loss at the end."))
    parts.append(text("small", APART[2], APART[3] + 36, "steps", "end"))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Read the results, write the picture."""
    if len(sys.argv) != 3:
        sys.exit("usage: python bench/plot.py RESULTS.json OUT.svg")
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    found = json.loads(source.read_text())
    if "text" in found:
        picture = draw_quality(found)
    elif "checks" in found:
        picture = draw_timelines(found)
    elif any("backward_s" in row for row in found["rows"]):
        picture = draw_activations(found)
    else:
        picture = draw(found)
    target.write_text(picture)
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
