// The choice of a rank, printing, colours, and the start.
const choice = document.getElementById("rank");

function applyChoice() {
  const chosen = choice ? choice.value : "all";
  for (const part of document.querySelectorAll("[data-rank]")) {
    part.hidden = part.dataset.rank === "all" ? chosen !== "all" : chosen !== "all" && part.dataset.rank !== chosen;
  }
  choose(chosen === "all" ? RANKS : RANKS.filter((rank) => String(rank.rank) === chosen));
}

function recolour() {
  readColours();
  redraws.forEach((draw) => draw());
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
new ResizeObserver(redraw).observe(rowsCanvas.parentElement);
if (choice) choice.addEventListener("change", applyChoice);
readColours();
applyChoice();
