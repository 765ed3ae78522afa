"""Run the guides, which are notebooks in Jupytext's text format, and store their outputs in them.

    python docs/site/notebooks.py [GUIDE ...]    # run the guides and write their outputs into them

A cell is a block of `python` or `bash`. Its output follows in a block of `text`.
`needs:` at the top names a target. The guide cannot run without the compiler of that target.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import jupytext
from nbclient import NotebookClient

DOCS = Path(__file__).parent.parent
ROOT = DOCS.parent
GUIDES = [DOCS / "index.md", *sorted([*DOCS.glob("guides/*.md"), *DOCS.glob("concepts/*.md")])]

MULTI = re.DOTALL | re.MULTILINE
CELL = re.compile(r"^```(?:python|bash)\n.*?^```\n(?:\n```text\n.*?^```\n)?", MULTI)
PRINTED = re.compile(r"\n```text\n(.*?)^```\n", MULTI)
FRONT = re.compile(r"\A---\n.*?^---\n", MULTI)
# Otherwise Jupytext sets the language of a notebook to the one that most cells use.
KERNEL = "---\njupyter:\n  kernelspec: {display_name: '', language: python, name: python3}\n---\n"
# Tables and errors then show a line as `cell 3:7`, not as a temporary file of this process.
# A start line of the kernel sets this, because a cell would count as one.
NAMES = "get_ipython().compile.get_code_name = lambda raw, code, number: f'cell {number}'"


def needs(path: Path) -> str | None:
    """Return the target whose compiler the guide needs, or None."""
    found = re.search(r"\A---\nneeds: (\S+)$", path.read_text(), re.MULTILINE)
    return found and found[1]


def shown(text: str) -> list[str]:
    """Return the stored output of each cell of a guide."""
    printed = [PRINTED.search(cell) for cell in CELL.findall(text)]
    return [found[1] if found else "" for found in printed]


def run(path: Path, folder: Path) -> list[str]:
    """Run a guide in a folder, and return the output of each cell as text."""
    return [_printed(outputs, folder) for outputs in _run(path, folder)]


def displayed(path: Path) -> str:
    """Run a guide, and return its text with the outputs of its cells as HTML, as in Jupyter."""
    with tempfile.TemporaryDirectory() as name:
        blocks = iter([_html(outputs, Path(name)) for outputs in _run(path, Path(name))])
    text = FRONT.sub("", path.read_text())
    return CELL.sub(lambda cell: PRINTED.sub("", cell[0]) + next(blocks), text)


def _html(outputs: list[dict], folder: Path) -> str:
    """Return the outputs of a cell as one block, which Markdown leaves as it is."""
    as_text = lambda output: f"<pre>{html.escape(_printed([output], folder))}</pre>"
    blocks = [o.get("data", {}).get("text/html") or as_text(o) for o in outputs]
    # An empty line would end the block.
    lines = "".join(blocks).replace("\n\n", "\n&#8203;\n")
    return f'\n<div class="output">{lines}</div>\n' if outputs else ""


def _run(path: Path, folder: Path) -> list[list[dict]]:
    """Run a guide in a folder, and return the outputs of each cell. Files stay in the folder."""
    notebook = jupytext.reads(KERNEL + FRONT.sub("", path.read_text()), "md")
    cells = [c for c in notebook.cells if c.cell_type == "code"]
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=1200, kernel_name="python3", resources=resources,
                            extra_arguments=[f"--IPKernelApp.exec_lines={NAMES}"])  # fmt: skip
    manager = client.create_kernel_manager()
    manager.transport, manager.ip = "ipc", str(folder / "kernel")  # without port or network
    client.execute(env=_environment())
    return [cell.outputs for cell in cells]


def _environment() -> dict[str, str]:
    """Return this process's environment: this checkout and Python first, no settings for JAX."""
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
    """Run a guide, write its outputs into it, and copy its pictures beside it."""
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
