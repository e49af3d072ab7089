// The choice of a rank, printing, colours, and the start.
const choice = document.getElementById("rank");

function applyChoice() {
  const chosen = choice ? choice.value : "all";
  for (const part of document.querySelectorAll("[data-rank]")) {
    part.hidden = part.dataset.rank === "all" ? chosen !== "all" : chosen !== "all" && part.dataset.rank !== chosen;
  }
  // For all ranks together, the sentences of the slowest one stand for all.
  for (const part of document.querySelectorAll("[data-own]")) part.hidden = chosen === "all" && RANKS.length > 1;
  choose(chosen === "all" ? RANKS : RANKS.filter((rank) => String(rank.rank) === chosen));
}

function recolour() {
  readColours();
  redraws.forEach((draw) => draw());
}

// Only what scrolls needs to be reached with the Tab key.
function markScrollers() {
  for (const box of document.querySelectorAll(".scroll, pre")) {
    box.tabIndex = box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight ? 0 : -1;
  }
}

let before = null;
window.addEventListener("beforeprint", () => {
  const closed = [...document.querySelectorAll("details:not([open])")];
  before = { from: view.from, to: view.to, closed };
  for (const one of closed) one.open = true;
  root.classList.add("printing");
  showAll();
  recolour();
});
window.addEventListener("afterprint", () => {
  if (!before) return;
  root.classList.remove("printing");
  for (const one of before.closed) one.open = false;
  show(before.from, before.to);
  before = null;
  recolour();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
new ResizeObserver(() => { markScrollers(); redraw(); }).observe(rowsCanvas.parentElement);
document.addEventListener("toggle", markScrollers, true);
if (choice) choice.addEventListener("change", applyChoice);
readColours();
applyChoice();
