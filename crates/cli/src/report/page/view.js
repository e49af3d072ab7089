// What is visible: ranks, a range of time, a selected span. All charts show the same range.
const MINIMUM_NS = 200;
const view = { ranks: RANKS, begin: 0, end: 1, from: 0, to: 1, selected: null };
const redraws = [];
let isDrawing = false;

function redraw() {
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    isDrawing = false;
    redraws.forEach((draw) => draw());
  });
}

function show(from, to) {
  const length = Math.min(Math.max(to - from, MINIMUM_NS), view.end - view.begin);
  view.from = Math.min(Math.max(from, view.begin), view.end - length);
  view.to = view.from + length;
  const range = document.getElementById("range");
  range.dataset.from = view.from;
  range.dataset.to = view.to;
  range.textContent = `${clock(view.from - view.begin)} to ${clock(view.to - view.begin)}: ${span(view.to - view.from)} of ${span(view.end - view.begin)}`;
  redraw();
}

const showAll = () => show(view.begin, view.end);

// The range becomes `factor` times as long; `at` stays where it is.
function zoom(factor, at = (view.from + view.to) / 2) {
  const length = Math.min(Math.max((view.to - view.from) * factor, MINIMUM_NS), view.end - view.begin);
  const share = (at - view.from) / (view.to - view.from);
  show(at - share * length, at + (1 - share) * length);
}

const pan = (share) => show(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from));

function nextStep() {
  const steps = view.ranks[0].steps;
  const isShown = (step) => Math.abs(step.from - view.from) < 1 && Math.abs(step.to - view.to) < 1;
  const next = steps[steps.findIndex(isShown) + 1] || steps[0];
  if (next) show(next.from, next.to);
}

function choose(ranks) {
  view.ranks = ranks;
  view.begin = Math.min(...ranks.map((rank) => rank.begin));
  view.end = Math.max(...ranks.map((rank) => rank.end));
  select(null);
  showAll();
}

// Times and sizes as text.
function span(ns) {
  if (ns < 1e3) return `${Math.round(ns)} ns`;
  if (ns < 1e6) return `${(ns / 1e3).toPrecision(3)} us`;
  if (ns < 1e9) return `${(ns / 1e6).toPrecision(ns < 1e8 ? 3 : 4)} ms`;
  return `${(ns / 1e9).toFixed(2)} s`;
}

function clock(ns, step = (view.to - view.from) / 200) {
  const digits = (unit) => Math.min(Math.max(Math.ceil(Math.log10(unit / step)), 0), 9);
  return ns < 1e9 && step < 1e8 ? `${(ns / 1e6).toFixed(digits(1e6))} ms` : `${(ns / 1e9).toFixed(digits(1e9))} s`;
}

function size(bytes) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let place = 0;
  while (bytes >= 999.5 && place < units.length - 1) { bytes /= 1000; place++; }
  return `${place === 0 || bytes >= 99.95 ? Math.round(bytes) : bytes.toPrecision(3)} ${units[place]}`;
}

// What is known about a span, as pairs.
function describe(row, lane, place) {
  const kind = row.kinds[lane.kind[place]], length = lane.end[place] - lane.start[place], bytes = lane.bytes[place];
  const known = [["row", row.name], ["start", clock(lane.start[place] - view.begin, 1e3)], ["duration", span(length)]];
  if (RANKS.length > 1) known.unshift(["rank", row.rank]);
  if (bytes) known.push(["bytes", `${size(bytes)} (${bytes})`]);
  if (bytes && length) known.push(["rate", `${(bytes / length).toFixed(2)} GB/s`]);
  if (lane.step[place] >= 0) known.push(["step", lane.step[place]]);
  for (const [name, value] of Object.entries(kind.args)) if (name !== "untimed") known.push([name, value]);
  return { title: kind.name || kind.category, known };
}

function select(selected) {
  view.selected = selected;
  const panel = document.getElementById("span");
  panel.textContent = selected ? "" : "Nothing is selected.";
  if (selected) {
    const { title, known } = describe(selected.row, selected.lane, selected.place);
    const heading = document.createElement("b");
    heading.textContent = title;
    panel.append(heading);
    for (const [name, value] of known) {
      const item = document.createElement("span");
      item.textContent = `${name} ${value}`;
      panel.append(item);
    }
  }
  redraw();
}
