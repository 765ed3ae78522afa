/* Live bytes over the steps of the program: hover, zoom by wheel, pan by drag, keys. */

const MARGIN = { left: 58, right: 10, top: 22, bottom: 46 };
const LARGEST = 6; // buffers that the tooltip lists

function makeTimeline(canvas, categories, inspect) {
  let report = null, tops = [], from = 0, to = 1, cursor = null, chosen = 0, drag = null;

  const inner = () => canvas.clientWidth - MARGIN.left - MARGIN.right;
  const stepAt = (x) => {
    const step = Math.floor(from + (x - MARGIN.left) / inner() * (to - from));
    return Math.min(Math.max(step, 0), report.live.length - 1);
  };
  const xOf = (step) => MARGIN.left + (step - from) / (to - from) * inner();

  function show(next) {
    report = next;
    tops = layers(report, categories);
    chosen = report.peak_step;
    cursor = null;
    canvas.setAttribute("aria-label", `Live bytes over ${count(report.live.length, "step")}; ` +
      `peak ${humanBytes(peak())} at step ${report.peak_step}`);
    reset();
  }

  const peak = () => report.live[report.peak_step] ?? 0;
  const reset = () => { [from, to] = [0, Math.max(report.live.length, 1)]; draw(); };

  /** Show `length` steps from `start` on, clamped to the program. */
  function view(start, length) {
    const n = Math.max(report.live.length, 1);
    length = Math.min(Math.max(length, Math.min(8, n)), n);
    from = Math.min(Math.max(start, 0), n - length);
    to = from + length;
    draw();
  }
  const zoom = (factor, at = (from + to) / 2) => view(at - (at - from) * factor, (to - from) * factor);

  /** For each column of pixels, its edges and the step in it with the most bytes. */
  function columns() {
    const found = [];
    const wide = Math.max(1, inner() / (to - from));
    for (let x = 0; x < inner() - 1e-6;) {
      const first = Math.floor(from + x / inner() * (to - from) + 1e-9);
      const end = wide > 1 ? xOf(first + 1) - MARGIN.left : x + 1;
      const last = wide > 1 ? first + 1 : Math.ceil(from + end / inner() * (to - from));
      let most = Math.min(first, report.live.length - 1);
      for (let s = most; s < Math.min(last, report.live.length); s++) {
        if (report.live[s] > report.live[most]) most = s;
      }
      found.push([x, Math.min(end, inner()), most]);
      x = Math.max(end, x + 1e-3);
    }
    return found;
  }

  function draw() {
    const { context, width, height } = fresh(canvas);
    const { ink, muted, alarm, accent, card } = paint;
    context.fillStyle = muted;
    if (!report.live.length) {
      context.fillText("The compiler reported no steps.", 16, 32);
      return;
    }
    const capacity = report.device.capacity_bytes;
    const near = capacity && capacity <= 3 * peak();
    const most = Math.max(peak(), near ? capacity : 0, 1) * 1.04;
    const low = height - MARGIN.bottom;
    const yOf = (bytes) => low - bytes / most * (low - MARGIN.top);
    axes(context, width, height, yOf, most);

    const drawn = columns();
    let under = null;
    categories.forEach((category, i) => {
      context.fillStyle = category[paint.dark ? "dark" : "light"];
      context.beginPath();
      for (const [x, end, step] of drawn) {
        const top = tops[i][step], bottom = under ? under[step] : 0;
        if (top - bottom < 0.5) continue;
        context.rect(MARGIN.left + x, yOf(top), end - x + 0.3, yOf(bottom) - yOf(top));
      }
      context.fill();
      under = tops[i];
    });

    context.textAlign = "left";
    if (near) {
      context.strokeStyle = context.fillStyle = alarm;
      context.setLineDash([6, 4]);
      stroke(context, MARGIN.left, yOf(capacity), width - MARGIN.right, yOf(capacity));
      context.setLineDash([]);
      halo(context, `capacity ${humanBytes(capacity)}`, MARGIN.left + 6, yOf(capacity) - 5, card);
    } else if (capacity) {
      context.fillText(`capacity ${humanBytes(capacity)}, far above`, MARGIN.left + 6, 13);
    }
    const at = xOf(report.peak_step + 0.5);
    if (at >= MARGIN.left && at <= width - MARGIN.right) {
      context.fillStyle = ink;
      context.beginPath();
      context.moveTo(at, yOf(peak()));
      context.lineTo(at - 5, yOf(peak()) - 8);
      context.lineTo(at + 5, yOf(peak()) - 8);
      context.fill();
      const right = at < width - 140;
      context.textAlign = right ? "left" : "right";
      halo(context, `peak ${humanBytes(peak())}`, at + (right ? 9 : -9), yOf(peak()) - 4, card);
    }
    for (const [step, color] of [[chosen === report.peak_step ? null : chosen, accent], [cursor, ink]]) {
      if (step === null || step + 1 < from || step > to) continue;
      context.strokeStyle = color;
      stroke(context, xOf(step + 0.5), MARGIN.top - 8, xOf(step + 0.5), low);
    }
  }

  function axes(context, width, height, yOf, most) {
    const power = Math.floor(Math.log2(most) / 10 + 1e-9);
    const one = 1024 ** power;
    context.strokeStyle = paint.line;
    context.textAlign = "right";
    for (const value of ticks(0, most / one, 5)) {
      const y = Math.round(yOf(value * one)) + 0.5;
      stroke(context, MARGIN.left, y, width - MARGIN.right, y);
      context.fillText(`${value} ${BYTE_UNITS[power]}`, MARGIN.left - 6, y + 4);
    }
    context.textAlign = "center";
    for (const step of ticks(from, to, Math.max(2, width / 110)).filter(Number.isInteger)) {
      context.fillText(step.toLocaleString("en"), Math.min(xOf(step), width - 20), height - 29);
    }
    phases(context, width, height);
  }

  /** Mark the phases of the program below the steps: forward, backward, update. */
  function phases(context, width, height) {
    const right = width - MARGIN.right, y = height - 16;
    for (const { name, first, end } of report.phases) {
      const [x, to] = [Math.max(xOf(first), MARGIN.left), Math.min(xOf(end), right)];
      if (to - x < 1) continue;
      context.strokeStyle = context.fillStyle = paint.muted;
      stroke(context, x + 1, y - 4, x + 1, y + 1);
      stroke(context, x + 1, y, to - 1, y);
      stroke(context, to - 1, y - 4, to - 1, y + 1);
      context.fillText(cut(context, name, to - x), (x + to) / 2, height - 3);
    }
  }

  function hover(step, x, y) {
    cursor = step;
    draw();
    const bytes = report.live[step];
    const here = liveAt(report, step);
    const capacity = report.device.capacity_bytes;
    const facts = here.slice(0, LARGEST).map((b) => [
      humanBytes(b.bytes), swatch(colorOf(b.category)), `${b.where || b.name}  ${b.scope}`]);
    const rest = here.length - facts.length;
    if (rest > 0) facts.push(["", `and ${count(rest, "smaller buffer")}`]);
    const of = capacity ? `, ${percent(bytes, capacity)} of capacity` : "";
    const head = `step ${step.toLocaleString("en")}: ${humanBytes(bytes)} live${of}`;
    showTip(x, y, make("strong", {}, head), make("table", {}, ...facts.map(([size, ...what]) =>
      make("tr", {}, make("td", { class: "number" }, size), make("td", {}, ...what)))));
    return head + facts.slice(0, 1).map(([size, , what]) => `; largest ${size} ${what}`).join("");
  }

  canvas.addEventListener("wheel", (event) => {
    const all = to - from >= report.live.length;
    if (!report.live.length || (all && event.deltaY > 0)) return; // nothing to zoom out of: scroll
    event.preventDefault();
    const at = from + (event.offsetX - MARGIN.left) / inner() * (to - from);
    zoom(Math.exp(Math.sign(event.deltaY) * Math.min(Math.abs(event.deltaY), 120) / 400), at);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, from, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!report.live.length) return;
    if (drag && Math.abs(event.clientX - drag.x) > 4) drag.moved = true;
    if (drag?.moved) {
      hideTip();
      view(drag.from - (event.clientX - drag.x) / inner() * (to - from), to - from);
    } else {
      hover(stepAt(event.offsetX), event.clientX, event.clientY);
    }
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved && report.live.length) pick(stepAt(event.offsetX));
    drag = null;
  });
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("blur", leave);
  canvas.addEventListener("keydown", (event) => {
    if (!report.live.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const n = report.live.length, stride = event.shiftKey ? Math.ceil((to - from) / 20) : 1;
    const now = cursor ?? chosen;
    const moves = { ArrowLeft: now - stride, ArrowRight: now + stride, Home: 0, End: n - 1 };
    if (event.key in moves) {
      const step = Math.min(Math.max(moves[event.key], 0), n - 1);
      if (step < from || step >= to) view(step - (to - from) / 2, to - from);
      const box = canvas.getBoundingClientRect();
      say(hover(step, box.left + xOf(step + 0.5), box.top + 40));
    } else if (event.key === "+" || event.key === "=") zoom(0.7, now);
    else if (event.key === "-") zoom(1 / 0.7, now);
    else if (event.key === "0") reset();
    else if (event.key === "Enter") pick(now);
    else if (event.key === "Escape") leave();
    else return;
    event.preventDefault();
  });

  function leave() {
    cursor = null;
    drag = null;
    hideTip();
    draw();
  }

  function pick(step) {
    chosen = step;
    draw();
    inspect(step);
  }

  /** Bytes at each step that belong to no buffer of a known category. */
  const rest = () => tops.at(-1).map((top, step) => top - tops.at(-2)[step]);

  return { show, draw, rest, reset, zoom, pick };
}

function stroke(context, x, y, toX, toY) {
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(toX, toY);
  context.stroke();
}

/** About `about` round numbers between two numbers. */
function ticks(from, to, about) {
  const rough = (to - from) / about;
  const ten = 10 ** Math.floor(Math.log10(rough));
  const stride = [1, 2, 5, 10].map((m) => m * ten).find((s) => s >= rough);
  const found = [];
  for (let i = Math.ceil(from / stride); i * stride <= to; i++) {
    found.push(Number((i * stride).toPrecision(12)));
  }
  return found;
}
