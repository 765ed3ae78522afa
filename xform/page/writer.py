"""Write an HTML page: one file that opens from disk and needs no network.

A report hands over its data and names its parts, which are files of this package. `page.css` is the
style of all pages. `parts.js` has what pages share: tables, search, tooltips, themes.
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

from xform.storage.files import atomic_write

# The start of a place in the user's code: `file.py:line`.
_FILE_AND_LINE = re.compile(r"(?P<file>.+\.py):(?P<line>\d+)")
# The most characters of a source line that a page shows.
_LONGEST_LINE = 160
_NO_SCRIPT = "<noscript><p>This page needs JavaScript, which is disabled here.</p></noscript>"


def write_page(
    path: str | os.PathLike[str],
    title: str,
    about: str = "",
    body: str = "",
    *,
    scripts: Sequence[str] = (),
    data: Any = None,
) -> None:
    """Write an HTML page. The file is written completely or not at all.

    The page's content security policy allows only its own style and scripts, and no requests. Texts
    of the user's program are embedded as data and only ever shown as text.

    Args:
      path: the file.
      title: the title, as text.
      about: a line below the title, as text.
      body: HTML. Texts in it must be escaped.
      scripts: names of this package's scripts, which show `data`. A page without them has none.
      data: what JSON can hold.

    Raises:
      FileNotWritten: the file cannot be written.
    """
    style = web_file("page.css")
    # Inside a function, the names that the scripts define are not global.
    files = [web_file(f"{name}.js") for name in ("parts", *scripts)] if scripts else []
    script = "\n".join(['"use strict"; (() => {', *files, "})();\n"])
    if scripts:
        # `<` is escaped, so that no text in the data can end its element or start another.
        text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        embedded = f'<script id="data" type="application/json">{text}</script>'
        body = f"{_NO_SCRIPT}\n{body}{embedded}\n<script>{script}</script>\n"
    page = string.Template(web_file("frame.html")).substitute(
        title=html.escape(title),
        about=html.escape(about),
        policy=f"default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src '{_digest(style)}'; script-src '{_digest(script) if scripts else 'none'}'",
        style=style,
        body=body,
    )
    with atomic_write(path) as partial:
        partial.write_text(page, encoding="utf-8")


def web_file(name: str) -> str:
    """Return the text of a file of this package."""
    return (importlib.resources.files("xform.page") / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
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
