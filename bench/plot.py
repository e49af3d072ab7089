"""Draw the rows of ``bench/step.py``: step time against GPU memory, as one SVG file without anything outside it.

A dot is torch's count of a row's peak above parameters and gradients; the line up from it ends at the driver's count.

usage: python bench/plot.py RESULTS.json OUT.svg
"""

from __future__ import annotations

import json
import math
import sys
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 860, 520
LEFT, RIGHT, TOP, BOTTOM = 78, 28, 76, 62
MIB = 1 << 20
# Nothing at all has no place on a logarithmic axis: it is drawn on the lowest line.
LEAST = 8 * MIB
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; } .small { font-size: 12px; fill: #59636e; }
.title { font-size: 16px; font-weight: 600; } .back { fill: #ffffff; } .grid { stroke: #d1d9e0; }
.floor { stroke: #59636e; stroke-dasharray: 5 4; } .peer { fill: #6e7781; stroke: #6e7781; }
.forebay { fill: #0969da; stroke: #0969da; } .name { font-weight: 600; } .other { fill: none; stroke-width: 2; }
.leader { stroke: #afb8c1; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .small { fill: #9198a1; } .back { fill: #0d1117; } .grid { stroke: #30363d; }
  .floor { stroke: #9198a1; } .peer { fill: #9198a1; stroke: #9198a1; } .forebay { fill: #4493f8; stroke: #4493f8; }
  .other { fill: none; } .leader { stroke: #484f58; }
}
"""


def bytes_text(value: float) -> str:
    """Return a tick's label."""
    return f"{value / MIB / 1024:g} GiB" if value >= 1024 * MIB else f"{value / MIB:g} MiB"


class Axes:
    """Where times and bytes lie."""

    def __init__(self, longest_ms: float, least: float, most: float) -> None:
        step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if longest_ms / s <= 7)
        self.right_ms = step * math.ceil(longest_ms * 1.04 / step)
        self.times = range(0, self.right_ms + 1, step)
        self.low = math.floor(math.log(least / MIB, 4)) if least < 16 * MIB else 2
        self.high = math.ceil(math.log(most / MIB, 4) + 0.15)
        self.sizes = [4.0**power * MIB for power in range(self.low, self.high + 1)]

    def x(self, ms: float) -> float:
        """Return where a time lies."""
        return LEFT + (WIDTH - LEFT - RIGHT) * ms / self.right_ms

    def y(self, size: float) -> float:
        """Return where a size lies."""
        share = (math.log(size / MIB, 4) - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share


def place(taken: list[tuple[float, float, float, float]], x: float, y: float, width: float) -> tuple[float, float]:
    """Return where a label of two lines goes: beside its dot, or at the nearest spot that is free."""
    spots = []
    for dy in (0, -36, 36, -64, 64, -92, 92, 120):
        spots += [(x + 12, y + dy), (x - 12 - width, y + dy), (x - width / 2, y + (dy or 30))]
    for left, middle in spots:
        box = (left, middle - 17, left + width, middle + 17)
        inside = left >= LEFT + 4 and box[2] <= WIDTH - 4 and box[1] >= TOP and box[3] <= HEIGHT - BOTTOM - 4
        if inside and all(box[2] < b[0] or b[2] < box[0] or box[3] < b[1] or b[3] < box[1] for b in taken):
            break
    taken.append(box)
    return left, middle


def draw(found: dict[str, Any]) -> str:
    """Return the SVG."""
    rows = [row for row in found["rows"] if row.get("torch_peak_bytes") is not None]
    if not rows:
        sys.exit("error: no row has GPU memory: run bench/step.py on a GPU")
    peaks = [max(LEAST, row["torch_peak_bytes"]) for row in rows]
    axes = Axes(max(row["median_step_s"] for row in rows) * 1e3, min(peaks), max(peaks))
    bottom = HEIGHT - BOTTOM
    machine, main = found["machine"], rows[0]
    title = "AdamW step: time and extra GPU memory"
    about = (
        f"{main['params'] / 1e9:.2f}e9 f32 parameters in {main['tensors']} tensors; {machine['gpu']}, "
        f"torch {machine['torch']}; medians of {main['steps']} steps; commit {str(found['commit'])[:12]}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text class="title" x="20" y="28">{title}</text><text class="small" x="20" y="48">{escape(about)}</text>',
    ]
    for ms in axes.times:
        x = axes.x(ms)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="small" x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{ms}</text>')
    for size in axes.sizes:
        y = axes.y(size)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="small" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{bytes_text(size)}</text>')
    axis = "step, ms (less is better). Hollow: another workload, named there. Line: to the driver's count."
    parts.append(f'<text class="small" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 16}" text-anchor="middle">')
    parts.append(f"{axis}</text>")
    parts.append(f'<text class="small" x="20" y="{TOP - 10}">peak above parameters and gradients</text>')

    taken: list[tuple[float, float, float, float]] = []
    floors = {row["floor_step_s"] for row in rows if row["payload_bytes"] == 8 * main["params"]} - {None}
    for floor in floors:
        x = axes.x(floor * 1e3)
        label = f"the wire's floor, {floor * 1e3:.0f} ms"
        parts.append(f'<line class="floor" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="small" x="{x - 6:.1f}" y="{TOP + 16}" text-anchor="end">{label}</text>')
        taken += [(x - 190, TOP, x - 2, TOP + 24), (x - 1, TOP, x + 1, bottom)]
    spots = [(axes.x(row["median_step_s"] * 1e3), axes.y(peak)) for row, peak in zip(rows, peaks, strict=True)]
    taken += [(x - 7, y - 7, x + 7, y + 7) for x, y in spots]
    for row, peak, (x, y) in zip(rows, peaks, spots, strict=True):
        kind = "forebay" if row["name"].startswith("forebay") else "peer"
        other = " other" if (row["params"], row["dtype"]) != (main["params"], main["dtype"]) else ""
        if row["driver_peak_bytes"] > peak:
            parts.append(f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" ')
            parts.append(f'y2="{axes.y(row["driver_peak_bytes"]):.1f}"/>')
        parts.append(f'<circle class="{kind}{other}" cx="{x:.1f}" cy="{y:.1f}" r="5.5"/>')
        detail = f"{row['median_step_s'] * 1e3:.0f} ms, {bytes_text(round(row['torch_peak_bytes'] / MIB, 1) * MIB)}"
        if row["torch_peak_bytes"] >= 1024 * MIB:
            detail = f"{row['median_step_s'] * 1e3:.0f} ms, {row['torch_peak_bytes'] / MIB / 1024:.1f} GiB"
        left, middle = place(taken, x, y, 7.2 * max(len(row["label"]), len(detail)))
        if abs(middle - y) > 1:
            near = left if abs(left - x) < abs(left + 7 * len(row["label"]) - x) else left + 7 * len(row["label"])
            parts.append(f'<line class="leader" x1="{x:.1f}" y1="{y:.1f}" x2="{near:.1f}" y2="{middle:.1f}"/>')
        name = "name" if kind == "forebay" else ""
        parts.append(f'<text class="{name}" x="{left:.1f}" y="{middle - 3:.1f}">{escape(row["label"])}</text>')
        parts.append(f'<text class="small" x="{left:.1f}" y="{middle + 12:.1f}">{detail}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Read the results, write the picture."""
    if len(sys.argv) != 3:
        sys.exit("usage: python bench/plot.py RESULTS.json OUT.svg")
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    target.write_text(draw(json.loads(source.read_text())))
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
