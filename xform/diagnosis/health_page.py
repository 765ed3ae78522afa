"""The HTML page of a diagnosis: one file, which needs no network and has no script."""

from __future__ import annotations

import html
import math
import os
import string
from collections.abc import Callable, Sequence

from xform.diagnosis.row import LayerHealth
from xform.page import writer
from xform.page.writer import source_line
from xform.terminal.text import shorten_place

_BODY = string.Template("""<main>
<section class="card">
<h2>$headline</h2>
<ul class="list">$findings</ul>
</section>
<section class="card">
<h2>Root mean squares</h2>
<p class="muted">Results of layers (blue), and the loss's gradient with respect to them (orange),
on a logarithmic axis. Rows at fault are marked.</p>
<div class="table">$curves</div>
</section>
<section class="card">
<h2>Layers</h2>
<div class="table"><table><thead><tr>$head</tr></thead><tbody>$rows</tbody></table></div>
</section>
</main>
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
    body = _BODY.substitute(
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
    about = f"loss {losses}, {len(rows)} rows in execution order"
    writer.write_page(path, f"Health of {function}", about, body)


def _cells(tag: str, cells: Sequence[str]) -> list[str]:
    """Return the cells of a table's row in HTML. The first and the last two are text."""
    text = (0, len(cells) - 2, len(cells) - 1)
    kinds = ["" if i in text else "number" for i in range(len(cells))]
    return [
        f'<{tag} class="{kind}">{html.escape(cell)}</{tag}>'
        for kind, cell in zip(kinds, cells, strict=True)
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
