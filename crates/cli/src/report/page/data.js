// Spans as columns of numbers, and sums over any range of them in the time of a binary search.
const data = JSON.parse(document.getElementById("data").textContent);

// What a span is drawn as: passes by their name, everything else by its category.
const COLOURS = ["forward", "backward", "step", "fetch", "update", "store", "activation_fetch", "activation_store",
  "wake", "sleep", "save", "wait", "other"];
const TO_DEVICE = ["fetch", "activation_fetch", "wake"];
const FROM_DEVICE = ["store", "activation_store", "sleep"];

function colourOf(kind) {
  const name = kind.category === "pass" ? kind.name.split(" ")[0] : kind.category;
  return COLOURS.includes(name) ? COLOURS.indexOf(name) : COLOURS.indexOf("other");
}

// Spans in order that do not overlap. `busy` and `moved` are sums before each span, of nanoseconds and of bytes.
function series(start, end, bytes) {
  const busy = new Float64Array(start.length + 1), moved = new Float64Array(start.length + 1);
  for (let i = 0; i < start.length; i++) {
    busy[i + 1] = busy[i] + end[i] - start[i];
    moved[i + 1] = moved[i] + bytes[i];
  }
  return { start, end, bytes, busy, moved };
}

// How many of `list` are less than `value`.
function below(list, value) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}

// The sum of `what` up to a time. A span that goes on then counts in part.
function upTo(spans, what, time) {
  const count = below(spans.start, time);
  if (count === 0) return 0;
  const last = count - 1, whole = what[count] - what[last];
  const rest = spans.end[last] > time ? (spans.end[last] - time) / (spans.end[last] - spans.start[last]) : 0;
  return what[count] - whole * rest;
}

const between = (spans, what, from, to) => upTo(spans, what, to) - upTo(spans, what, from);

function unpackLane(lane, begin, kinds) {
  const count = lane.start.length;
  const start = new Float64Array(count), end = new Float64Array(count), bytes = Float64Array.from(lane.bytes);
  let time = begin;
  for (let i = 0; i < count; i++) {
    time += lane.start[i];
    start[i] = time;
    end[i] = time + lane.duration[i];
  }
  const colour = Uint8Array.from(lane.kind, (kind) => kinds[kind].colour);
  const parts = [];
  for (const one of new Set(colour)) {
    const places = [];
    for (let i = 0; i < count; i++) if (colour[i] === one) places.push(i);
    const pick = (list) => Float64Array.from(places, (place) => list[place]);
    parts.push({ colour: one, ...(places.length === count ? series(start, end, bytes) : series(pick(start), pick(end), pick(bytes))) });
  }
  return { ...series(start, end, bytes), kind: Uint32Array.from(lane.kind), step: lane.step, colour, parts };
}

function unpackRank(rank) {
  const kinds = rank.kinds.map((kind) => ({ ...kind, colour: colourOf(kind) }));
  const rows = rank.rows.map((row) => ({
    row: row.row, name: row.name, rank: rank.rank, kinds, lanes: row.lanes.map((lane) => unpackLane(lane, rank.begin, kinds)),
    instants: rank.instants.filter((at) => at[1] === row.row).map((at) => at[0] + rank.begin),
  }));
  const parts = rows.flatMap((row) => row.lanes).flatMap((lane) => lane.parts);
  const copies = (names) => parts.filter((part) => names.includes(COLOURS[part.colour]));
  const counters = rank.counters.map((counter) => ({
    name: counter.name,
    series: counter.series.map((one) => ({ name: one.name, at: Float64Array.from(one.at, (at) => at + rank.begin), value: one.value })),
  }));
  return {
    rank: rank.rank, begin: rank.begin, end: rank.begin + rank.length, rows, counters, limit: rank.limit,
    steps: rank.steps.map(([step, from, to]) => ({ step, from: from + rank.begin, to: to + rank.begin })),
    toDevice: copies(TO_DEVICE), fromDevice: copies(FROM_DEVICE),
  };
}

const RANKS = data.map(unpackRank);
