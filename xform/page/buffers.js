/* Unpack the reports into objects, select buffers, and format numbers. */

const FIELDS = ["name", "bytes", "type", "operation", "where", "scope", "category", "why", "source", "born", "dies"];
const NUMBERS = new Set(["bytes", "born", "dies"]);

/** Unpack a report: replace text numbers by texts, and add to each buffer the text to search. */
function unpack(packed) {
  const buffers = packed.rows.map((row) => {
    const b = {};
    FIELDS.forEach((field, i) => { b[field] = NUMBERS.has(field) ? row[i] : packed.text[row[i]]; });
    b.atPeak = row[FIELDS.length] === 1;
    b.counted = row[FIELDS.length + 1] === 1;
    b.space = row[FIELDS.length + 2];
    b.searched = [b.name, b.type, b.operation, b.where, b.scope, b.category, b.why, b.source]
      .join("\n").toLowerCase();
    return b;
  });
  buffers.sort((a, b) => b.bytes - a.bytes);
  return { ...packed, buffers };
}

/** The buffers in main memory that are live at a step: their bytes add up to the live bytes. */
function liveAt(report, step) {
  return report.buffers.filter((b) => b.counted && b.born <= step && step <= b.dies);
}

const ON_CHIP = new Set([1, 3]); // the memory spaces of a TPU's fast memory

/** The buffers in the fast memory on the chip, at the step with the most bytes there. */
function onChip(report) {
  const fast = report.buffers.filter((b) => ON_CHIP.has(b.space));
  const change = new Float64Array(report.live.length + 1);
  for (const b of fast) {
    change[b.born] += b.bytes;
    change[b.dies + 1] -= b.bytes;
  }
  let [now, most, at] = [0, 0, 0];
  change.forEach((bytes, step) => {
    now += bytes;
    if (now > most) [most, at] = [now, step];
  });
  return fast.filter((b) => b.born <= at && at <= b.dies);
}

/**
 * The upper edge of each category's layer at each step, for the buffers in main memory. The last
 * layer has the bytes that belong to no buffer.
 */
function layers(report, categories) {
  const n = report.live.length;
  const place = new Map(categories.map((c, i) => [c.name, i]));
  const change = categories.map(() => new Float64Array(n + 1));
  for (const b of report.buffers.filter((b) => b.counted)) {
    const of = change[place.get(b.category)];
    of[Math.min(Math.max(b.born, 0), n)] += b.bytes;
    of[Math.min(Math.max(b.dies + 1, 0), n)] -= b.bytes;
  }
  const tops = categories.map(() => new Float64Array(n));
  const now = new Float64Array(categories.length);
  for (let step = 0; step < n; step++) {
    let top = 0;
    for (let i = 0; i < now.length; i++) tops[i][step] = top += now[i] += change[i][step];
    tops[now.length - 1][step] = report.live[step];
  }
  return tops;
}

function scaled(n, base, units) {
  let power = 0;
  while (Math.abs(n) / base ** power >= base - 0.05 && power < units.length - 1) power++;
  return power ? `${(n / base ** power).toFixed(1)} ${units[power]}` : `${n} ${units[0]}`;
}

const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const humanBytes = (n) => n === null ? "not known" : scaled(Math.round(n), 1024, BYTE_UNITS);
const humanFlops = (n) =>
  scaled(n, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"]);
const percent = (part, whole) => `${(100 * part / Math.max(whole, 1)).toFixed(1)}%`;

const BUFFER_COLUMNS = [
  ["Bytes", (b) => humanBytes(b.bytes), "number", "bytes"],
  ["Category", (b) => [swatch(colorOf(b.category)), b.category], "", "category"],
  ["Source line", (b) => [make("span", { title: b.where }, nearby(b.where)),
    ...(b.source ? [make("code", { title: b.source }, b.source)] : [])], "", "where"],
  ["Operation", (b) => b.operation, "", "operation"],
  ["Type", (b) => b.type, "", "type"],
  ["Scope", (b) => b.scope, "", "scope"],
  ["Why", (b) => b.why, "", "why"],
  ["From step", (b) => b.born.toLocaleString("en"), "number", "born"],
  ["To step", (b) => b.dies.toLocaleString("en"), "number", "dies"],
  ["Name", (b) => b.name, "", "name"],
];

/** A source line with only the last folder of its path. */
function nearby(where) {
  const parts = where.split("/");
  return parts.length > 3 ? `…/${parts.slice(-2).join("/")}` : where;
}
