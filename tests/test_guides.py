"""The guides of `docs/` are notebooks: each runs, and prints the stored output."""

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from xform.memory.targets import missing, parse_target

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
GUIDES = [DOCS / "index.md", *sorted([*DOCS.glob("guides/*.md"), *DOCS.glob("concepts/*.md")])]
OLDEST = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
# These numbers differ between runs: times, and rounding where threads add up.
VARIES = re.compile(r"\d[\d.,]* (?:ns|µs|ms|s|min|tokens/s)\b|\d[\d.]*e-\d\d")


def same(text: str) -> list[str]:
    return [re.sub(r"\s+", " ", VARIES.sub("...", line)) for line in text.splitlines()]


def load_notebooks(monkeypatch) -> Any:
    """Import `docs/site/notebooks.py`; skip the test if Jupytext is not installed."""
    pytest.importorskip("jupytext", reason="make slow installs it")
    monkeypatch.syspath_prepend(str(DOCS / "site"))
    spec = importlib.util.spec_from_file_location("notebooks", DOCS / "site/notebooks.py")
    notebooks = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "notebooks", notebooks)
    spec.loader.exec_module(notebooks)
    return notebooks


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_each_guide_runs_and_prints_its_stored_output(
    guide: Path, tmp_path: Path, monkeypatch
) -> None:
    notebooks = load_notebooks(monkeypatch)
    if (target := notebooks.needs(guide)) and missing(parse_target(target)):
        pytest.skip(f"the compiler of {target} is not installed")
    printed = notebooks.run(guide, tmp_path)
    pictures = re.findall(r"!\[[^]]*\]\((\w+\.png)\)", guide.read_text())
    assert not [name for name in pictures if not (tmp_path / name).stat().st_size]
    if jax.__version__ == OLDEST["jax"]:  # the bytes depend on the compiler of this version
        says = notebooks.shown(guide.read_text())
        assert [same(text) for text in printed] == [same(text) for text in says]


def test_code_is_named_by_its_cell(tmp_path: Path, monkeypatch) -> None:
    notebooks = load_notebooks(monkeypatch)
    guide = tmp_path / "guide.md"
    cell = "import sys\nprint(sys._getframe().f_code.co_filename)"
    guide.write_text(f"# Title\n\n```python\n{cell}\n```\n\n```python\n{cell}\n```\n")
    assert notebooks.run(guide, tmp_path) == ["cell 1\n", "cell 2\n"]


def test_times_and_rounding_are_not_compared() -> None:
    assert same("peak 3.0 MiB   in 2.5 s") == same("peak 3.0 MiB in 11.25 s")
    assert same("4,014 tokens/s  255 ms/step") == same("9,981 tokens/s  103 ms/step")
    assert same("differs by 3.6e-07") == same("differs by 4e-07")
    assert same("peak 3.0 MiB in 2.5 s") != same("peak 3.1 MiB in 2.5 s")
