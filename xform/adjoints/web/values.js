/* The table of values. */

const ROWS = 100; // rows shown at first
const MORE = 500; // rows added by the button

const COLUMNS = [
  ["Variable", (v) => [make("code", {}, `${v.name}:${v.type}`)]],
  ["Name", (v) => [v.label]],
  ["Operation", (v, op, graph) => [op.inputs.length ? written(graph, op).split(" = ").slice(1).join(" = ") : op.text]],
  ["Value", (v) => [v.value_text], "number"],
  ["Adjoint", (v) => [v.adjoint], "number"],
  ["Local derivatives", (v, op) => [op.partials]],
  ["Activity", (v) => [v.activity]],
  ["Line", (v, op) => [make("span", { title: op.where }, op.short_where)]],
  ["Scope", (v, op) => [op.scope.join(" / ")]],
];

function makeTable(place, more, graph) {
  const all = graph.values.filter((v) => v.operation >= 0);
  for (const v of all) {
    const op = graph.operations[v.operation];
    v.searched = [v.name, v.label, v.type, v.activity, op.text, op.where, op.scope.join(" / ")].join("\n").toLowerCase();
  }
  let found = all, rows = ROWS, current = -1, shown = new Map();
  const heads = COLUMNS.map(([title, , kind = ""]) => make("th", { class: kind, scope: "col" }, title));
  const body = make("tbody");
  place.replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, ...heads)), body));
  more.addEventListener("click", () => { rows += MORE; draw(); });

  function search(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    found = all.filter((v) => words.every((w) => v.searched.includes(w)));
    rows = ROWS;
    draw();
  }

  function draw() {
    shown = new Map();
    body.replaceChildren(...found.slice(0, rows).map((v) => {
      const op = graph.operations[v.operation];
      const cells = COLUMNS.map(([title, cell, kind = ""]) =>
        make("td", { class: title === "Activity" ? v.activity : kind }, ...cell(v, op, graph)));
      const row = make("tr", {}, ...cells);
      shown.set(v.id, row);
      return row;
    }));
    const left = found.length - rows;
    more.hidden = left <= 0;
    more.textContent = `Show ${count(Math.min(left, MORE), "more value")} of ${left.toLocaleString("en")}`;
    $$("found").textContent = found.length === all.length ? count(all.length, "value") : `${count(found.length, "value")} of ${all.length.toLocaleString("en")} match`;
    mark(current);
  }

  /** Highlight the row of a value. */
  function mark(id) {
    shown.get(current)?.removeAttribute("aria-current");
    current = id;
    shown.get(current)?.setAttribute("aria-current", "true");
  }

  draw();
  return { search, mark };
}
