/* Compare two reports: the bytes of each at its peak, and the differences. */

const LINES = 12; // the source lines with the largest differences
let against = null; // the number of the report that the shown one is compared with

/** Bytes at the peak, grouped by a property of the buffers. */
function sums(report, key) {
  const found = new Map();
  for (const b of report.buffers) {
    if (b.atPeak) found.set(b[key], (found.get(b[key]) ?? 0) + b.bytes);
  }
  return found;
}

/** Rows [name, bytes in one, bytes in other] of the groups that differ, largest difference first. */
function differing(one, other, key) {
  const [a, b] = [sums(one, key), sums(other, key)];
  return [...new Set([...a.keys(), ...b.keys()])]
    .map((name) => [name || "no line", a.get(name) ?? 0, b.get(name) ?? 0])
    .filter(([, x, y]) => x !== y)
    .sort((p, q) => Math.abs(q[1] - q[2]) - Math.abs(p[1] - p[2]));
}

const signed = (n) => n === null ? "not known" : `${n > 0 ? "+" : n < 0 ? "−" : ""}${humanBytes(Math.abs(n))}`;

/** Show the table that compares the shown report with another one, and the choice of that one. */
function difference(shown, place) {
  if (against === null || against === shown || against >= packed.length) against = shown ? 0 : 1;
  const [one, other] = [unpacked(shown), unpacked(against)];
  const choice = make("select", { onchange: (event) => {
    against = Number(event.target.value);
    difference(shown, place);
  } }, ...packed.map((r, i) => make("option", { value: i, ...(i === against ? { selected: "" } : {}) }, r.label))
    .filter((_, i) => i !== shown));
  const kinds = ["total", "argument", "output", "temp"].map((kind) =>
    [kind, one[`${kind}_bytes`], other[`${kind}_bytes`]]);
  const rows = (title, found) => found.length
    ? [make("tr", {}, make("th", { colspan: 4 }, title)), ...found.map(([name, a, b]) => make("tr", {},
      make("td", { class: "text" }, name),
      make("td", { class: "number" }, humanBytes(a)), make("td", { class: "number" }, humanBytes(b)),
      make("td", { class: "number" }, signed(a === null || b === null ? null : b - a))))]
    : [];
  const heads = ["", one.label, other.label, "Difference"].map((text, i) =>
    make("th", { class: i ? "number" : "", scope: "col" }, text));
  place.replaceChildren(make("p", {}, make("label", {}, "Compare with ", choice)), make("table", {},
    make("thead", {}, make("tr", {}, ...heads)),
    make("tbody", {}, ...rows("Bytes", kinds), ...rows("At the peak, by category", differing(one, other, "category")),
      ...rows("At the peak, by source line", differing(one, other, "where").slice(0, LINES)))));
}
