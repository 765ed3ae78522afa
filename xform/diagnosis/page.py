"""The HTML page of a diagnosis: one file, which needs no network and has no script."""

from __future__ import annotations

import html
import math
import os
import string
from collections.abc import Callable, Sequence

from xform.diagnosis.row import LayerHealth
from xform.memory.page import digest, source_line
from xform.storage.files import atomic_write
from xform.terminal.text import shorten_place

_STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#1a202c, #e8eaf0);
  --card: light-dark(#fff, #17191e); --line: light-dark(#e1e4ea, #2b2f38);
  --muted: light-dark(#5a6472, #9aa3b2);
  --bad: light-dark(#b3261e, #ff8a7a); --wash: light-dark(#fdecea, #3a1d1b);
  --one: light-dark(#2b6cb0, #7ab0ff); --two: light-dark(#b7560f, #f6ad55); }
body { margin: 0 auto; padding: 20px; max-width: 1300px; color: var(--ink); background: var(--card);
  font: 14px/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums; }
h1 { font-size: 22px; margin: 0; } h2 { font-size: 16px; margin: 22px 0 6px; }
.muted { color: var(--muted); } .bad { color: var(--bad); font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: 3px 9px; border-bottom: 1px solid var(--line); text-align: right; }
td { white-space: nowrap; }
th { position: sticky; top: 0; background: var(--card); }
th:first-child, td:first-child, .text { text-align: left; }
tr.fault td { background: var(--wash); }
svg { width: 100%; height: 190px; } svg text { fill: var(--muted); font-size: 11px; }
.one { fill: var(--one); } .two { fill: var(--two); } .band { fill: var(--bad); opacity: 0.15; }
.grid { stroke: var(--line); }
"""
_PAGE = string.Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; base-uri 'none'; \
form-action 'none'; style-src '$digest'">
<title>Health of $function</title><style>$style</style></head><body>
<h1>Health of $function</h1>
<p class="muted">loss $losses, $count rows in execution order</p>
<h2>$headline</h2>
<ul>$findings</ul>
<h2>Root mean squares</h2>
<p class="muted">Results of layers (blue), and the loss's gradient with respect to them (orange),
on a logarithmic axis. Rows at fault are marked.</p>
$curves
<h2>Layers</h2>
<div class="scroll"><table><thead><tr>$head</tr></thead><tbody>$rows</tbody></table></div>
</body></html>
""")
_COLUMNS: tuple[tuple[str, Callable[[LayerHealth], float | None]], ...] = (
    ("activation", lambda r: r.activation),
    ("gradient", lambda r: r.gradient),
    ("weight", lambda r: r.weight),
    ("gradient / weight", lambda r: r.gradient_to_weight),
    ("update / weight", lambda r: r.update_to_weight),
    ("gain", lambda r: r.gain),
    ("singular value", lambda r: r.sigma),
    ("dead", lambda r: r.dead),
    ("saturated", lambda r: r.saturated),
    ("cosine", lambda r: r.correlation),
)


def write_page(path: str | os.PathLike[str], function: str, losses: str, findings: Sequence[str],
               rows: Sequence[LayerHealth]) -> None:  # fmt: skip
    """Write the page of a report. The file is written completely or not at all.

    Args:
      path: the file to write.
      function: name of the loss.
      losses: the values of the loss, as text.
      findings: one text for each layer at fault, and for the origin of a NaN or Inf.
      rows: the layers in execution order.
    """
    faults = sum(row.verdict != "fine" for row in rows)
    text = _PAGE.substitute(
        digest=digest(_STYLE),
        style=_STYLE,
        function=html.escape(function),
        losses=html.escape(losses),
        count=len(rows),
        headline=f"{faults} at fault"
        if faults
        else "Every layer is fine"
        if not findings
        else "Not finite",
        findings="".join(f"<li>{html.escape(line)}</li>" for line in findings),
        curves=_curves(rows),
        head="".join(_cells("th", ["layer", *(name for name, _ in _COLUMNS), "verdict", "where"])),
        rows="".join(map(_row, rows)),
    )
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _cells(tag: str, cells: Sequence[str]) -> list[str]:
    """Return the cells of a table's row in HTML. The last two are text, not numbers."""
    first_text = len(cells) - 2
    return [
        f"<{tag}{' class=text' if i >= first_text else ''}>{html.escape(cell)}</{tag}>"
        for i, cell in enumerate(cells)
    ]


def _row(row: LayerHealth) -> str:
    """Return the table's row of a layer in HTML."""
    number = lambda x: "" if x is None else f"{x:.3g}"
    verdict = f"fine (affected by {row.because})" if row.because else row.verdict
    cells = [row.title, *(number(of(row)) for _, of in _COLUMNS), verdict, shorten_place(row.where)]
    fault = ' class="fault"' if row.verdict != "fine" else ""
    title = html.escape(row.reason or source_line(row.where))
    return f'<tr{fault} title="{title}">{"".join(_cells("td", cells))}</tr>'


def _curves(rows: Sequence[LayerHealth]) -> str:
    """Draw activations and gradients as dots on a logarithmic axis, in SVG."""
    width, height, left = 1000.0, 180.0, 46.0
    log = lambda x: math.log10(x) if 0 < x < math.inf else None
    logarithms = [(log(row.activation), log(row.gradient)) for row in rows]
    known = [value for pair in logarithms for value in pair if value is not None] or [0.0]
    low, top = math.floor(min(known)), math.ceil(max(known) + 1e-9)
    row_width = (width - left) / max(len(rows), 1)
    x = lambda i: left + (i + 0.5) * row_width
    y = lambda logarithm: 8 + (height - 24) * (top - logarithm) / max(top - low, 1)
    parts = [f'<svg viewBox="0 0 {width:g} {height:g}" preserveAspectRatio="none" role="img" '
             'aria-label="root mean squares of activations and gradients">']  # fmt: skip
    for power in range(low, top + 1, max(1, (top - low) // 4)):
        line_y = f"{y(power):.1f}"
        parts.append(f'<line class="grid" x1="{left}" x2="{width}" y1="{line_y}" y2="{line_y}"/>')
        parts.append(f'<text x="2" y="{line_y}">1e{power}</text>')
    for i, (row, pair) in enumerate(zip(rows, logarithms, strict=True)):
        if row.verdict != "fine":
            band = f'x="{x(i) - row_width / 2:.1f}" width="{max(row_width, 2):.1f}"'
            parts.append(f'<rect class="band" {band} y="0" height="{height}"/>')
        for style, value in zip(("one", "two"), pair, strict=True):
            if value is not None:
                title = f"<title>{html.escape(row.title)}: 1e{value:.2f}</title>"
                center = f'cx="{x(i):.1f}" cy="{y(value):.1f}"'
                parts.append(f'<circle class="{style}" {center} r="3">{title}</circle>')
    return "".join([*parts, "</svg>"])
