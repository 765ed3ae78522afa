"""The HTML page of a report: one file that opens from disk and needs no network."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
import linecache
import os
import re
import string
from collections.abc import Sequence
from typing import Any

from xform.errors import WrongArgument
from xform.memory.categories import CATEGORIES, REST, category
from xform.storage.files import atomic_write

_SCRIPTS = ("data", "dom", "timeline", "treemap", "table", "difference", "page")
# The start of a source line's text: `file.py:line`.
_PLACE = re.compile(r"(?P<file>.+\.py):(?P<line>\d+)")
_LONGEST = 160  # characters of source code that the page shows
_KINDS = ("argument", "output", "temp", "alias", "total", "constant", "host", "vmem", "code")


def write(
    reports: Sequence[dict[str, Any]],
    path: str | os.PathLike[str],
    labels: Sequence[str] = (),
) -> None:
    """Write an HTML page that shows one report, or several with a switch between them.

    The page needs no network, and its content security policy forbids requests. Texts of the user's
    program are embedded as data and only ever shown as text. The file is written completely or not
    at all.

    Args:
      reports: `MemoryReport.to_dict()` of each report, at least one.
      path: the file.
      labels: a name for each report; by default its function and target.

    Raises:
      WrongArgument: there is no report, or the number of labels differs from that of reports.

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
    page = _page([_packed(r, label) for r, label in zip(reports, labels, strict=True)])
    with atomic_write(path) as partial:
        partial.write_text(page, encoding="utf-8")


def _page(reports: Sequence[dict[str, Any]]) -> str:
    data = {"categories": [c._asdict() for c in (*CATEGORIES, REST)], "reports": reports}
    title = f"Memory of {reports[0]['function']}"
    scripts = [web_file(f"{name}.js") for name in _SCRIPTS]
    return assemble_page(title, web_file("page.html"), web_file("page.css"), scripts, data)


def web_file(name: str, package: str = "xform.memory") -> str:
    """The text of a file in the folder `web` of a package."""
    return (importlib.resources.files(package) / "web" / name).read_text(encoding="utf-8")


def assemble_page(title: str, body: str, style: str, scripts: Sequence[str], data: Any) -> str:
    """Assemble a page from its parts, with `data` embedded as JSON.

    The page's content security policy allows only this style and these scripts, and no requests.
    """
    # A function keeps the scripts' names out of the global scope.
    script = "\n".join(['"use strict"; (() => {', *scripts, "})();\n"])
    # `<` is escaped in the JSON, so that no text in the data can end its element or start another.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return string.Template(web_file("frame.html")).substitute(
        title=html.escape(title),
        body=body,
        policy=f"default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src '{digest(style)}'; script-src '{digest(script)}'",
        style=style,
        script=script,
        data=text,
    )


def digest(text: str) -> str:
    """The hash of a script or style, for the content security policy of the page."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def source_line(where: str) -> str:
    """The text of a source line in the user's file; empty if the file does not exist."""
    place = _PLACE.match(where)
    line = linecache.getline(os.path.abspath(place["file"]), int(place["line"])) if place else ""
    return line.strip()[:_LONGEST]


def _packed(report: dict[str, Any], label: str) -> dict[str, Any]:
    """A report as compact data: every text is stored once, and a buffer is a row of numbers.

    The numbers of texts are positions in the list of texts. `FIELDS` in data.js has the order of a
    row.
    """
    texts: dict[str, int] = {}
    text = lambda value: texts.setdefault(value, len(texts))
    rows = [
        [
            text(b["name"]),
            b["bytes"],
            text(f"{b['dtype']}[{','.join(map(str, b['shape']))}]"),
            text(b["operation"]),
            text(b["where"]),
            text(b["scope"]),
            text(category(b["category"]).name),
            text(b["why"]),
            text(source_line(b["where"])),
            b["born"],
            b["dies"],
            int(b["at_peak"]),
            int(b["counted"]),
            b["space"],
        ]
        for b in report["buffers"]
    ]
    keys = ("function", "target", "compiled", "code", "given", "planned", "note", "device",
            "refused", "flops", "compile_seconds", "advice", "live", "peak_step",
            "phases")  # fmt: skip
    fields = {k: report[k] for k in (*keys, *(f"{kind}_bytes" for kind in _KINDS))}
    return {"label": label, **fields, "text": list(texts), "rows": rows}
