"""The slow tests run file by file, and a run goes on where the last one stopped."""

import subprocess
from pathlib import Path

import pytest

from tests import slow

FILES = {"tests/a.py": 3, "tests/b.py": 1, "tests/c.py": 2}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The files that were run; `b.py` fails the first time, and `c.py` is interrupted."""
    files: list[str] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        files.append(command[-1])
        if files == ["tests/a.py", "tests/b.py", "tests/c.py"]:
            raise KeyboardInterrupt
        return subprocess.CompletedProcess(command, int(files == ["tests/a.py", "tests/b.py"]))

    monkeypatch.setattr(slow, "slow_tests", lambda: FILES)
    monkeypatch.setattr(slow.subprocess, "run", run)
    monkeypatch.setattr(slow, "_BUILD", tmp_path)
    return files


def test_slow_run_resumes_at_the_files_that_have_not_passed(
    ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert slow.run("", False, []) == 1
    said = capsys.readouterr().out
    assert "1 of 3 files have passed, in 0 minutes." in said
    assert "tests/b.py: failed on 2" in said
    assert "tests/c.py: did not run" in said
    ran.append("then")
    assert slow.run("", False, []) == 0
    ran.append("all passed, so from the start")
    assert slow.run("", False, []) == 0
    ran.append("a part")
    assert slow.run("c.py", True, []) == 0
    assert [Path(file).name for file in ran] == [
        "a.py", "b.py", "c.py", "then", "b.py", "c.py",
        "all passed, so from the start", "a.py", "b.py", "c.py", "a part", "c.py",
    ]  # fmt: skip


def test_a_word_that_is_in_no_path_is_refused(ran: list[str]) -> None:
    with pytest.raises(SystemExit, match="No file with slow tests has 'planer' in its path"):
        slow.run("planer", False, [])
