/* The page of a graph: its data, its controls and what they do. */

const graph = JSON.parse($$("data").textContent);
const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
let order = "pushed", at = graph.operations.length, steps = stepsOf(graph, order);

$$("function").textContent = `Graph of ${graph.function}`;
$$("about").textContent = graph.about;

const table = makeTable($$("table"), $$("more"), graph);
const picture = makePicture($$("picture"), graph, refresh);

function refresh() {
  const state = known(graph, steps, at);
  $$("step").max = steps.length;
  $$("step").value = at;
  $$("step").setAttribute("aria-valuetext", `step ${at} of ${steps.length}`);
  $$("now").replaceChildren(...sentence(graph, steps, at));
  for (const [id, off] of [["first", at === 0], ["back", at === 0], ["next", at === steps.length], ["last", at === steps.length]]) $$(id).disabled = off;
  const step = state.now;
  const value = !step ? -1 : step.edge !== undefined ? graph.edges[step.edge].source : graph.operations[step.operation].outputs[0];
  table.mark(value);
  picture.draw(state);
}

function go(to) {
  at = Math.min(Math.max(0, to), steps.length);
  refresh();
}

/** Choose the order of the backward pass. The forward steps stay; the backward pass restarts. */
function choose(next) {
  order = next;
  steps = stepsOf(graph, order);
  for (const button of document.querySelectorAll("[data-order]")) {
    button.setAttribute("aria-pressed", button.dataset.order === order);
  }
  go(Math.min(at, graph.operations.length + 1));
}

function theme() {
  readTheme();
  $$("theme").textContent = paint.dark ? "☀ Light" : "☾ Dark";
  $$("theme").setAttribute("aria-label", `Switch to ${paint.dark ? "light" : "dark"} colours`);
}

$$("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = paint.dark ? "light" : "dark";
  theme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme);
$$("first").addEventListener("click", () => go(0));
$$("back").addEventListener("click", () => go(at - 1));
$$("next").addEventListener("click", () => go(at + 1));
$$("last").addEventListener("click", () => go(steps.length));
$$("turn").addEventListener("click", () => go(graph.operations.length + 1));
$$("step").addEventListener("input", (event) => go(Number(event.target.value)));
$$("search").addEventListener("input", (event) => table.search(event.target.value));
for (const button of document.querySelectorAll("[data-order]")) {
  button.addEventListener("click", () => choose(button.dataset.order));
}
$$("picture").addEventListener("keydown", (event) => {
  const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: steps.length }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  go(to);
});
theme();
choose(order);
