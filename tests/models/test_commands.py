"""The command lines: help, one-line errors with code 2, shapes alone, and sampling."""

import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from models import sample, train
from models.config import PRESETS
from models.policies import POLICIES
from tests.models.micro import FLAGS, TEXT, losses

COMMAND = [sys.executable, "-m", "models.train", *FLAGS]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(train.app, [*FLAGS, *map(str, arguments)])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(TEXT)
    return path


def test_choices_are_all_there_is() -> None:
    assert train.Preset.__args__ == tuple(PRESETS)
    assert train.Policy.__args__ == ("none", *POLICIES)


def test_help() -> None:
    result = CliRunner().invoke(train.app, ["--help"], terminal_width=200)
    assert result.exit_code == 0
    assert "--policy" in result.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--data", "missing"], "no such file or folder"),
        (["--data", "empty"], "holds no bytes"),
        (["--data", "short"], "need at least"),
        (["--data", "text", "--out", "short"], "cannot create"),
        (["--data", "text", "--out", "new", "--resume"], "no checkpoint to resume from"),
        (["--data", "text", "--kv-heads", "3"], "does not divide"),
    ],
)
def test_unusable_input_is_one_line(
    text: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], complaint: str
) -> None:
    monkeypatch.chdir(text.parent)
    Path("empty").touch()
    Path("short").write_text("short")
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert complaint in result.stderr


def test_a_seven_billion_model_is_weighed_without_being_made() -> None:
    result = CliRunner().invoke(
        train.app, ["--preset", "llama2-7b", "--batch", "1", "--context", "64", "--dry-run"]
    )
    assert result.exit_code == 0, result.output
    assert "6,738,415,616 parameters" in result.output


def test_train_resume_and_sample(text: Path) -> None:
    out = text.parent / "run"
    arguments = ["--data", text, "--out", out, "--policy", "save_dots", "--dtype", "bf16"]
    arguments += ["--steps", 5]
    assert invoke(*arguments, "--max-seconds", 0).exit_code == 0
    assert invoke(*arguments, "--resume").exit_code == 0
    assert [step for step, loss, _ in losses(out) if loss is not None] == [1, 2, 3, 4, 5]

    def draw(temperature: float) -> str:
        flags = ["--out", str(out), "--length", "20", "--temperature", str(temperature)]
        result = CliRunner().invoke(sample.app, flags)
        assert result.exit_code == 0, result.output
        return result.stdout

    assert draw(0) == draw(0)
    assert draw(0).startswith("def ")
    assert draw(1.0) != draw(0)


def test_sampling_without_a_run_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(sample.app, ["--out", str(tmp_path)])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bits(text: Path) -> None:
    whole, killed = text.parent / "whole", text.parent / "killed"
    flags = ["--data", str(text), "--steps", "600", "--save-every", "20", "--eval-every", "100"]
    subprocess.run([*COMMAND, *flags, "--out", str(whole)], check=True, capture_output=True)
    process = subprocess.Popen([*COMMAND, *flags, "--out", str(killed)], stdout=subprocess.DEVNULL)
    while not (killed / "log.jsonl").exists() or len(losses(killed)) < 110:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(losses(killed)) < len(losses(whole))
    resume = [*COMMAND, *flags, "--out", str(killed), "--resume"]
    subprocess.run(resume, check=True, capture_output=True)
    assert losses(killed) == losses(whole)


@pytest.mark.slow
@pytest.mark.parametrize("background", ["--background-saves", "--no-background-saves"])
def test_a_disk_that_takes_no_more_is_one_line(text: Path, background: str) -> None:
    out = text.parent / "run"
    flags = ["--data", str(text), "--out", str(out), "--save-every", "5", background]
    subprocess.run([*COMMAND, *flags, "--steps", "10"], check=True, capture_output=True)
    before = out.parent / "before"
    shutil.copytree(out / "checkpoints", before)
    failed = subprocess.run(
        [*COMMAND, *flags, "--steps", "20", "--resume"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000)),
    )
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: saving to ")
    assert failed.stderr.endswith("step 10 is intact: File too large\n")
    assert failed.stderr.count("\n") == 1
    for file in before.rglob("*"):
        if file.is_file():
            assert (
                out / "checkpoints" / file.relative_to(before)
            ).read_bytes() == file.read_bytes()
    subprocess.run([*COMMAND, *flags, "--steps", "20", "--resume"], check=True, capture_output=True)
