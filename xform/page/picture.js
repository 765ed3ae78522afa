/* The picture of the graph. A closed scope is one vertex. Only a part of a large graph is drawn. */

const OPEN = 60; // at first, scopes are opened while there are at most this many vertices
const MOST = 150; // largest number of vertices drawn at once

const svg = (tag, attributes = {}, ...children) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};
const clipped = (text, n) => text.length > n ? `${text.slice(0, n - 1)}…` : text;

function makePicture(place, graph, changed) {
  const open = new Set();
  let drawn = null, range = null;

  /** The outermost closed scope around an operation, or null. */
  const standsFor = (op) => op.groups.find((g) => !open.has(g)) ?? null;
  const keyOf = (op) => { const g = standsFor(op); return g === null ? `o${op.id}` : `g${g}`; };
  const visible = () => new Set(graph.operations.map(keyOf)).size;

  /** Open scopes, smallest first, while the number of vertices stays within OPEN. */
  function openSome() {
    for (let grown = true; grown;) {
      grown = false;
      const closed = [...new Set(graph.operations.map(standsFor).filter((g) => g !== null))];
      for (const g of closed.sort((a, b) => graph.groups[a].size - graph.groups[b].size)) {
        open.add(g);
        if (visible() <= OPEN) { grown = true; break; }
        open.delete(g);
      }
    }
  }

  function setOpen(groups, on) {
    for (const g of groups) on ? open.add(g) : open.delete(g);
    drawn = null;
    changed();
  }

  /** The vertices: operations in open scopes, and closed scopes with their operations. */
  function vertices() {
    const found = new Map();
    for (const op of graph.operations) {
      const key = keyOf(op);
      if (!found.has(key)) found.set(key, { key, group: standsFor(op), operations: [] });
      found.get(key).operations.push(op);
    }
    return [...found.values()];
  }

  /** The vertices around an operation if there are more than can be drawn, else all. */
  function around(all, operation) {
    if (all.length <= MOST) return all;
    const at = Math.max(0, all.findIndex((v) => v.operations.some((op) => op.id === operation)));
    const from = Math.min(Math.max(0, at - MOST / 2), all.length - MOST);
    return all.slice(from, from + MOST);
  }

  function draw(state) {
    const edge = state.now && graph.edges[state.now.edge];
    const at = edge ? [graph.values[edge.source].operation, edge.target] : [state.now?.operation ?? 0];
    const keys = new Set(at.map((i) => keyOf(graph.operations[i])));
    if (!drawn || ![...keys].every((k) => range.has(k))) {
      const all = vertices();
      build(all, around(all, at[0]));
    }
    paintState(state, state.now ? keys : new Set());
  }

  function build(all, shown) {
    range = new Set(shown.map((v) => v.key));
    const many = new Map();
    for (const edge of graph.edges) {
      const source = graph.values[edge.source];
      if (source.operation < 0) continue;
      const ends = [keyOf(graph.operations[source.operation]), keyOf(graph.operations[edge.target])];
      if (ends[0] === ends[1] || !ends.every((k) => range.has(k))) continue;
      const inside = ends.some((k) => k[0] === "g");
      const key = inside ? ends.join(" ") : `${edge.id}`;
      if (!many.has(key)) many.set(key, { source: ends[0], target: ends[1], edges: [] });
      many.get(key).edges.push(edge);
    }
    const edges = [...many.values()];
    const { spots, chains, width, height } = placed(shown, edges);
    drawn = { vertices: new Map(), edges: [], spots };
    const lines = edges.map((e, i) => edgeOf(e, chains[i]));
    const boxes = shown.map((v) => vertexOf(v, spots.get(v.key)));
    place.replaceChildren(svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` }, arrow(), ...lines, ...boxes));
    $$("window").hidden = shown.length === all.length;
    $$("window").textContent = `The picture shows ${shown.length} of ${count(all.length, "vertex").replace("vertexs", "vertices")}, around the current step. The table lists all values.`;
    scopes();
  }

  const arrow = () => svg("defs", {}, svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 10, markerHeight: 10, markerUnits: "userSpaceOnUse", orient: "auto-start-reverse" }, svg("path", { d: "M0 0L8 4L0 8z", fill: "context-stroke" })));

  function edgeOf(e, chain) {
    const last = chain.length - 1;
    const points = chain.map((s, i) => i === 0 ? [chain.from, s.y + BOX.height] : i === last ? [chain.to, s.y] : [s.x, s.y + BOX.height / 2]);
    let d = `M${points[0]}`;
    for (let i = 1; i < points.length; i++) {
      const [[x0, y0], [x1, y1]] = [points[i - 1], points[i]];
      d += `C${x0},${(y0 + y1) / 2} ${x1},${(y0 + y1) / 2} ${x1},${y1}`;
    }
    const source = graph.values[e.edges[0].source];
    const passes = e.edges.some((one) => one.partial !== "");
    const [a, b] = points.slice(-2);
    const text = e.edges.length > 1 ? `${e.edges.length} edges` : clipped(e.edges[0].short, 16);
    const label = svg("text", { x: a[0] + (b[0] - a[0]) * 0.62, y: a[1] + (b[1] - a[1]) * 0.62 + 4 }, text);
    const kind = passes ? "active" : source.activity === "active" ? "stopped" : source.activity;
    const element = svg("g", { class: `edge ${kind}` }, svg("path", { d, "marker-end": "url(#arrow)" }), label);
    element.addEventListener("pointermove", (event) => showTip(event.clientX, event.clientY, factTable(e.edges.length > 1 ? [["edges", String(e.edges.length)]] : [
      ["from", nameOf(source)], ["read by", written(graph, graph.operations[e.edges[0].target])],
      ["local derivative", e.edges[0].partial || "none"], ["flow", e.edges[0].flow],
    ])));
    element.addEventListener("pointerleave", hideTip);
    drawn.edges.push({ ...e, element, kind });
    return element;
  }

  function vertexOf(v, spot) {
    const outs = v.operations.flatMap((op) => op.outputs.map((i) => graph.values[i]));
    const group = v.group === null ? null : graph.groups[v.group];
    const strongest = ["active", "stopped", "constant"].find((c) => outs.some((o) => o.activity === c)) ?? "constant";
    const [op] = v.operations;
    const title = group ? `▸ ${group.name}` : op.inputs.length ? written(graph, op, true) : `${outs[0].name} = ${outs[0].label || op.text}`;
    const left = spot.x - BOX.width / 2, line = (k, name) => svg("text", { x: left + 9, y: spot.y + 17 + 17 * k, class: name });
    const [head, value, adjoint] = [line(0, "head"), line(1, "value"), line(2, "adjoint")];
    head.textContent = clipped(title, 22);
    const element = svg("g", { class: `vertex ${group ? "scope" : strongest}` }, svg("rect", { x: left, y: spot.y, width: BOX.width, height: BOX.height, rx: 7 }), head, value, adjoint);
    if (group) {
      element.setAttribute("role", "button");
      element.setAttribute("tabindex", "0");
      element.setAttribute("aria-label", `Open ${group.name}`);
      const enter = () => setOpen([v.group], true);
      element.addEventListener("click", enter);
      element.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.stopPropagation(); enter(); } });
    }
    element.addEventListener("pointermove", (event) => showTip(event.clientX, event.clientY, factTable(group
      ? [["scope", group.name], ["operations", String(v.operations.length)], ["", "click to open"]]
      : [["operation", written(graph, op)], ["name", outs.map((o) => o.label).filter(Boolean).join(", ")], ["type", outs.map((o) => o.type).join(", ")],
        ["value", outs.map((o) => o.value_text).join(", ")], ["adjoint", outs.map((o) => o.adjoint).filter(Boolean).join(", ")],
        ["inside", op.closed ? count(op.closed, "equation") : ""], ["line", op.short_where], ["scope", op.scope.join(" / ")]])));
    element.addEventListener("pointerleave", hideTip);
    drawn.vertices.set(v.key, { ...v, element, value, adjoint, outs, group, kind: group ? "scope" : strongest });
    return element;
  }

  function paintState(state, keys) {
    const step = state.now;
    for (const [key, v] of drawn.vertices) {
      const ran = v.operations.filter((op) => op.id < state.run).length;
      const now = keys.has(key);
      v.element.setAttribute("class", ["vertex", v.kind, ran ? "" : "later", now ? "now" : ""].join(" "));
      const got = v.outs.filter((o) => state.adjoints.has(o.id));
      if (v.group) {
        v.value.textContent = `${ran} of ${count(v.operations.length, "operation")}`;
        v.adjoint.textContent = got.length ? `${got.length} with adjoints` : "";
      } else {
        v.value.textContent = ran ? clipped(v.outs.map((o) => o.value_text).join(", "), 22) : "";
        v.adjoint.textContent = got.length ? clipped(`adjoint ${got.map((o) => state.adjoints.get(o.id)).join(", ")}`, 22) : "";
      }
    }
    const acting = step?.kind === "pulled" ? [...keys].reverse() : [...keys]; // if only one fits, the last stays visible
    for (const key of acting) if (drawn.spots.has(key)) reveal(drawn.spots.get(key));
    for (const e of drawn.edges) {
      const back = step && step.edge !== undefined && e.edges.some((one) => one.id === step.edge);
      const ahead = step && step.kind === "forward" && e.edges.some((one) => one.target === step.operation);
      const flowed = e.edges.some((one) => state.taken.has(one.id));
      e.element.setAttribute("class", ["edge", e.kind, flowed ? "flowed" : "", back || ahead ? "now" : ""].join(" "));
    }
  }

  /** Scroll the picture, but not the page, until a vertex is well inside it. */
  function reveal({ x, y }) {
    const margin = 60, box = { left: x - BOX.width / 2, right: x + BOX.width / 2, top: y, bottom: y + BOX.height };
    const inner = place.firstChild, indent = Math.max(0, (place.clientWidth - inner.clientWidth) / 2);
    if (box.left + indent < place.scrollLeft || box.right + indent > place.scrollLeft + place.clientWidth) {
      place.scrollLeft = x + indent - place.clientWidth / 2;
    }
    if (box.top < place.scrollTop + margin || box.bottom > place.scrollTop + place.clientHeight - margin) {
      place.scrollTop = y - place.clientHeight / 2 + BOX.height / 2;
    }
  }

  /** Show buttons that open and close scopes. */
  function scopes() {
    $$("scopes").hidden = graph.groups.length === 0;
    const opened = graph.groups.map((_, i) => i).filter((i) => open.has(i));
    const shown = opened.filter((i) => graph.groups[i].parent === null || open.has(graph.groups[i].parent)).slice(0, 12);
    $$("scopes").replaceChildren(make("span", { class: "muted" }, "Scopes"),
      make("button", { type: "button", id: "open-all", onclick: () => setOpen(graph.groups.map((_, i) => i), true) }, "open all"),
      make("button", { type: "button", id: "close-all", onclick: () => setOpen(opened, false) }, "close all"),
      ...shown.map((i) => make("button", { type: "button", "data-scope": i, "aria-label": `Close ${graph.groups[i].name}`, onclick: () => setOpen([i], false) }, `▾ ${graph.groups[i].name}`)));
  }

  openSome();
  return { draw };
}
