// The charts. Each one draws at most a few rectangles for each pixel, however many spans there are.
const root = document.documentElement;
const LANE = 18, GAP = 5, AXIS = 24, STRIP = 74;
let colour = {}, hatch = null;

function readColours() {
  const style = getComputedStyle(root);
  colour = Object.fromEntries(["page", "panel", "line", "text", "muted", "grid", "limit", "select", "s-0", "s-1", "s-2", "s-3",
    ...COLOURS.map((name) => `c-${name}`)].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  colour.spans = COLOURS.map((name) => colour[`c-${name}`]);
  colour.labels = colour.spans.map((text) => (luminance(text) > 0.3 ? "#10151c" : "#ffffff"));
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.strokeStyle = colour.page;
  pen.globalAlpha = 0.55;
  for (const shift of [-6, 0, 6]) { pen.moveTo(shift, 6); pen.lineTo(shift + 6, 0); }
  pen.stroke();
  hatch = tile;
}

function luminance(text) {
  const part = (at) => { const v = parseInt(text.slice(at, at + 2), 16) / 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  return 0.2126 * part(1) + 0.7152 * part(3) + 0.0722 * part(5);
}

// A canvas of a height, ready to draw on; `x` gives the place of a time.
function open(canvas, height) {
  const width = root.classList.contains("printing") ? 1040 : Math.max(canvas.clientWidth, 200);
  const dots = Math.min(Math.max(window.devicePixelRatio || 1, root.classList.contains("printing") ? 2 : 1), 16000 / Math.max(height, width));
  canvas.width = Math.round(width * dots);
  canvas.height = Math.round(height * dots);
  canvas.style.height = root.classList.contains("printing") ? "auto" : `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(dots, dots);
  pen.font = "12px system-ui, 'Segoe UI', 'Liberation Sans', sans-serif";
  pen.textBaseline = "middle";
  const left = width >= 640 ? 132 : 0, room = width - left;
  const scale = room / (view.to - view.from);
  return { pen, width, height, left, room, x: (time) => left + (time - view.from) * scale, time: (x) => view.from + (x - left) / scale };
}

// The time axis with lines down the chart, and the ends of steps.
function axis(chart) {
  const { pen, left, room, height, x } = chart;
  let step = 10 ** Math.floor(Math.log10((view.to - view.from) * 90 / room));
  step *= [1, 2, 5, 10].find((factor) => step * factor * room / (view.to - view.from) >= 70) || 10;
  pen.fillStyle = colour.muted;
  pen.textAlign = "left";
  for (let at = Math.ceil((view.from - view.begin) / step) * step; at <= view.to - view.begin; at += step) {
    const place = Math.round(x(at + view.begin)) + 0.5;
    pen.fillStyle = colour.grid;
    pen.fillRect(place, AXIS - 8, 1, height);
    pen.fillStyle = colour.muted;
    const label = clock(at, step);
    if (place + pen.measureText(label).width < left + room) pen.fillText(label, place + 4, AXIS / 2 - 1);
  }
  // The ends of steps, where they are not too close to be seen apart.
  const steps = view.ranks[0].steps.filter((one) => one.to >= view.from && one.to <= view.to);
  if (steps.length > room / 16) return;
  pen.globalAlpha = 0.6;
  for (const one of steps) pen.fillRect(Math.round(x(one.to)), AXIS - 4, 1, height);
  pen.globalAlpha = 1;
}

function layout() {
  const rows = view.ranks.flatMap((rank) => rank.rows);
  const lanes = rows.reduce((sum, row) => sum + row.lanes.length, 0);
  const height = Math.min(LANE, Math.max(4, Math.floor(6000 / lanes)));
  const narrow = document.getElementById("rows").clientWidth < 640 && !root.classList.contains("printing");
  let y = AXIS + 4;
  const placed = rows.map((row) => {
    if (narrow) y += 15;
    const found = { row, y, lanes: row.lanes.map((lane, place) => ({ lane, y: y + place * (height + 1) })), height };
    y += row.lanes.length * (height + 1) + (lanes > 60 ? 2 : GAP);
    return found;
  });
  return { placed, height: y + 4, narrow };
}

function drawRows() {
  const { placed, height, narrow } = layout();
  const chart = open(document.getElementById("rows"), height), { pen, left, width } = chart;
  axis(chart);
  pen.save();
  pen.beginPath();
  pen.rect(left, 0, width - left, height);
  pen.clip();
  for (const { row, lanes, height: tall, y } of placed) {
    for (const { lane, y } of lanes) drawLane(chart, lane, y, tall, row);
    pen.fillStyle = colour.text;
    for (const at of row.instants) if (at >= view.from && at <= view.to) pen.fillRect(chart.x(at) - 1, y - 2, 2, tall + 4);
  }
  pen.restore();
  pen.textAlign = "left";
  for (const { row, y, height: tall } of placed) {
    const name = RANKS.length > 1 ? `${row.rank}: ${row.name}` : row.name;
    pen.fillStyle = colour.text;
    if (narrow) pen.fillText(name, 0, y - 7);
    else if (tall >= 10) pen.fillText(name, 0, y + tall / 2, left - 8);
  }
}

function drawLane(chart, lane, y, tall, row) {
  const { pen, x, time, left, width } = chart, pixel = (view.to - view.from) / chart.room;
  let place = Math.max(below(lane.start, view.from) - 1, 0);
  while (place < lane.start.length && lane.end[place] < view.from) place++;
  while (place < lane.start.length && lane.start[place] <= view.to) {
    if (lane.end[place] - lane.start[place] >= 1.5 * pixel) {
      const from = Math.max(x(lane.start[place]), left), to = Math.min(x(lane.end[place]), width);
      drawSpan(pen, lane, place, row, from, to - from > 4 ? to - from - 0.5 : to - from, y, tall);
      place++;
      continue;
    }
    // Narrower than a pixel: the column of this pixel shows how much of it was busy.
    const column = Math.floor(x(lane.start[place])), from = time(column), to = time(column + 1);
    let filled = 0;
    for (const part of lane.parts) {
      const share = Math.min(between(part, part.busy, from, to) / (to - from), 1);
      if (share <= 0) continue;
      pen.fillStyle = colour.spans[part.colour];
      pen.globalAlpha = 0.3;
      pen.fillRect(column, y, 1, tall);
      pen.globalAlpha = 1;
      const solid = Math.max(share * tall, 1);
      pen.fillRect(column, y + tall - filled - solid, 1, solid);
      filled += solid;
    }
    place = Math.max(below(lane.start, to), place + 1);
  }
  const chosen = view.selected;
  if (chosen && chosen.lane === lane) {
    const from = x(lane.start[chosen.place]), to = x(lane.end[chosen.place]);
    pen.strokeStyle = colour.select;
    pen.lineWidth = 2;
    pen.strokeRect(from - 1, y - 1, Math.max(to - from, 1) + 2, tall + 2);
  }
}

function drawSpan(pen, lane, place, row, from, wide, y, tall) {
  const which = lane.colour[place];
  const untimed = row.kinds[lane.kind[place]].args.untimed;
  pen.fillStyle = colour.spans[which];
  pen.globalAlpha = untimed ? 0.35 : 1;
  pen.fillRect(from, y, wide, tall);
  pen.globalAlpha = 1;
  if (untimed) return;
  if (COLOURS[which] === "wait") {
    pen.fillStyle = pen.createPattern(hatch, "repeat");
    pen.fillRect(from, y, wide, tall);
  }
  const name = row.kinds[lane.kind[place]].name, fits = Math.floor((wide - 8) / 6.4);
  if (tall >= 14 && fits >= Math.min(name.length, 5)) {
    if (COLOURS[which] === "wait") {
      pen.fillStyle = colour.spans[which];
      pen.fillRect(from + 2, y + 2, Math.min(name.length, fits) * 6.4 + 4, tall - 4);
    }
    pen.fillStyle = colour.labels[which];
    pen.textAlign = "left";
    pen.fillText(name.length <= fits ? name : `${name.slice(0, fits - 1)}\u2026`, from + 4, y + tall / 2 + 0.5);
  }
}

// A strip of a chart: its name in the margin, its scale, and what `plot` draws.
function strip(chart, y, name, most, labels, plot) {
  const { pen, left, width } = chart;
  const below = y + STRIP - 16, top = y + (left ? 6 : 20);
  pen.fillStyle = colour.line;
  pen.fillRect(left, below, width - left, 1);
  pen.save();
  pen.beginPath();
  pen.rect(left, y, width - left, STRIP);
  pen.clip();
  plot((value) => below - (most > 0 ? (value / most) * (below - top) : 0), below);
  pen.restore();
  pen.textAlign = "left";
  pen.fillStyle = colour.text;
  pen.fillText(name, 0, left ? top + 8 : y + 8, left ? left - 8 : 120);
  pen.fillStyle = colour.muted;
  if (left) labels.forEach((label, place) => pen.fillText(label, 0, top + 24 + 16 * place, left - 8));
  else { pen.textAlign = "right"; pen.fillText(labels.join(", "), width, y + 8, width - 124); }
}

const rankName = (rank, name) => (RANKS.length > 1 ? `${rank.rank}: ${name}` : name);

function drawWire() {
  const strips = view.ranks.flatMap((rank) => [
    [rank, "to the device", rank.toDevice, "fetch", rank.limit && rank.limit.fetch_gbps],
    [rank, "from the device", rank.fromDevice, "store", rank.limit && rank.limit.store_gbps]]);
  const chart = open(document.getElementById("wire-chart"), AXIS + strips.length * STRIP), { pen, left, width, time, x } = chart;
  axis(chart);
  strips.forEach(([rank, name, parts, kind, limit], number) => {
    const rates = [];
    for (let column = left; column < width; column++) {
      const from = time(column), to = time(column + 1);
      rates.push(parts.reduce((sum, part) => sum + between(part, part.moved, from, to), 0) / (to - from));
    }
    const highest = Math.max(...rates), most = Math.max(highest, limit ? limit * 1.1 : 0);
    const labels = [`max ${highest.toFixed(1)} GB/s`];
    if (limit) labels.push(`- - limit ${limit.toFixed(1)}`);
    strip(chart, AXIS + number * STRIP, rankName(rank, name), most, labels, (height, below) => {
      pen.fillStyle = colour[`c-${kind}`];
      rates.forEach((rate, place) => { if (rate > 0) pen.fillRect(left + place, height(rate), 1, below - height(rate)); });
      if (!limit) return;
      pen.strokeStyle = colour.limit;
      pen.setLineDash([5, 4]);
      pen.beginPath();
      pen.moveTo(left, Math.round(height(limit)) + 0.5);
      pen.lineTo(width, Math.round(height(limit)) + 0.5);
      pen.stroke();
      pen.setLineDash([]);
    });
  });
}

function drawMemory() {
  const strips = view.ranks.flatMap((rank) => rank.counters.map((counter) => [rank, counter]));
  const canvas = document.getElementById("memory-chart");
  canvas.hidden = strips.length === 0;
  if (canvas.hidden) return;
  const chart = open(canvas, AXIS + strips.length * STRIP), { pen, left, width, x, time } = chart;
  axis(chart);
  strips.forEach(([rank, counter], number) => {
    const most = counter.series.reduce((high, one) => one.value.reduce((a, b) => Math.max(a, b), high), 0);
    strip(chart, AXIS + number * STRIP, rankName(rank, counter.name), most, [`max ${size(most)}`], (height) => {
      let key = width - 4;
      counter.series.forEach((one, place) => {
        pen.strokeStyle = pen.fillStyle = colour[`s-${place % 4}`];
        pen.lineWidth = 1.5;
        pen.setLineDash([[], [6, 3], [2, 2], [8, 3, 2, 3]][place % 4]);
        pen.beginPath();
        let at = Math.max(below(one.at, view.from) - 1, 0), last = -1;
        for (; at < one.at.length && one.at[at] <= view.to; at++) {
          const from = Math.max(x(one.at[at]), left);
          // At most two points for each pixel: the last value before it, and the highest in it.
          if (last >= 0 && from - last < 0.5 && at + 1 < one.at.length && one.value[at] <= one.value[at - 1]) continue;
          pen.lineTo(from, last < 0 ? height(one.value[at]) : height(one.value[at - 1]));
          pen.lineTo(from, height(one.value[at]));
          last = from;
        }
        if (last >= 0) pen.lineTo(at < one.at.length ? width : Math.min(x(rank.end), width), height(one.value[at - 1]));
        pen.stroke();
        pen.setLineDash([]);
        pen.textAlign = "right";
        const base = AXIS + number * STRIP + STRIP - 7;
        pen.fillText(one.name, key, base);
        key -= pen.measureText(one.name).width + 6;
        pen.fillRect(key - 14, base - 1, 14, 2);
        key -= 26;
      });
    });
  });
}

redraws.push(drawRows, drawWire, drawMemory);
