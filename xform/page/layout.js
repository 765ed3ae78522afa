/* The layout: vertices in layers from top to bottom. Edges point down and seldom cross. */

const BOX = { width: 172, height: 58, gap: 26, layer: 112 };

/**
 * Assign vertices to layers. An edge that passes a layer gets a bend there. Returns the layers of
 * vertices and bends, and each edge as a chain of them.
 */
function layered(vertices, edges) {
  const rank = new Map(vertices.map((v) => [v.key, 0]));
  const into = new Map(vertices.map((v) => [v.key, []])), out = new Map(vertices.map((v) => [v.key, []]));
  for (const e of edges) { into.get(e.target).push(e.source); out.get(e.source).push(e.target); }
  // The vertices are in execution order.
  for (const v of vertices) {
    rank.set(v.key, Math.max(0, ...into.get(v.key).map((u) => rank.get(u) + 1)));
  }
  // Put a vertex without inputs just above its first reader.
  for (const v of vertices) {
    if (!into.get(v.key).length && out.get(v.key).length) {
      rank.set(v.key, Math.min(...out.get(v.key).map((w) => rank.get(w))) - 1);
    }
  }
  const layers = [];
  const put = (spot) => { (layers[spot.rank] ??= []).push(spot); return spot; };
  const spots = new Map(vertices.map((v) => [v.key, put(spotAt(rank.get(v.key), BOX.width))]));
  const chains = edges.map((e) => {
    const chain = [spots.get(e.source)];
    for (let r = rank.get(e.source) + 1; r < rank.get(e.target); r++) chain.push(put(spotAt(r, 18)));
    chain.push(spots.get(e.target));
    for (let i = 1; i < chain.length; i++) {
      chain[i].above.push(chain[i - 1]);
      chain[i - 1].below.push(chain[i]);
    }
    return chain;
  });
  return { layers: layers.filter(Boolean), spots, chains };
}

const spotAt = (rank, width) => ({ rank, width, x: 0, above: [], below: [] });
const mean = (spots) => spots.reduce((sum, s) => sum + s.x, 0) / spots.length;

/**
 * Place all vertices and bends. Sweeps down and up move each towards the mean of its neighbours in
 * the layer before.
 */
function placed(vertices, edges) {
  const { layers, spots, chains } = layered(vertices, edges);
  layers.forEach((layer) => layer.forEach((s, i) => { s.x = i * (BOX.width + BOX.gap); }));
  for (let sweep = 0; sweep < 12; sweep++) {
    const down = sweep % 2 === 0;
    for (const layer of down ? layers : [...layers].reverse()) {
      const wish = new Map(layer.map((s) => {
        const near = down ? s.above : s.below;
        return [s, near.length ? mean(near) : s.x];
      }));
      layer.sort((a, b) => wish.get(a) - wish.get(b));
      spread(layer, wish);
    }
  }
  const all = layers.flat();
  const left = Math.min(...all.map((s) => s.x - s.width / 2)), right = Math.max(...all.map((s) => s.x + s.width / 2));
  layers.forEach((layer, r) => layer.forEach((s) => {
    s.x += 20 - left;
    s.y = 16 + r * BOX.layer;
  }));
  ports(chains);
  return { spots, chains, width: right - left + 40, height: layers.length * BOX.layer - BOX.layer + BOX.height + 32 };
}

/** Spread the ends of edges along a vertex, in the order of the vertices at their other ends. */
function ports(chains) {
  for (const [end, next, side] of [[(c) => c[0], (c) => c[1], "from"], [(c) => c.at(-1), (c) => c.at(-2), "to"]]) {
    const at = Map.groupBy(chains, end);
    for (const [spot, own] of at) {
      own.sort((a, b) => next(a).x - next(b).x);
      const step = Math.min(40, (BOX.width - 28) / own.length);
      own.forEach((c, i) => { c[side] = spot.x + (i - (own.length - 1) / 2) * step; });
    }
  }
}

/** Move the spots of a layer as near to their wished positions as possible, without overlap. */
function spread(layer, wish) {
  const room = (a, b) => (a.width + b.width) / 2 + BOX.gap;
  const pushed = (row, sign) => {
    const xs = [];
    row.forEach((s, i) => {
      const w = wish.get(s);
      xs.push(i ? sign * Math.max(sign * w, sign * xs[i - 1] + room(row[i - 1], s)) : w);
    });
    return xs;
  };
  const right = pushed(layer, 1), left = pushed([...layer].reverse(), -1).reverse();
  layer.forEach((s, i) => { s.x = (right[i] + left[i]) / 2; });
}
