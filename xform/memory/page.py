"""The page of a report: one file that opens from disk, with nothing to fetch."""

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
from xform.files import whole
from xform.memory.categories import CATEGORIES, REST, category

_SCRIPTS = ("data", "dom", "timeline", "treemap", "table", "difference", "page")
# `file.py:line`, with which a place begins.
_PLACE = re.compile(r"(?P<file>.+\.py):(?P<line>\d+)")
_LONGEST = 160
_KINDS = ("argument", "output", "temp", "alias", "total", "constant", "host", "vmem", "code")


def write(
    reports: Sequence[dict[str, Any]],
    path: str | os.PathLike[str],
    labels: Sequence[str] = (),
) -> None:
    """Write one HTML page that shows a report, or compares several with a switch between them.

    The page needs no network, and its own rules forbid it to ask for any; texts of the user's
    program stand in it as data, and are only ever shown as text. It appears whole, or not at all.

    Args:
      reports: `MemoryReport.to_dict()` of each, one at least.
      path: the file.
      labels: a name for each report; by default its function and target.

    Raises:
      WrongArgument: no report, or another number of labels.

    Cost: linear in buffers and steps: about 60 bytes for a buffer and 10 for a step.
    """
    labels = labels or [f"{r['function']} on {r['target']}" for r in reports]
    if not reports or len(labels) != len(reports):
        raise WrongArgument(
            f"save_html({str(path)!r})",
            f"there are {len(reports)} reports and {len(labels)} labels",
            "",
            "give one report at least, and a label for each or none",
        )
    page = _page([_packed(r, label) for r, label in zip(reports, labels, strict=True)])
    with whole(path) as partial:
        partial.write_text(page, encoding="utf-8")


def _page(reports: Sequence[dict[str, Any]]) -> str:
    data = {"categories": [c._asdict() for c in (*CATEGORIES, REST)], "reports": reports}
    title = f"Memory of {reports[0]['function']}"
    scripts = [part(f"{name}.js") for name in _SCRIPTS]
    return assembled(title, part("page.html"), part("page.css"), scripts, data)


def part(name: str, package: str = "xform.memory") -> str:
    """A file of the folder `web` of a package."""
    return (importlib.resources.files(package) / "web" / name).read_text(encoding="utf-8")


def assembled(title: str, body: str, style: str, scripts: Sequence[str], data: Any) -> str:
    """One page of its parts, with `data` as JSON in it.

    Its own rules let this style and these scripts run, and nothing be fetched.
    """
    # In a function, so that the page has no names but the browser's own.
    script = "\n".join(['"use strict"; (() => {', *scripts, "})();\n"])
    # `<` as an escape of JSON: no text in the data can end its element, or begin another.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return string.Template(part("frame.html")).substitute(
        title=html.escape(title),
        body=body,
        policy=f"default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src '{digest(style)}'; script-src '{digest(script)}'",
        style=style,
        script=script,
        data=text,
    )


def digest(text: str) -> str:
    """How a page says that this text, and no other, may run in it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def source_line(where: str) -> str:
    """What stands in the user's file at a place; empty if the file is not there."""
    place = _PLACE.match(where)
    line = linecache.getline(os.path.abspath(place["file"]), int(place["line"])) if place else ""
    return line.strip()[:_LONGEST]


def _packed(report: dict[str, Any], label: str) -> dict[str, Any]:
    """A report with each text once: a buffer is a row of numbers, some of which are texts' places.

    The order of a row is `FIELDS` of data.js.
    """
    places: dict[str, int] = {}
    text = lambda value: places.setdefault(value, len(places))
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
    kept = ("function", "target", "compiled", "code", "given", "planned", "note", "device",
            "refused", "flops", "compile_seconds", "advice", "live", "peak_step",
            "phases")  # fmt: skip
    numbers = {k: report[k] for k in (*kept, *(f"{kind}_bytes" for kind in _KINDS))}
    return {"label": label, **numbers, "text": list(places), "rows": rows}
