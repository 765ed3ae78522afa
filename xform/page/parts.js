/* The parts that pages share: elements, tooltips, tables, search, themes and canvases. Texts of the user's are inserted as text, never as HTML. */

const data = JSON.parse(document.getElementById("data").textContent);

const $$ = (id) => document.getElementById(id);

/** An element with attributes, and children that are elements or text. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "color") element.style.background = value;
    else if (name === "width") element.style.width = value;
    else if (name === "left") element.style.left = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

document.body.append(make("div", { id: "tip", role: "tooltip", hidden: "" }),
  make("p", { id: "say", class: "hidden", "aria-live": "polite" }));
const swatch = (color) => make("span", { class: "swatch", color });

/** Show the tooltip near a point, inside the window. */
function showTip(x, y, ...children) {
  const tip = $$("tip");
  tip.replaceChildren(...children);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 16 + width < innerWidth ? x + 16 : Math.max(8, x - width - 12);
  const top = y + 16 + height < innerHeight ? y + 16 : Math.max(8, y - height - 12);
  tip.style.left = `${Math.min(left, Math.max(8, innerWidth - width - 8))}px`;
  tip.style.top = `${top}px`;
}

const hideTip = () => { $$("tip").hidden = true; };
const say = (text) => { $$("say").textContent = text; };

/** A two-column table of the facts whose value is not empty. */
function factTable(facts) {
  const rows = facts.filter(([, value]) => value !== "");
  return make("table", {}, ...rows.map(([name, ...value]) =>
    make("tr", {}, make("td", {}, name), make("td", {}, ...value))));
}

const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";

/** Clear a canvas, match its resolution to the screen's, and return its context and size. */
function fresh(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const sharp = devicePixelRatio || 1;
  const [w, h] = [Math.round(width * sharp), Math.round(height * sharp)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(sharp, 0, 0, sharp, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = FONT;
  return { context, width, height };
}

const INKS = ["ink", "muted", "line", "card", "accent", "alarm"];
const paint = { dark: false }; // and the colours of the style sheet by name, read once for each theme

/** Read the theme (the user's choice on the page, else the system's) and its colours. */
function readTheme() {
  const chosen = document.documentElement.dataset.theme;
  paint.dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const probe = document.body.appendChild(make("i"));
  for (const name of INKS) {
    probe.style.color = `var(--${name})`;
    paint[name] = getComputedStyle(probe).color;
  }
  probe.remove();
}

/** Let the button switch the theme, and call `repaint` after each change of it. */
function startTheme(repaint = () => {}) {
  const button = $$("theme");
  const show = () => {
    readTheme();
    button.textContent = paint.dark ? "☀ Light" : "☾ Dark";
    button.setAttribute("aria-label", `Switch to ${paint.dark ? "light" : "dark"} colours`);
  };
  const change = () => { show(); repaint(); };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = paint.dark ? "light" : "dark";
    change();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", change);
  button.hidden = false;
  show();
}

/** Dark or white, whichever is easier to read on a colour `#rrggbb`. */
function inkOn(color) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));
  return 0.3 * r + 0.59 * g + 0.11 * b < 140 ? "#ffffff" : "#14171d";
}

/** Draw a text with a halo, so that it can be read on any ground. */
function halo(context, text, x, y, ground) {
  context.save();
  context.strokeStyle = ground;
  context.lineWidth = 4;
  context.lineJoin = "round";
  context.strokeText(text, x, y);
  context.restore();
  context.fillText(text, x, y);
}

/** Drop the first parts of a path until the rest fits a width. */
function tail(context, path, width) {
  const parts = path.split("/");
  let text = path;
  while (parts.length > 1 && context.measureText(text).width > width) {
    parts.shift();
    text = `…/${parts.join("/")}`;
  }
  return text;
}

/** Cut a text to a width, with an ellipsis; empty if fewer than four letters fit. */
function cut(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let [low, high] = [0, text.length];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(`${text.slice(0, middle)}…`).width <= width) low = middle;
    else high = middle - 1;
  }
  return low > 3 ? `${text.slice(0, low)}…` : "";
}

const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

/** The rows whose text `searched` has every word of a search. */
function matching(rows, search) {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  return words.length ? rows.filter((row) => words.every((w) => row.searched.includes(w))) : rows;
}

const ROWS = 100; // rows of a table at first
const MORE = 500; // rows that its button adds

/**
 * A table with more rows on request. A column is [title, cell, kind, field]: `cell` returns what a
 * row has there, `kind` is a class or returns one, and a column with a field sorts the table.
 * The rows that are shown arrive in descending order of the field `first`, if that is given.
 */
function makeTable(place, more, noun, columns, first = null) {
  let all = [], key = first, down = true, rows = ROWS, marked = null, shown = new Map();
  const collate = new Intl.Collator("en", { numeric: true }).compare;
  const compare = (a, b) => typeof a === "number" ? a - b : collate(a, b);
  const of = (kind, row) => typeof kind === "function" ? kind(row) : kind ?? "";
  const body = make("tbody");
  const heads = columns.map(([title, , kind, field]) => make("th", { class: of(kind, {}), scope: "col" },
    field ? make("button", { type: "button", "data-sort": field, onclick: () => sort(field) }, title) : title));
  place.replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, ...heads)), body));
  more.addEventListener("click", () => { rows += MORE; draw(); });

  function show(next) {
    all = next;
    rows = ROWS;
    draw();
  }

  /** Sort by a column, or reverse the order if it is sorted so already. Numbers start descending. */
  function sort(field) {
    down = key === field ? !down : typeof all[0]?.[field] === "number";
    key = field;
    show(all);
  }

  function draw() {
    const sign = down ? -1 : 1;
    // A stable sort keeps the order of arrival among equals.
    const sorted = key === first && down ? all : [...all].sort((a, b) => sign * compare(a[key], b[key]));
    heads.forEach((head, i) => {
      const [title, , , field] = columns[i];
      if (!field) return;
      if (field === key) head.setAttribute("aria-sort", down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
      head.firstChild.textContent = field === key ? `${title} ${down ? "↓" : "↑"}` : title;
    });
    shown = new Map(sorted.slice(0, rows).map((row) => [row, make("tr", {}, ...columns.map(
      ([, cell, kind]) => make("td", { class: of(kind, row) }, ...[cell(row)].flat())))]));
    body.replaceChildren(...shown.values());
    const left = sorted.length - rows;
    more.hidden = left <= 0;
    more.textContent = `Show ${count(Math.min(left, MORE), `more ${noun}`)} of ${left.toLocaleString("en")}`;
    mark(marked);
  }

  /** Highlight a row. */
  function mark(row) {
    shown.get(marked)?.removeAttribute("aria-current");
    marked = row;
    shown.get(marked)?.setAttribute("aria-current", "true");
  }

  return { show, mark };
}
