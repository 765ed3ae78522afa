"""`xform train`, `generate`, `data` and `export`: the commands of the trainer."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from models import program
from xform import commands
from xform.commands import trainer


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "NAME", program.NAME)
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_each_command_is_one_of_the_trainer() -> None:
    from models.__main__ import COMMANDS

    assert set(trainer.COMMANDS) <= set(COMMANDS)


def test_an_error_is_that_of_the_trainer(tmp_path: Path, capsys) -> None:
    assert commands.main(["generate", "--run", str(tmp_path)]) == 2
    assert "no checkpoints in" in capsys.readouterr().err


def test_the_help_names_the_program(capsys) -> None:
    code = "import sys; from xform.commands import main; sys.exit(main(['train', '--help']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "xform train" in done.stdout
    assert "a folder of `xform data`" in " ".join(done.stdout.split())
    assert "python -m models" not in done.stdout


def test_all_commands_are_listed(capsys) -> None:
    with pytest.raises(SystemExit):
        commands.main(["--help"])
    listed = capsys.readouterr().out
    assert all(f"    {name} " in listed for name in trainer.COMMANDS)


def test_a_missing_package_is_named(monkeypatch, capsys) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "grain" else 1)
    assert commands.main(["train"]) == 1
    said = capsys.readouterr().err
    assert "grain is not installed" in said
    assert "train" in said.splitlines()[-1]


def test_a_missing_folder_is_named(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(trainer, "_FOLDER", tmp_path)
    assert commands.main(["train"]) == 1
    assert "no folder `models`" in capsys.readouterr().err
