"""Generate pages: a reference from docstrings, and pages from the READMEs of experiments."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from pathlib import Path

import xform
from xform import commands

ROOT = Path(__file__).parent.parent.parent
# Pages whose files are in other folders, by their place on the site.
ELSEWHERE = {
    "project/contributing.md": "CONTRIBUTING.md",
    "project/changelog.md": "CHANGELOG.md",
    "project/tour.md": "xform/README.md",
    "project/models.md": "models/README.md",
    "project/conformance.md": "tests/conformance.md",
}
# Public modules whose functions the table of the reference lists too.
NAMESPACES = ("adjoints", "curvature", "memory", "sparse")


def elsewhere() -> dict[str, Path]:
    """Return the files outside `docs/` that the site shows, by their place on the site."""
    found = {uri: ROOT / path for uri, path in ELSEWHERE.items()}
    for readme in sorted(ROOT.glob("experiments/**/README.md")):
        name = readme.parent.relative_to(ROOT / "experiments")
        found[f"experiments/{name}/index.md"] = readme
        beside = [*readme.parent.rglob("*.png"), *readme.parent.glob("*.py")]
        found |= {f"experiments/{name}/{p.relative_to(readme.parent)}": p for p in beside}
    for readme in sorted(ROOT.glob("models/*/README.md")):
        found[f"project/{readme.parent.name}.md"] = readme
    return found


def place(uri: str) -> str:
    """Return the file of the repository that a page shows."""
    path = elsewhere().get(uri)
    return str(path.relative_to(ROOT)) if path else f"docs/{uri}"


def page(path: str) -> str:
    """Return the page that shows a file or a folder of the repository."""
    places = {str(p.relative_to(ROOT)): uri for uri, p in elsewhere().items()}
    return places.get(path) or places.get(f"{path}/README.md") or path.removeprefix("docs/")


def made() -> dict[str, str]:
    """Return the generated pages, by their place on the site."""
    pages = {f"reference/{name}.md": _reference(name) for name in names()}
    pages["reference/index.md"] = _names_table()
    pages["reference/command_line.md"] = _command_line()
    pages["experiments/index.md"] = _experiments_table()
    return pages


def names() -> list[str]:
    """Return the public names of `xform`: functions, classes and modules."""
    return sorted(dir(xform), key=str.lower)


def reference_nav() -> list[str | dict[str, str]]:
    """Return the pages of the reference, with each name spelled as in code."""
    pages = [{name: f"reference/{name}.md"} for name in names()]
    return ["reference/index.md", *pages, "reference/command_line.md"]


def experiments_nav() -> list[str]:
    return ["experiments/index.md", *(u for u in elsewhere() if re.match(r"experiments/.*\.md", u))]


def project_nav() -> list[str]:
    return [uri for uri in elsewhere() if uri.startswith("project/")]


def _reference(name: str) -> str:
    value = getattr(xform, name)
    if inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value):
        return f"::: xform.{name}\n"
    kind = f"{type(value).__module__}.{type(value).__qualname__}"  # a callable object
    return f"# xform.{name}\n\n::: {kind}\n    options: {{heading_level: 2}}\n"


def _names_table() -> str:
    lines = ["# Reference", "", "Every public name of `xform`.", "", "| name | |", "| --- | --- |"]
    for name in names():
        value = getattr(xform, name)
        lines.append(f"| [`{name}`]({name}.md) | {_first_line(value)} |")
        for inner in value.__all__ if name in NAMESPACES else ():
            link = f"[`{name}.{inner}`]({name}.md#xform.{name}.{inner})"
            lines.append(f"| {link} | {_first_line(getattr(value, inner))} |")
    return "\n".join(lines) + "\n"


def _first_line(value: object) -> str:
    return (inspect.getdoc(value) or "").partition("\n")[0]


def _command_line() -> str:
    text = "# The command line\n\nWhat `python -m xform COMMAND --help` prints.\n"
    for name in commands.COMMANDS:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            commands.run([name, "--help"])
        text += f"\n## {name}\n\n```text\n{said.getvalue()}```\n"
    return text


def _experiments_table() -> str:
    text = "# Experiments\n\n"
    text += "Each folder of `experiments/` asks one question, and answers it by one command.\n"
    for uri in experiments_nav()[1:]:
        readme = (ROOT / place(uri)).read_text()
        name = uri.removeprefix("experiments/").removesuffix("/index.md")
        (title,) = re.findall(r"\A# (.*)$", readme, re.MULTILINE)
        command = re.search(r"^    ((?:python -m|make) .*?)(?:  +#.*)?$", readme, re.MULTILINE)
        text += f"\n## [{title}]({name}/index.md)\n"
        text += f"\n    {command[1]}\n" if command else ""
        dates = re.findall(r"Measured (\d{4}-\d\d-\d\d)", readme)
        text += f"\nLast measured {max(dates)}.\n" if dates else ""
        pictures = re.findall(r"!\[([^]]*)\]\(([^)]*)\)", readme)
        text += "".join(f"\n![{alt}]({name}/{file})\n" for alt, file in pictures[:1])
    return text
