"""The README: its example runs, its first screen is short, and it links to the rest."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_first_screen() -> None:
    first = README.partition("\n## ")[0]
    prose, install, *_ = re.sub(r"^# xform\n\n", "", first).split("\n\n")
    assert len(re.findall(r"[.!?](?:\s|$)", prose)) == 2
    assert install.strip().startswith("pip install .")
    assert "not on PyPI yet" in install
    assert len([line for line in EXAMPLES[0].splitlines() if line]) <= 10
    assert EXAMPLES[0] in first
    assert len(re.findall(r"^    make ", first, re.MULTILINE)) == 2
    assert len(first.splitlines()) < 40


def test_readme_is_below_200_lines_of_at_most_160_characters() -> None:
    lines = README.splitlines()
    assert len(lines) < 200
    assert max(map(len, lines)) <= 160


def test_experiment_commands_of_the_readme_are_in_measured_md() -> None:
    commands = re.findall(r"`(python -m experiments\.[^`]+)`", README)
    measured = (ROOT / "docs/measured.md").read_text()
    assert len(commands) >= 5
    assert not [command for command in commands if f"`{command}" not in measured]


def test_the_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for example in EXAMPLES:
        exec(compile(example, "README.md", "exec"), names)
    said = capsys.readouterr().out
    assert "README.md" in said
    assert "live at the peak" in said
