/* The table of buffers: sorted by any column, with more rows on request. */

const ROWS = 100; // rows at first
const MORE = 500; // rows that the button adds

const COLUMNS = [
  ["bytes", "Bytes", (b) => humanBytes(b.bytes), "number"],
  ["category", "Category", (b) => [swatch(colorOf(b.category)), b.category]],
  ["where", "Source line", (b) => [make("span", { title: b.where }, nearby(b.where)),
    ...(b.source ? [make("code", { title: b.source }, b.source)] : [])]],
  ["operation", "Operation", (b) => b.operation],
  ["type", "Type", (b) => b.type],
  ["scope", "Scope", (b) => b.scope],
  ["why", "Why", (b) => b.why],
  ["born", "From step", (b) => b.born.toLocaleString("en"), "number"],
  ["dies", "To step", (b) => b.dies.toLocaleString("en"), "number"],
  ["name", "Name", (b) => b.name],
];

/** A source line with only the last folder of its path. */
function nearby(where) {
  const parts = where.split("/");
  return parts.length > 3 ? `…/${parts.slice(-2).join("/")}` : where;
}

function makeTable(place, more) {
  let buffers = [], key = "bytes", down = true, rows = ROWS;
  const compare = new Intl.Collator("en", { numeric: true }).compare;
  const body = make("tbody");
  const heads = COLUMNS.map(([field, title, , kind = ""]) => make("th", { class: kind, scope: "col" },
    make("button", { type: "button", "data-sort": field, onclick: () => sort(field) }, title)));
  place.replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, ...heads)), body));
  more.addEventListener("click", () => { rows += MORE; draw(); });

  function show(next) {
    buffers = next;
    rows = ROWS;
    draw();
  }

  /** Sort by a column, or reverse the order if it is sorted so already. Numbers start descending. */
  function sort(field) {
    down = key === field ? !down : NUMBERS.has(field);
    key = field;
    rows = ROWS;
    draw();
  }

  function draw() {
    const sign = down ? -1 : 1;
    const order = NUMBERS.has(key) ? (a, b) => a[key] - b[key] : (a, b) => compare(a[key], b[key]);
    // Buffers arrive largest first, and a stable sort keeps that order among equals.
    const sorted = key === "bytes" && down ? buffers : [...buffers].sort((a, b) => sign * order(a, b));
    heads.forEach((head, i) => {
      const [field, title] = COLUMNS[i];
      if (field === key) head.setAttribute("aria-sort", down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
      head.firstChild.textContent = field === key ? `${title} ${down ? "↓" : "↑"}` : title;
    });
    body.replaceChildren(...sorted.slice(0, rows).map((b) => make("tr", {}, ...COLUMNS.map(
      ([, , cell, kind = ""]) => make("td", { class: kind }, ...[cell(b)].flat())))));
    const left = sorted.length - rows;
    more.hidden = left <= 0;
    more.textContent = `Show ${count(Math.min(left, MORE), "more buffer")} of ${left.toLocaleString("en")}`;
  }

  return { show };
}
