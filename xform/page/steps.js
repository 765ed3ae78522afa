/* The steps: one for each operation forward, then one for each edge backward. */

/** All steps, for one order of the backward pass: "pushed" or "pulled". */
function stepsOf(graph, order) {
  const forward = graph.operations.map((op) => ({ kind: "forward", operation: op.id }));
  const backward = graph[order].map(([edge, total]) => ({ kind: order, edge, total }));
  return [...forward, { kind: "seed", operation: graph.values[graph.output].operation }, ...backward];
}

/** The state after `n` steps: number of operations that ran, adjoints so far, edges taken. */
function known(graph, steps, n) {
  const state = { run: 0, adjoints: new Map(), taken: new Set(), now: steps[n - 1] };
  for (const step of steps.slice(0, n)) {
    if (step.kind === "forward") state.run++;
    else if (step.kind === "seed") state.adjoints.set(graph.output, "1.0");
    else {
      state.taken.add(step.edge);
      state.adjoints.set(graph.edges[step.edge].source, step.total);
    }
  }
  return state;
}

const nameOf = (value) => value.label ? `${value.name} (${value.label})` : value.name;

/** An operation as text, `c = mul a b`. With `short`, without its parameters. */
function written(graph, op, short = false) {
  const names = (ids) => ids.map((i) => graph.values[i].name).join(" ");
  const text = short ? op.text.split("[")[0] : op.text;
  return `${names(op.outputs)} = ${[text, names(op.inputs)].filter(Boolean).join(" ")}`;
}

/** The sentence that describes step `n`. */
function sentence(graph, steps, n) {
  if (n === 0) return ["Nothing has run yet. Press ▶ to run the function operation by operation."];
  const step = steps[n - 1], ahead = graph.operations.length;
  if (step.kind === "forward") {
    const op = graph.operations[step.operation];
    const values = op.outputs.map((i) => graph.values[i].value_text).join(", ");
    const inputs = op.inputs.length ? "" : ` ${op.outputs.map((i) => graph.values[i].label).join(" ")}`;
    return [`Forward, ${n} of ${ahead}: `, make("strong", {}, `${written(graph, op)}${inputs}`), `, which is ${values}.`,
      ...(op.short_where ? [" ", make("span", { class: "muted" }, op.short_where)] : [])];
  }
  if (step.kind === "seed") return ["Backward pass: the adjoint of the output ", make("strong", {}, nameOf(graph.values[graph.output])), " is 1."];
  const edge = graph.edges[step.edge], source = graph.values[edge.source];
  const op = graph.operations[edge.target];
  const outs = op.outputs.filter((i) => graph.values[i].activity === "active").map((i) => graph.values[i]);
  const consumer = outs.map((v) => v.name).join(", ");
  const way = step.kind === "pushed" ? `${consumer} pushes to ${source.name}` : `${source.name} pulls from ${consumer}`;
  const product = edge.number
    ? `${edge.partial} × ${outs[0].adjoint} = ${edge.flow}`
    : `the transposed local derivative, ${edge.partial}, times the adjoint of ${consumer} gives ${edge.flow}`;
  return [`Backward, ${n - ahead - 1} of ${steps.length - ahead - 1}, `, make("strong", {}, way), `: ${product}. `,
    `The adjoint of ${nameOf(source)} is now ${step.total}.`];
}
