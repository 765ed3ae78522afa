"""A table of an experiment is written between its marks; a newer JAX has its own."""

from pathlib import Path

import jax
import pytest

from experiments import report

README = """# Question

<!-- table -->
<!-- /table -->
between
<!-- table newest -->
<!-- /table newest -->
after
"""


@pytest.mark.parametrize(("oldest", "name"), [(jax.__version__, "table"), ("0.1", "table newest")])
def test_each_version_of_jax_has_its_table(
    oldest: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_WRITES", True)
    monkeypatch.setattr(report, "_oldest_jax", lambda: oldest)
    (tmp_path / "README.md").write_text(README)
    report.replace(tmp_path, "table", ["| a |", "| --- |", "| 1 |"])
    marks = f"<!-- {name} -->\n<!-- /{name} -->"
    written = f"<!-- {name} -->\n| a |\n| --- |\n| 1 |\n<!-- /{name} -->"
    assert (tmp_path / "README.md").read_text() == README.replace(marks, written)


def test_readme_with_one_table_is_updated_under_any_jax_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_WRITES", True)
    monkeypatch.setattr(report, "_oldest_jax", lambda: "0.1")
    (tmp_path / "README.md").write_text("<!-- table -->\nold\n<!-- /table -->\n")
    report.replace(tmp_path, "table", ["new"])
    assert (tmp_path / "README.md").read_text() == "<!-- table -->\nnew\n<!-- /table -->\n"


def test_the_oldest_version_is_pinned() -> None:
    assert report._oldest_jax() == "0.10.2"
