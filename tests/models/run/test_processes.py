"""Runs as processes: signals, closed and full outputs, a second command, kills at any moment."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import pytest

from experiments.resume.killed import arrays, records
from tests.models.micro import losses
from tests.models.run.kinds import EACH, written

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent.parent.parent
KILLS = 12


class Start(Protocol):
    """A process that trains, with these flags."""

    def __call__(self, *flags: str, **options: Any) -> subprocess.Popen[str]: ...


@pytest.fixture(params=["text", "resnet", "gru"])
def start(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    written(tmp_path)
    command = [
        sys.executable,
        "-m",
        "models",
        "train",
        *EACH[request.param],
        "--compilation-cache",
        "cache",
    ]

    def begin(*flags: str, **options: Any) -> subprocess.Popen[str]:
        given = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, **options}
        return subprocess.Popen([*command, *flags], **given)

    return begin


def until_trained(out: Path, steps: int, process: subprocess.Popen[str]) -> None:
    while not (out / "log.jsonl").exists() or len(losses(out)) < steps:
        assert process.poll() is None
        time.sleep(0.01)


def saved(out: Path) -> int:
    return max(int(p.name) for p in (out / "checkpoints").iterdir() if p.name.isdigit())


def trained(out: Path) -> int:
    return max(step for step, loss, _ in losses(out) if loss is not None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves(start: Start, number: signal.Signals) -> None:
    out = Path("run")
    process = start("--out", "run", "--steps", "100000")
    until_trained(out, 30, process)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (128 + number, "")
    assert saved(out) == trained(out) > 20


def test_a_second_command_changes_nothing(start: Start) -> None:
    out = Path("run")
    process = start("--out", "run", "--steps", "100000", "--save-every", "10")
    until_trained(out, 30, process)
    second = start("--out", "run", "--resume")
    assert "in use by process" in second.communicate(timeout=60)[1]
    assert second.returncode == 2
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[1] == ""
    steps = [step for step, loss, _ in losses(out) if loss is not None]
    assert steps == [*range(1, saved(out) + 1)]


def test_a_closed_pipe_saves(start: Start) -> None:
    process = start(
        "--out", "run", "--steps", "100000", "--print-every", "1", stdout=subprocess.PIPE
    )
    until_trained(Path("run"), 30, process)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr as stderr:
        said = stderr.read()
    assert process.wait(60) == 2
    assert said.startswith("error: cannot write to standard output: Broken pipe; saved step ")
    assert said.count("\n") == 1
    assert saved(Path("run")) == trained(Path("run"))


def test_an_output_that_is_full_is_one_line(start: Start) -> None:
    with Path("/dev/full").open("w") as full:
        process = start("--out", "run", "--steps", "10", stdout=full)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said.count("\n")) == (2, 1)
    assert "No space left on device" in said


@pytest.mark.timeout(1800)
def test_kills_at_any_moment_change_nothing(start: Start) -> None:
    flags = ["--steps", "400", "--save-every", "5", "--validate-every", "50"]
    whole = start("--out", "whole", *flags)
    assert (whole.communicate()[1], whole.returncode) == ("", 0)
    began = time.monotonic()
    start("--out", "timed", *flags, "--max-seconds", "0").communicate()
    usual = time.monotonic() - began
    out, rng = Path("killed"), random.Random(0)
    for _ in range(KILLS):
        resume = ["--resume"] if (out / "config.toml").exists() and _has_checkpoint(out) else []
        process = start("--out", "killed", *(resume or flags))
        time.sleep(rng.uniform(0.3, 1.3) * usual)
        process.send_signal(signal.SIGKILL)
        _, said = process.communicate()
        assert process.returncode in (-signal.SIGKILL, 0), said
    resume = ["--resume"] if _has_checkpoint(out) else flags
    last = start("--out", "killed", *resume)
    assert (last.communicate()[1], last.returncode) == ("", 0)
    assert records(out) == records(Path("whole"))
    assert arrays(out) == arrays(Path("whole"))
    assert not [p for p in (out / "checkpoints").iterdir() if "tmp" in p.name]


def _has_checkpoint(out: Path) -> bool:
    folder = out / "checkpoints"
    return folder.is_dir() and any(p.name.isdigit() for p in folder.iterdir())
