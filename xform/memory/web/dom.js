/* Helpers for elements, tooltips and canvases. Texts of the user's are inserted as text, never as HTML. */

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
