/* The page of a graph: its data, its controls and what they do. */

const graph = data;
let order = "pushed", at = graph.operations.length, steps = stepsOf(graph, order);

const operationOf = (v) => graph.operations[v.operation];
const values = graph.values.filter((v) => v.operation >= 0);
for (const v of values) {
  const op = operationOf(v);
  v.searched = [v.name, v.label, v.type, v.activity, op.text, op.where, op.scope.join(" / ")].join("\n").toLowerCase();
}
const rightSide = (op) => op.inputs.length ? written(graph, op).split(" = ").slice(1).join(" = ") : op.text;
const table = makeTable($$("table"), $$("more"), "value", [
  ["Variable", (v) => make("code", {}, `${v.name}:${v.type}`)],
  ["Name", (v) => v.label],
  ["Operation", (v) => rightSide(operationOf(v))],
  ["Value", (v) => v.value_text, "number"],
  ["Adjoint", (v) => v.adjoint, "number"],
  ["Local derivatives", (v) => operationOf(v).partials],
  ["Activity", (v) => v.activity, (v) => v.activity ?? ""],
  ["Line", (v) => make("span", { title: operationOf(v).where }, operationOf(v).short_where)],
  ["Scope", (v) => operationOf(v).scope.join(" / ")],
]);

function search() {
  const found = matching(values, $$("search").value);
  table.show(found);
  $$("found").textContent = found.length === values.length ? count(values.length, "value")
    : `${count(found.length, "value")} of ${values.length.toLocaleString("en")} match`;
}
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
  table.mark(graph.values[value]);
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

$$("first").addEventListener("click", () => go(0));
$$("back").addEventListener("click", () => go(at - 1));
$$("next").addEventListener("click", () => go(at + 1));
$$("last").addEventListener("click", () => go(steps.length));
$$("turn").addEventListener("click", () => go(graph.operations.length + 1));
$$("step").addEventListener("input", (event) => go(Number(event.target.value)));
$$("search").addEventListener("input", search);
for (const button of document.querySelectorAll("[data-order]")) {
  button.addEventListener("click", () => choose(button.dataset.order));
}
$$("picture").addEventListener("keydown", (event) => {
  const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: steps.length }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  go(to);
});
startTheme();
search();
choose(order);
