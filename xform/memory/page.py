"""The HTML page of one or several memory reports: one file that needs no network.

The page is assembled from the files in `web/`, with the reports embedded as JSON.
"""

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
# The start of a row's `where`: `file.py:line`.
_FILE_AND_LINE = re.compile(r"(?P<file>.+\.py):(?P<line>\d+)")
# The most characters of a source line that the page shows.
_LONGEST_LINE = 160
# The kinds of bytes that the page shows.
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
    page = _report_page([_compact(r, label) for r, label in zip(reports, labels, strict=True)])
    with atomic_write(path) as partial:
        partial.write_text(page, encoding="utf-8")


def _report_page(reports: Sequence[dict[str, Any]]) -> str:
    """Return the page of some compact reports."""
    data = {"categories": [c._asdict() for c in (*CATEGORIES, REST)], "reports": reports}
    title = f"Memory of {reports[0]['function']}"
    scripts = [web_file(f"{name}.js") for name in _SCRIPTS]
    return assemble_page(title, web_file("page.html"), web_file("page.css"), scripts, data)


def web_file(name: str, package: str = "xform.memory") -> str:
    """Return the text of a file in the folder `web` of a package."""
    return (importlib.resources.files(package) / "web" / name).read_text(encoding="utf-8")


def assemble_page(title: str, body: str, style: str, scripts: Sequence[str], data: Any) -> str:
    """Return an HTML page, with `data` embedded as JSON.

    `body` is HTML, `style` is CSS, and each of `scripts` is JavaScript. The page's content security
    policy allows only this style and these scripts, and no requests.
    """
    # Inside a function, the names that the scripts define are not global.
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
    """Return the hash of a script or style, for the content security policy of the page."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def source_line(where: str) -> str:
    """Return the text of a source line; "" if the file does not exist.

    `where` is `file.py:line`, and may have more text behind it. The file is relative to the current
    folder, or to a folder that Python imports from.
    """
    place = _FILE_AND_LINE.match(where)
    if place is None:
        return ""
    here = os.path.abspath(place["file"])
    line = linecache.getline(here if os.path.exists(here) else place["file"], int(place["line"]))
    return line.strip()[:_LONGEST_LINE]


def _compact(report: dict[str, Any], label: str) -> dict[str, Any]:
    """Return a report as compact data: every text is stored once, and a buffer is a row of numbers.

    The number of a text is its position in the list of texts. `FIELDS` in `web/data.js` names the
    numbers of a row in order.
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
            "refused", "flops", "compile_seconds", "advice", "live", "peak_step",
            "phases")  # fmt: skip
    fields = {k: report[k] for k in (*keys, *(f"{kind}_bytes" for kind in _KINDS))}
    return {"label": label, **fields, "text": list(texts), "rows": rows}
