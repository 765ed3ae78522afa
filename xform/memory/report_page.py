"""The HTML page of one or several memory reports, with the reports embedded as JSON."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from xform.errors import WrongArgument
from xform.memory.categories import CATEGORIES, REST, category
from xform.page.writer import source_line, web_file, write_page

_SCRIPTS = ("buffers", "timeline", "treemap", "difference", "memory")
# The kinds of bytes that the page shows.
_KINDS = ("argument", "output", "temp", "alias", "total", "constant", "host", "vmem", "code")


def write(
    reports: Sequence[dict[str, Any]],
    path: str | os.PathLike[str],
    labels: Sequence[str] = (),
) -> None:
    """Write an HTML page that shows one report, or several with a switch between them.

    See `write_page` of `xform.page.writer`.

    Args:
      reports: `MemoryReport.to_dict()` of each report, at least one.
      path: the file.
      labels: a name for each report; by default the report's function and target.

    Raises:
      WrongArgument: there is no report, or the numbers of labels and reports differ.

    Cost: linear in buffers and steps: about 60 bytes for a buffer and 10 for a step.
    """
    labels = labels or [f"{r['function']} on {r['target']}" for r in reports]
    if not reports or len(labels) != len(reports):
        raise WrongArgument(
            f"save_html({str(path)!r})",
            f"there are {len(reports)} reports and {len(labels)} labels",
            "",
            "give at least one report, and either a label for each report or no labels",
        )
    data = {
        "categories": [c._asdict() for c in (*CATEGORIES, REST)],
        "reports": [_compact(r, label) for r, label in zip(reports, labels, strict=True)],
    }
    title = f"Memory of {reports[0]['function']}"
    write_page(path, title, body=web_file("memory.html"), scripts=_SCRIPTS, data=data)


def _compact(report: dict[str, Any], label: str) -> dict[str, Any]:
    """Return a report as compact data: every text is stored once, and a buffer is a row of numbers.

    The number of a text is its position in the list of texts. `FIELDS` in
    `page/buffers.js` names the numbers of a row in order.
    """
    texts: dict[str, int] = {}
    number_of = lambda text: texts.setdefault(text, len(texts))
    rows = [
        [
            number_of(b["name"]),
            b["bytes"],
            number_of(f"{b['dtype']}[{','.join(map(str, b['shape']))}]"),
            number_of(b["operation"]),
            number_of(b["where"]),
            number_of(b["scope"]),
            number_of(category(b["category"]).name),
            number_of(b["why"]),
            number_of(source_line(b["where"])),
            b["born"],
            b["dies"],
            int(b["at_peak"]),
            int(b["counted"]),
            b["space"],
        ]
        for b in report["buffers"]
    ]
    keys = ("function", "target", "compiled", "code", "given", "planned", "note", "device",
            "refused", "flops", "compile_seconds", "added", "recomputed", "advice", "live",
            "peak_step", "phases")  # fmt: skip
    fields = {k: report[k] for k in (*keys, *(f"{kind}_bytes" for kind in _KINDS))}
    return {"label": label, **fields, "text": list(texts), "rows": rows}
