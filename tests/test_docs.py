"""The pages under `docs/`: their links exist, and their examples run."""

import re
import tomllib
from pathlib import Path

import pytest

import xform
from xform.planner import hardware as devices

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("xform/*.md"), *ROOT.glob("models/*.md")]
)
# Notebooks, which `make slow` runs completely.
GUIDES = [DOCS / "index.md", *DOCS.glob("guides/*.md"), *DOCS.glob("concepts/*.md")]
CODE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def _examples(page: Path) -> list[str]:
    return [code for language, code in CODE.findall(page.read_text()) if language == "python"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_of_each_page_point_to_existing_files(page: Path) -> None:
    prose = CODE.sub("", page.read_text())
    links = [to.partition("#")[0] for to in re.findall(r"\]\(([^)\s]+)\)", prose)]
    near = [to for to in links if to and "://" not in to]
    assert not [to for to in near if not (page.parent / to).exists()]


@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if p.is_relative_to(DOCS) and p not in GUIDES and _examples(p)]
    + [ROOT / "CONTRIBUTING.md"],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = dict(devices.GPUS)
    names: dict[str, object] = {}
    for example in _examples(page):
        exec(compile(example, page.name, "exec"), names)
    devices.GPUS.clear()  # one page adds a device
    devices.GPUS.update(before)


def test_the_lines_of_a_rule_and_its_test_are_those_of_the_files() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rule, case = re.findall(r"^    ((?:pointwise|unary)\(.*)$", text, re.MULTILINE)
    assert rule in (ROOT / "xform/rules/pointwise.py").read_text()
    assert case in (ROOT / "tests/rules/cases/pointwise.py").read_text()


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (version,) = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    (newest, *_) = re.findall(r"^## (\S+),? ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert version == newest.rstrip(",") == project["version"]


def test_the_page_of_policies_names_all_of_them() -> None:
    text = (DOCS / "policies.md").read_text()
    names = {*xform.policies.NAMED, *xform.policies.__all__} - {"parse"}
    assert not [name for name in names if f"`{name}" not in text and f'`"{name}' not in text]
    table = text.partition("## Policies as text")[0]
    given = re.findall(r"^\| `(?:\"auto\"`, `)?(\w+)", table, re.MULTILINE)
    assert not [name for name in given if not hasattr(xform.policies, name)]
    assert len(given) >= 12


def test_the_versions_that_are_installed_are_those_that_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest, above = re.findall(r"3\.(\d+)", project["requires-python"])
    rows = [f"| Python | 3.{lowest} | 3.{int(above) - 1} |"]
    lines = [(ROOT / f"constraints{of}.txt").read_text().splitlines() for of in ("", "-newest")]
    oldest, newest = (dict(line.split("==") for line in pinned) for pinned in lines)
    rows += [
        f"| {name} | {oldest[name.lower()]} | {newest[name.lower()]} |" for name in ("JAX", "Flax")
    ]
    text = (DOCS / "install.md").read_text()
    assert "\n".join(rows) in text
    assert set(re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE)) == set(
        project["optional-dependencies"]
    )
