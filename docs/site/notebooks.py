"""Guides are notebooks, kept as text by Jupytext: what each cell prints is kept below it.

    python docs/site/notebooks.py [GUIDE ...]    # run them, and write what they print into them

A cell is a block of `python` or `bash`. What it prints stands after it, in a block of `text`.
`needs:` at the top names a target without whose compiler the guide cannot run.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

DOCS = Path(__file__).parent.parent
ROOT = DOCS.parent
GUIDES = [DOCS / "index.md", *sorted([*DOCS.glob("guides/*.md"), *DOCS.glob("concepts/*.md")])]

MULTI = re.DOTALL | re.MULTILINE
CELL = re.compile(r"^```(?:python|bash)\n.*?^```\n(?:\n```text\n.*?^```\n)?", MULTI)
PRINTED = re.compile(r"\n```text\n(.*?)^```\n", MULTI)
FRONT = re.compile(r"\A---\n.*?^---\n", MULTI)
# Without it the language of a notebook is that of most of its cells.
KERNEL = "---\njupyter:\n  kernelspec: {display_name: '', language: python, name: python3}\n---\n"
# A cell's lines are `cell 3:7` in tables and errors, rather than a file of this one process.
NAMES = "get_ipython().compile.get_code_name = lambda raw, code, number: f'cell {number}'"


def needs(path: Path) -> str | None:
    """The target without whose compiler a guide cannot run."""
    found = re.search(r"\A---\nneeds: (\S+)$", path.read_text(), re.MULTILINE)
    return found and found[1]


def shown(text: str) -> list[str]:
    """What a guide says that each of its cells prints."""
    printed = [PRINTED.search(cell) for cell in CELL.findall(text)]
    return [found[1] if found else "" for found in printed]


def run(path: Path, folder: Path) -> list[str]:
    """What each cell of a guide prints, run in a folder, where its files are left."""
    notebook = jupytext.reads(KERNEL + FRONT.sub("", path.read_text()), "md")
    cells = [c for c in notebook.cells if c.cell_type == "code"]
    notebook.cells.insert(0, nbformat.v4.new_code_cell(NAMES))
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=1200, kernel_name="python3", resources=resources)
    manager = client.create_kernel_manager()
    manager.transport, manager.ip = "ipc", str(folder / "kernel")  # sockets: no port, no network
    client.execute(env=_environment())
    return [_printed(cell.outputs, folder) for cell in cells]


def _environment() -> dict[str, str]:
    """That of this process, with this checkout and Python first, and nothing said to JAX."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    paths = {"PYTHONPATH": str(ROOT), "PATH": str(Path(sys.executable).parent)}
    first = {k: os.pathsep.join([v, *filter(None, [env.get(k)])]) for k, v in paths.items()}
    return env | first | {"JAX_PLATFORMS": "cpu", "COLUMNS": "100"}


def _printed(outputs: list[dict], folder: Path) -> str:
    texts = [o["text"] if "text" in o else f"{o['data']['text/plain']}\n" for o in outputs]
    text = "".join(texts)
    text = text.replace(f"{folder.resolve()}/", "").replace(f"{folder}/", "")
    return "".join(f"{line.rstrip()}\n" for line in text.strip("\n").splitlines())


def rewrite(path: Path) -> None:
    """Run a guide, and put into it what its cells print, and beside it the pictures they make."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        printed = iter(run(path, folder))
        text = CELL.sub(lambda cell: _with(cell[0], next(printed)), path.read_text())
        for picture in folder.glob("*.png"):
            shutil.copy(picture, path.parent / picture.name)
    path.write_text(text)


def _with(cell: str, printed: str) -> str:
    cell = PRINTED.sub("", cell)
    return f"{cell}\n```text\n{printed}```\n" if printed else cell


if __name__ == "__main__":
    for guide in [Path(name) for name in sys.argv[1:]] or GUIDES:
        print(guide.name, flush=True)
        rewrite(guide)
