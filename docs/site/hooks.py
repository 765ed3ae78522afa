"""Hooks for MkDocs: add pages from other folders of the repository, and adapt the links to them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import notebooks
import texts
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from xform.terminal.notebook import PROSE

CSS = Path(__file__).parent / "page.css"
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")
# A block of code without colours: an output.
OUTPUT = re.compile(r"(<pre><span></span><code>)([^<]*)(</code></pre>)")
FROM_THE_NETWORK = re.compile(
    r"<(?:script|img)[^>]+src=\"https?:|<link[^>]+rel=\"(?:stylesheet|preconnect)\"[^>]+href=\"https?:"
)


def on_config(config: Any) -> None:
    """Add the generated parts of the navigation."""
    config.nav.append({"Reference": texts.reference_nav()})
    config.nav.append({"Experiments": texts.experiments_nav()})
    config.nav.append({"The project": texts.project_nav()})


def on_files(files: Files, config: Any) -> Files:
    """Add pages and pictures from outside `docs/`."""
    for uri, path in texts.elsewhere().items():
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    for uri, text in texts.made().items():
        files.append(File.generated(config, uri, content=text))
    files.append(File.generated(config, "page.css", abs_src_path=str(CSS)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links between files of the repository into links between pages, and run the gallery."""
    if page.meta.get("display") == "html":
        markdown = notebooks.displayed(Path(page.file.abs_src_path))
    here = texts.place(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join(os.path.dirname(here), link[1]))
        uri = texts.page(path)
        if files.get_file_from_path(uri) is None:
            raise PluginError(f"{here} links to {link[1]}, which is not on the site")
        return os.path.relpath(uri, os.path.dirname(page.file.src_uri))

    parts = CODE.split(markdown)
    parts[::2] = [LINK.sub(moved, text) for text in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Break long lines of prose in outputs where the page ends; tables keep their columns."""
    broken = r'<span class="prose">\g<0></span>'
    return OUTPUT.sub(lambda block: block[1] + PROSE.sub(broken, block[2]) + block[3], html)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Raise an error if a page loads anything from the network."""
    if found := FROM_THE_NETWORK.search(output):
        raise PluginError(f"{page.file.src_uri} needs the network: {found[0]}")
    return output
