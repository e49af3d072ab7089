// Mouse, wheel, touch and keys. Every action has a key and, where it makes sense, a button.
const rowsCanvas = document.getElementById("rows"), tip = document.getElementById("tip");

function place(event) {
  const box = rowsCanvas.getBoundingClientRect(), left = box.width >= 640 ? 132 : 0;
  const x = event.clientX - box.left, y = event.clientY - box.top;
  return { x, y, time: view.from + ((x - left) / (box.width - left)) * (view.to - view.from), pixel: (view.to - view.from) / (box.width - left) };
}

// The span at a place, or how many there are in its pixel.
function at({ y, time, pixel }) {
  for (const { row, lanes, height } of layout().placed) {
    for (const { lane, y: top } of lanes) {
      if (y < top - 1 || y > top + height + 1) continue;
      const first = below(lane.end, time - 2 * pixel), after = below(lane.start, time + 2 * pixel);
      let best = -1, near = Infinity;
      for (let number = first; number < Math.min(after, first + 50); number++) {
        const away = Math.max(lane.start[number] - time, time - lane.end[number], 0);
        if (away < near) { near = away; best = number; }
      }
      if (best >= 0) return { row, lane, place: best, many: below(lane.start, time + pixel / 2) - below(lane.end, time - pixel / 2) };
    }
  }
  return null;
}

function hover(event) {
  const where = place(event), found = at(where);
  tip.hidden = !found;
  if (!found) return;
  const { row, lane } = found;
  if (found.many > 2) {
    const from = where.time - where.pixel / 2, to = where.time + where.pixel / 2;
    const busy = between(lane, lane.busy, from, to) / (to - from), bytes = between(lane, lane.moved, from, to);
    tip.textContent = `${found.many} spans of ${row.name} in ${span(to - from)}\nbusy ${(100 * Math.min(busy, 1)).toFixed(0)} %` +
      (bytes ? `\n${size(bytes)}, ${(bytes / (to - from)).toFixed(1)} GB/s` : "");
  } else {
    const { title, known } = describe(row, lane, found.place);
    tip.textContent = [title, ...known.map(([name, value]) => `${name} ${value}`)].join("\n");
  }
  const box = rowsCanvas.getBoundingClientRect();
  const wide = tip.offsetWidth, tall = tip.offsetHeight;
  tip.style.left = `${Math.max(Math.min(where.x + 14, box.width - wide), 0)}px`;
  tip.style.top = `${where.y + 18 + tall > box.height && where.y > tall + 10 ? where.y - tall - 10 : where.y + 18}px`;
}

const pointers = new Map();
let dragged = false;

rowsCanvas.addEventListener("pointerdown", (event) => {
  pointers.set(event.pointerId, place(event));
  rowsCanvas.setPointerCapture(event.pointerId);
  dragged = pointers.size > 1;
  tip.hidden = true;
});
rowsCanvas.addEventListener("pointermove", (event) => {
  const before = pointers.get(event.pointerId), now = place(event);
  if (!before) { hover(event); return; }
  if (pointers.size === 1) {
    if (!dragged && Math.abs(now.x - before.x) < 4) return;
    dragged = true;
    const moved = (now.x - before.x) * now.pixel;
    show(view.from - moved, view.to - moved);
  } else {
    // What is under the other finger stays there.
    const [other] = [...pointers].filter(([id]) => id !== event.pointerId).map(([, where]) => where);
    const was = Math.max(Math.abs(before.x - other.x), 10), is = Math.max(Math.abs(now.x - other.x), 10);
    zoom(was / is, now.time + (other.x - now.x) * now.pixel);
  }
  pointers.set(event.pointerId, now);
});
for (const kind of ["pointerup", "pointercancel"]) {
  rowsCanvas.addEventListener(kind, (event) => {
    if (kind === "pointerup" && pointers.has(event.pointerId) && !dragged) select(at(place(event)));
    pointers.delete(event.pointerId);
  });
}
rowsCanvas.addEventListener("pointerleave", () => { tip.hidden = true; });
rowsCanvas.addEventListener("dblclick", (event) => { if (view.selected) toSelected(); else zoom(0.25, place(event).time); });
rowsCanvas.addEventListener("wheel", (event) => {
  if (document.activeElement !== rowsCanvas && !event.ctrlKey) return;
  const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
  // At its widest, the page scrolls on.
  if (!sideways && event.deltaY > 0 && view.to - view.from >= view.end - view.begin && !event.ctrlKey) return;
  event.preventDefault();
  const lines = event.deltaMode === 1 ? 20 : 1;
  if (sideways) pan(((event.deltaX || event.deltaY) * lines) / 1000);
  else zoom(Math.exp(Math.max(Math.min(event.deltaY * lines, 300), -300) / 400), place(event).time);
}, { passive: false });

function toSelected() {
  const { lane, place: number } = view.selected, length = Math.max(lane.end[number] - lane.start[number], MINIMUM_NS / 2);
  show(lane.start[number] - length, lane.end[number] + length);
}

function selectAndShow(row, lane, number) {
  if (number < 0 || number >= lane.start.length) return;
  select({ row, lane, place: number });
  const middle = (lane.start[number] + lane.end[number]) / 2, half = (view.to - view.from) / 2;
  if (middle < view.from || middle > view.to) show(middle - half, middle + half);
}

// The span `by` places on in its lane; the first visible one if nothing is selected.
function along(by) {
  const chosen = view.selected;
  if (chosen) { selectAndShow(chosen.row, chosen.lane, chosen.place + by); return; }
  const row = view.ranks[0].rows[0];
  selectAndShow(row, row.lanes[0], Math.min(below(row.lanes[0].start, view.from), row.lanes[0].start.length - 1));
}

// The span of the next lane at about the same time.
function across(by) {
  const chosen = view.selected;
  if (!chosen) { along(0); return; }
  const all = view.ranks.flatMap((rank) => rank.rows).flatMap((row) => row.lanes.map((lane) => ({ row, lane })));
  const next = all[all.findIndex(({ lane }) => lane === chosen.lane) + by];
  if (!next) return;
  const time = chosen.lane.start[chosen.place];
  selectAndShow(next.row, next.lane, Math.min(below(next.lane.end, time), next.lane.start.length - 1));
}

const actions = { in: () => zoom(0.5), out: () => zoom(2), left: () => pan(-0.2), right: () => pan(0.2), all: showAll, step: nextStep };
const keys = {
  "+": actions.in, "=": actions.in, "-": actions.out, _: actions.out, 0: showAll, Home: showAll, s: nextStep,
  ArrowLeft: actions.left, ArrowRight: actions.right, ArrowUp: () => across(-1), ArrowDown: () => across(1),
  n: () => along(1), p: () => along(-1), Escape: () => select(null), Enter: () => { if (view.selected) toSelected(); },
};
rowsCanvas.addEventListener("keydown", (event) => {
  const action = keys[event.key];
  if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  action();
});
for (const button of document.querySelectorAll("[data-do]")) button.addEventListener("click", actions[button.dataset.do]);
