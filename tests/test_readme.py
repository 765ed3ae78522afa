"""The first page: its examples run, and its first screen is short."""

import re
from pathlib import Path

import pytest

import xform

README = (Path(__file__).parent.parent / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_first_screen() -> None:
    first = README.partition("\n## ")[0]
    prose, install, *_ = re.sub(r"^# xform\n\n", "", first).split("\n\n")
    assert len(re.findall(r"[.!?](?:\s|$)", prose)) == 2
    assert install.strip().startswith("pip install jax-xform")
    assert len([line for line in EXAMPLES[0].splitlines() if line]) <= 10
    assert EXAMPLES[0] in first
    assert len(re.findall(r"^    make ", first, re.MULTILINE)) == 2
    assert len(first.splitlines()) < 40


def test_the_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for example in EXAMPLES:
        exec(compile(example, "README.md", "exec"), names)
    said = capsys.readouterr().out
    assert "README.md" in said
    assert isinstance(names["plan"], xform.Plan)
    assert (tmp_path / "report.html").stat().st_size
