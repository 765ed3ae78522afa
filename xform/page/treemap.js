/* A treemap of live buffers: areas are bytes; nested groups, hover, zoom by click, keys. */

const HEAD = 20; // height of a group's title

const GROUPINGS = {
  category: (b) => [b.category, b.where || "no source line"],
  where: (b) => [b.where || "no source line"],
  scope: (b) => (b.scope ? b.scope.split("/") : ["no scope"]),
};

const leafOf = (b) => ({ name: b.name, bytes: b.bytes, count: 1, buffer: b });

/** The buffer of a group with a single buffer. */
const only = (group) => group.buffers[0] ?? only([...group.groups.values()][0]);

/** A tree of groups of buffers; a group that contains only one group is merged with it. */
function grouped(buffers, grouping) {
  const root = { name: "all", bytes: 0, count: 0, groups: new Map(), buffers: [], up: null };
  for (const b of buffers) {
    let node = root;
    for (const part of ["", ...GROUPINGS[grouping](b)]) {
      if (part !== "") {
        if (!node.groups.has(part)) {
          node.groups.set(part, { name: part, bytes: 0, count: 0, groups: new Map(), buffers: [] });
        }
        node = node.groups.get(part);
      }
      node.bytes += b.bytes;
      node.count += 1;
    }
    node.buffers.push(b);
  }
  const finish = (node) => {
    node.children = [...node.groups.values()].map((child) => {
      while (child.groups.size === 1 && !child.buffers.length) {
        const [inner] = child.groups.values();
        child = { ...inner, name: `${child.name}/${inner.name}` };
      }
      return child.count === 1 ? leafOf(only(child)) : finish(child);
    });
    node.children.push(...node.buffers.map(leafOf));
    node.children = node.children.filter((c) => c.bytes > 0).sort((a, b) => b.bytes - a.bytes);
    node.color = node.children[0]?.buffer?.category ?? node.children[0]?.color;
    for (const child of node.children) child.up = node;
    return node;
  };
  return finish(root);
}

/**
 * Split a box into boxes with given areas, as close to squares as possible; largest items first.
 * Bruls, Huizing, van Wijk, "Squarified treemaps", 2000, section 3.
 */
function squarify(items, x, y, width, height, put) {
  const scale = width * height / Math.max(items.reduce((sum, item) => sum + item.bytes, 0), 1e-300);
  for (let first = 0; first < items.length;) {
    const side = Math.min(width, height);
    const ratio = (row, last) => Math.max(
      side * side * items[first].bytes * scale / (row * row),
      row * row / (side * side * items[last].bytes * scale));
    let row = items[first].bytes * scale, last = first + 1, worst = ratio(row, first);
    while (last < items.length) {
      const more = row + items[last].bytes * scale, longer = ratio(more, last);
      if (longer > worst) break;
      [row, worst, last] = [more, longer, last + 1];
    }
    const depth = row / Math.max(side, 1e-9), wide = width >= height;
    for (let at = 0, i = first; i < last; i++) {
      const length = items[i].bytes * scale / Math.max(depth, 1e-9);
      if (wide) put(items[i], x, y + at, depth, length);
      else put(items[i], x + at, y, length, depth);
      at += length;
    }
    if (wide) [x, width] = [x + depth, width - depth];
    else [y, height] = [y + depth, height - depth];
    first = last;
  }
}

function makeTreemap(canvas, trail) {
  let root = null, shown = null, tiles = [], selected = -1;

  /** Show buffers; the view stays in the group that was zoomed into, if it still exists. */
  function show(buffers, grouping) {
    const path = pathOf(shown).slice(1).map((node) => node.name);
    root = grouped(buffers, grouping);
    shown = root;
    for (const name of path) {
      const next = shown.children.find((c) => c.children && c.name === name);
      if (!next) break;
      shown = next;
    }
    draw();
  }

  function pathOf(node) {
    const path = [];
    for (; node; node = node.up) path.unshift(node);
    return path;
  }

  function zoom(node) {
    shown = node;
    selected = -1;
    hideTip();
    draw();
    say(`${node.name}: ${humanBytes(node.bytes)} in ${count(node.count, "buffer")}`);
  }

  function draw() {
    trail.replaceChildren(...pathOf(shown).flatMap((node, i) => {
      const button = make("button", { type: "button", onclick: () => zoom(node) }, node.name);
      if (node === shown) button.setAttribute("aria-current", "true");
      return i ? ["›", button] : [button];
    }), make("span", { class: "muted" }, humanBytes(shown.bytes)));
    canvas.setAttribute("aria-label", `Boxes of ${count(shown.count, "buffer")}, ${humanBytes(shown.bytes)}`);

    const { context, width, height } = fresh(canvas);
    tiles = [];
    if (!shown.children.length) {
      context.fillStyle = paint.muted;
      context.fillText("Nothing to show.", 16, 32);
      return;
    }
    place(context, shown, 0, 0, width, height);
    if (tiles[selected]) {
      const { x, y, w, h } = tiles[selected];
      context.strokeStyle = paint.ink;
      context.lineWidth = 3;
      context.strokeRect(x + 2, y + 2, w - 4, h - 4);
      context.lineWidth = 1;
    }
  }

  function place(context, group, x, y, width, height) {
    squarify(group.children, x, y, width, height, (node, x, y, w, h) => {
      if (!node.children || w * h < 40) return leaf(context, node, x, y, w, h);
      const titled = w > 56 && h > 3 * HEAD;
      tiles.push({ node, x, y, w, h });
      if (!titled) {
        place(context, node, x, y, w, h);
        context.strokeStyle = paint.card;
        if (w > 6 && h > 6) context.strokeRect(x, y, w, h);
        return;
      }
      context.fillStyle = paint.line;
      context.fillRect(x + 1, y + 1, w - 2, h - 2);
      context.fillStyle = paint.ink;
      const size = `  ${humanBytes(node.bytes)}`, room = w - 12;
      const left = room - context.measureText(size).width;
      const name = tail(context, node.name, left);
      const both = context.measureText(name).width <= left;
      context.fillText(both ? name + size : cut(context, tail(context, name, room), room), x + 6, y + 15);
      place(context, node, x + 2, y + HEAD, w - 4, h - HEAD - 2);
    });
  }

  function leaf(context, node, x, y, w, h) {
    const fill = colorOf(node.buffer?.category ?? node.color);
    tiles.push({ node, x, y, w, h });
    context.fillStyle = fill;
    const gap = w > 3 && h > 3 ? 0.5 : 0;
    context.fillRect(x + gap, y + gap, Math.max(w - 2 * gap, 0.3), Math.max(h - 2 * gap, 0.3));
    if (w < 44 || h < 18) return;
    const b = node.buffer;
    const size = humanBytes(node.bytes);
    const whole = context.measureText(size).width <= w - 10; // a cut number would be wrong
    const name = b ? tail(context, b.scope || b.where || b.name, w - 10) : node.name;
    const lines = [name, whole ? size : "", b?.type ?? ""].filter(Boolean);
    context.fillStyle = inkOn(fill);
    lines.slice(0, Math.floor((h - 4) / 15)).forEach((line, i) => {
      context.fillText(cut(context, line, w - 10), x + 5, y + 14 + 15 * i);
    });
  }

  function tip(node, x, y) {
    const b = node.buffer;
    const share = `${percent(node.bytes, root.bytes)} of the buffers shown`;
    if (!b) {
      showTip(x, y, make("strong", {}, node.name),
        `${humanBytes(node.bytes)} in ${count(node.count, "buffer")}, ${share}`);
      return `${node.name}, ${humanBytes(node.bytes)} in ${count(node.count, "buffer")}`;
    }
    showTip(x, y, make("strong", {}, b.name), factTable([
      ["bytes", `${humanBytes(b.bytes)} (${b.bytes.toLocaleString("en")}), ${share}`],
      ["type", b.type], ["operation", b.operation], ["line", b.where], ["", b.source], ["scope", b.scope],
      ["category", swatch(colorOf(b.category)), b.category], ["why", b.why],
      ["lives", `step ${b.born} to ${b.dies}`]]));
    return [b.name, humanBytes(b.bytes), b.type, b.operation, b.where, b.scope, b.category].join(", ");
  }

  /** The innermost tile at a point; later tiles lie inside earlier ones. */
  const tileAt = (x, y) => tiles.findLastIndex((t) =>
    x >= t.x && x < t.x + t.w && y >= t.y && y < t.y + t.h);

  /** The group to zoom into from a tile: one level below the group shown. */
  function into(node) {
    while (node.up && node.up !== shown) node = node.up;
    return node.children ? node : null;
  }

  canvas.addEventListener("pointermove", (event) => {
    const i = tileAt(event.offsetX, event.offsetY);
    if (i < 0) hideTip();
    else tip(tiles[i].node, event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("click", (event) => {
    const i = tileAt(event.offsetX, event.offsetY);
    const group = i < 0 ? null : into(tiles[i].node);
    if (group) zoom(group);
  });
  canvas.addEventListener("blur", () => { selected = -1; hideTip(); draw(); });
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (move && tiles.length) {
      selected = Math.min(Math.max(selected + move, 0), tiles.length - 1);
      draw();
      const { node, x, y } = tiles[selected], box = canvas.getBoundingClientRect();
      say(tip(node, box.left + x, box.top + y));
    } else if (event.key === "Enter" && tiles[selected]) {
      const group = into(tiles[selected].node);
      if (group) zoom(group);
    } else if (event.key === "Escape") {
      if (shown.up) zoom(shown.up);
    } else return;
    event.preventDefault();
  });

  return { show, draw, shown: () => shown };
}
