/* The state of the page (report, step, grouping and search), and its parts. */

const started = performance.now();
const { categories, reports: packed } = data;
const ofCategory = new Map(categories.map((c) => [c.name, c]));
const colorOf = (name) => (ofCategory.get(name) ?? categories.at(-1))[paint.dark ? "dark" : "light"];
const reports = packed.map(() => null); // unpacked when shown
const unpacked = (i) => reports[i] ??= unpack(packed[i]);

let report = null, step = 0, grouping = "category";
const timeline = makeTimeline($$("timeline"), categories, inspect);
const treemap = makeTreemap($$("treemap"), $$("trail"));
const bufferTable = (id, more) => makeTable($$(id), $$(more), "buffer", BUFFER_COLUMNS, "bytes");
const table = bufferTable("table", "more"), chip = bufferTable("chip-table", "chip-more");
$$("about").after(make("p", { id: "description", class: "muted" }));

function open(i) {
  report = unpacked(i);
  headline();
  compilerParts();
  advise();
  comparison(i);
  timeline.show(report);
  legend();
  fastMemory();
  inspect(report.peak_step);
}

/** Show the buffers in the fast memory on the chip, if the program has any there. */
function fastMemory() {
  const fast = onChip(report);
  $$("chip").hidden = !fast.length;
  chip.show(fast);
}

function headline() {
  const { device, total_bytes: total } = report;
  const capacity = device.capacity_bytes;
  const each = device.count > 1 ? ` on each of ${device.count} devices` : "";
  $$("function").textContent = `Memory of ${report.function}`;
  $$("about").textContent = `compiled for ${device.name} (${report.target})` +
    (device.count > 1 ? `, ${device.count} devices; bytes are per device` : "");
  $$("description").replaceChildren(`Compiled: ${report.compiled}`, make("br"),
    `Arguments: ${report.given}`,
    ...(report.planned ? [make("br"), `Planned: ${report.planned}`] : []),
    ...(report.note ? [make("br"), report.note] : []));
  $$("headline").replaceChildren(humanBytes(total), make("small", {},
    capacity ? ` of ${humanBytes(capacity)}${each}` : ` at its peak${each}`));
  const spare = device.limit_bytes - total - report.constant_bytes, room = $$("room");
  room.className = report.refused ? "over" : !capacity ? "muted" : spare < 0 ? "over" : "fits";
  room.textContent = report.refused ? "Does not fit: the compiler refused it."
    : !capacity ? "The capacity of the device is not known."
    : spare < 0 ? `Does not fit: ${humanBytes(-spare)} too much`
      : `Fits: ${humanBytes(spare)} (${percent(spare, device.limit_bytes)}) to spare`;
  if (device.limit_bytes < capacity)
    room.textContent += `. XLA recomputes operations above ${humanBytes(device.limit_bytes)}.`;

  policy();

  const kinds = [
    ["arguments", report.argument_bytes, "--kind-a"],
    ["outputs", report.output_bytes === null ? null : report.output_bytes - report.alias_bytes, "--kind-b"],
    ["temporaries", report.temp_bytes, "--kind-c"],
  ];
  fillBar($$("bar"), kinds, capacity, Math.max(total, capacity ?? 0));
  $$("bar").setAttribute("aria-label", `${kinds.map(([n, b]) => `${n} ${humanBytes(b)}`).join(", ")}` +
    (capacity ? ` of ${humanBytes(capacity)}` : ""));
  $$("facts").replaceChildren(...[
    ["Arguments", humanBytes(report.argument_bytes), "parameters, state and batch", "--kind-a"],
    ["Outputs", humanBytes(kinds[1][1]),
      `and ${humanBytes(report.alias_bytes)} in donated arguments`, "--kind-b"],
    ["Temporaries", humanBytes(report.temp_bytes), "intermediate values, at their peak", "--kind-c"],
    ["Constants", humanBytes(report.constant_bytes), "in the program, not in the total"],
    ["Host memory", humanBytes(report.host_bytes), "offloaded, not in the total"],
    ...(report.vmem_bytes ? [["Fast memory", humanBytes(report.vmem_bytes), "on the chip (VMEM), not in the total"]] : []),
    ["Code", humanBytes(report.code_bytes), "not in the total"],
    ["Work", humanFlops(report.flops), device.count > 1 ? "over all devices" : "in one call"],
    ...(report.compile_seconds ? [["Compiled in", `${report.compile_seconds.toFixed(1)} s`, ""]] : []),
  ].map(([name, value, note, color]) => make("div", {},
    make("dt", {}, ...(color ? [swatch(`var(${color})`)] : []), name),
    make("dd", {}, value, make("small", {}, note)))));
}

/** The policy as text to copy, and whether it was planned and compiled for this program. */
function policy() {
  const saves = report.buffers.some((b) => b.atPeak && b.category === "activation");
  const code = report.code || (saves ? 'policy="auto"' : "");
  const known = report.code
    ? `verified: planned, and compiled for ${report.device.name}, it takes ${humanBytes(report.total_bytes)}`
    : "not verified: neither planned nor compiled for this program";
  $$("policy").hidden = !code;
  $$("policy").replaceChildren("Policy to copy: ", make("code", { class: "copy" }, code), " ",
    make("span", { class: report.code && !$$("room").classList.contains("over") ? "fits" : "muted" }, known));
}

/** Show the advice of the report. */
function advise() {
  $$("advice").hidden = !report.advice.length;
  $$("advice").querySelector("ul").replaceChildren(...report.advice.map((text) => make("li", {}, text)));
}

/** Show what the compiler added: operations that it runs again, copies, padding, scratch. */
function compilerParts() {
  const again = report.recomputed.map((r) =>
    `${r.operation} runs again ${times(r.count)}, ${humanFlops(r.flops)} of products, at ${r.where}`);
  const parts = report.added.map((r) => `${r.kind}: ${humanBytes(r.peak_bytes)} at the peak` +
    (r.moved_bytes ? `, ${humanBytes(r.moved_bytes)} moved ${times(r.count)}` : "") + (r.where && `, most at ${r.where}`));
  $$("added").hidden = !again.length && !parts.length;
  $$("added").querySelector("ul").replaceChildren(...[...again, ...parts].map((text) => make("li", {}, text)));
}

function times(count) {
  return `in ${count} run${count === 1 ? "" : "s"}`;
}

function fillBar(bar, parts, capacity, whole) {
  bar.classList.add("bar");
  const width = (bytes) => `${100 * bytes / Math.max(whole, 1)}%`;
  bar.replaceChildren(...parts.map(([, bytes, color]) =>
    make("i", { color: `var(${color})`, width: width(Math.max(bytes, 0)) })));
  if (capacity && capacity < whole) bar.append(make("b", { left: width(capacity) }));
}

/** Show a row for each report, if there are several. */
function comparison(shown) {
  $$("comparison").hidden = packed.length < 2;
  const whole = Math.max(...packed.map((r) => Math.max(r.total_bytes, r.device.capacity_bytes ?? 0)));
  const rows = packed.map((r, i) => {
    const capacity = r.device.capacity_bytes;
    const bar = make("div", { class: "thin" });
    fillBar(bar, [["", r.total_bytes, "--kind-b"]], capacity, whole);
    const spare = r.refused ? -1 : r.device.limit_bytes - r.total_bytes - r.constant_bytes;
    const room = r.refused ? "refused" : !capacity ? "" : `${humanBytes(Math.abs(spare))} ${spare < 0 ? "too much" : "to spare"}`;
    const choice = { type: "button", "aria-pressed": i === shown, onclick: () => open(i) };
    const row = make("tr", {},
      make("td", {}, make("button", choice, r.label)),
      make("td", {}, bar),
      make("td", { class: "number" }, humanBytes(r.total_bytes)),
      make("td", { class: `number ${!capacity && !r.refused ? "muted" : spare < 0 ? "over" : "fits"}` }, room),
      make("td", { class: "number" }, humanBytes(r.temp_bytes)),
      make("td", { class: "number" }, humanFlops(r.flops)));
    if (i === shown) row.setAttribute("aria-current", "true");
    return row;
  });
  const heads = ["Report", "", "Total", "Room", "Temporaries", "Work"].map((title, i) =>
    make("th", { scope: "col", class: i > 1 ? "number" : "" }, title));
  $$("reports").replaceChildren(make("table", {},
    make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows)));
  if (packed.length > 1) difference(shown, $$("difference"));
}

/** Show the meaning of each colour, and its bytes at the peak. */
function legend() {
  const at = new Map(), add = (name, bytes) => at.set(name, (at.get(name) ?? 0) + bytes);
  for (const b of report.buffers) add(b.category, b.atPeak ? b.bytes : 0);
  const rest = timeline.rest();
  if (rest.some((bytes) => bytes > 0.5)) add(categories.at(-1).name, rest[report.peak_step]);
  $$("legend").replaceChildren(...categories.filter((c) => at.has(c.name)).map((c) =>
    make("li", {}, swatch(colorOf(c.name)), make("b", {}, c.name),
      make("span", { class: "muted" }, c.meaning), at.get(c.name) ? humanBytes(at.get(c.name)) : "none")));
}

/** Show the buffers that are live at a step. */
function inspect(at) {
  step = at;
  const peak = step === report.peak_step;
  $$("live-title").textContent = peak ? "Live buffers at the peak" : `Live buffers at step ${step}`;
  $$("to-peak").hidden = peak;
  refresh();
}

function refresh() {
  const before = performance.now();
  const live = liveAt(report, step), search = $$("search").value;
  const found = matching(live, search);
  const sum = (buffers) => buffers.reduce((total, b) => total + b.bytes, 0);
  const [part, whole] = [sum(found), sum(live)];
  $$("found").textContent = search.trim()
    ? `${count(found.length, "buffer")} of ${live.length.toLocaleString("en")} match: ` +
      `${humanBytes(part)}, ${percent(part, whole)} of ${humanBytes(whole)}`
    : `${count(live.length, "buffer")}, ${humanBytes(whole)}`;
  treemap.show(found, grouping);
  table.show(found);
  performance.measure("refresh", { start: before });
}

/** Draw everything that has colours again. */
function repaint() {
  legend();
  timeline.draw();
  fastMemory();
  refresh();
}

function group(by) {
  grouping = by;
  for (const button of document.querySelectorAll("[data-group]")) {
    button.setAttribute("aria-pressed", button.dataset.group === by);
  }
}

$$("zoom-in").addEventListener("click", () => timeline.zoom(0.5));
$$("zoom-out").addEventListener("click", () => timeline.zoom(2));
$$("zoom-reset").addEventListener("click", timeline.reset);
$$("to-peak").addEventListener("click", () => timeline.pick(report.peak_step));
$$("search").addEventListener("input", refresh);
for (const button of document.querySelectorAll("[data-group]")) {
  button.addEventListener("click", () => { group(button.dataset.group); refresh(); });
}
group(grouping);
startTheme(repaint);
open(0);
new ResizeObserver(() => { timeline.draw(); treemap.draw(); }).observe($$("treemap"));
performance.measure("first paint", { start: started });
