"""Runs of several processes on one machine: the losses of one device, and a checkpoint for any."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import chex
import numpy as np
import pytest
from flax import nnx

from models.run.trained import load_run
from tests.models.micro import losses
from tests.models.run.kinds import EACH, written
from tests.processes import cpu_environment, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
COMMAND = [sys.executable, "-m", "models", "train"]
STEPS = ["--steps", "6", "--save-every", "3", "--validate-every", "3"]


def together(processes: int, devices: int, *flags: str) -> None:
    """Run a command in so many processes that have so many devices each, to its end."""
    with begun(processes, devices, *flags) as started:
        for process in started:
            _, said = process.communicate(timeout=600)
            assert process.returncode == 0, said


@contextlib.contextmanager
def begun(processes: int, devices: int, *flags: str) -> Iterator[list[subprocess.Popen[str]]]:
    """The same, which go on; those that are left at the end are killed."""
    port, environment = free_port(), cpu_environment(devices)
    several = ["--coordinator-address", f"localhost:{port}", "--num-processes", str(processes)]
    started = [
        subprocess.Popen(
            [*COMMAND, *flags, *([*several, "--process-id", str(i)] if processes > 1 else [])],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for i in range(processes)
    ]  # fmt: skip
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


TEXT = [*EACH["text"], "--batch", "8"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    return tmp_path


def close(out: str, judged: bool = True) -> None:
    """A run has the losses, and at its end the parameters and statistics, of one device."""
    found, expected = (losses(Path(name)) for name in (out, "one"))
    if judged:
        assert [r[0] for r in found] == [r[0] for r in expected]
    numbers = [
        [x for _, loss, bits in records for x in (loss, judged and bits) if x]
        for records in (found, expected)
    ]
    np.testing.assert_allclose(*numbers, atol=1e-5, rtol=0)
    states = [nnx.state(load_run(Path(name))[1]) for name in (out, "one")]
    # Adam divides by the gradient's size, so that the smallest ones decide the tolerance.
    chex.assert_trees_all_close(*states, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("kind", "processes", "mesh", "more"),
    [
        ("text", 2, "fsdp=2,tensor=2", []),
        ("text", 4, "data=2,fsdp=2,tensor=2", []),
        ("text", 2, "context=2,fsdp=2", []),
        ("text", 2, "fsdp=4", ["--offload-optimizer"]),
        ("resnet20", 2, "data=2,fsdp=2", []),
        ("gru", 2, "data=2,fsdp=2", []),
        ("gru", 2, "fsdp=4", ["--offload-optimizer"]),
    ],
)
@pytest.mark.usefixtures("folder")
def test_losses_are_those_of_one_device(
    kind: str, processes: int, mesh: str, more: list[str]
) -> None:
    flags = [*EACH[kind], *STEPS, "--batch", "8"]
    together(1, 1, *flags, "--out", "one")
    together(processes, 2, *flags, "--out", "several", "--mesh", mesh, *more)
    close("several")


@pytest.mark.parametrize("kind", ["text", "resnet", "gru"])
@pytest.mark.usefixtures("folder")
def test_checkpoint_resumes_with_other_process_counts(kind: str) -> None:
    """Two processes, then four, then one; with the optimizer's state on the host at first."""
    flags, stop = [*EACH[kind], *STEPS, "--batch", "8"], ["--max-seconds", "0"]
    together(1, 1, *flags, "--out", "one")
    never = ["--validate-every", "100"]
    together(2, 2, *flags, *stop, *never, "--out", "run", "--mesh", "fsdp=4", "--offload-optimizer")
    resume = ["--out", "run", "--resume", *never]
    together(4, 2, *resume, *stop, "--mesh", "fsdp=4,tensor=2")
    together(1, 2, *resume, "--max-seconds", "inf", "--mesh", "data=2")
    close("run", judged=False)


def test_a_process_that_is_lost_ends_the_others(folder: Path) -> None:
    out = folder / "run"
    flags = [*TEXT, "--steps", "100000", "--save-every", "5", "--out", "run", "--mesh", "fsdp=2"]
    with begun(2, 1, *flags) as started:
        while not (out / "log.jsonl").exists() or len(losses(out)) < 15:
            assert not [p.communicate() for p in started if p.poll() is not None]
            time.sleep(0.05)
        started[1].kill()
        _, said = started[0].communicate(timeout=60)
    assert started[0].returncode == 2
    # In a step or in a save, whichever it was in.
    assert said.startswith(("error: another process of the run was lost", "error: saving to "))
    assert said.count("\n") == 1
    again = ["--resume", "--mesh", "fsdp=1", "--steps", "60", "--override", "steps"]
    together(1, 1, "--out", "run", *again)
    assert [step for step, loss, _ in losses(out) if loss is not None] == [*range(1, 61)]


@pytest.mark.parametrize("told", [0, 1])
def test_a_signal_to_one_process_stops_all_after_the_same_step(folder: Path, told: int) -> None:
    flags = [*TEXT, "--steps", "100000", "--out", "run", "--mesh", "fsdp=2"]
    out = folder / "run"
    with begun(2, 1, *flags) as started:
        while not (out / "log.jsonl").exists() or len(losses(out)) < 5:
            assert not [p.communicate() for p in started if p.poll() is not None]
            time.sleep(0.05)
        started[told].send_signal(signal.SIGTERM)
        codes = []
        for process in started:
            _, said = process.communicate(timeout=300)
            assert said == ""
            codes.append(process.returncode)
    # Who was told says so; the other one ended as it would have.
    assert codes == [128 + signal.SIGTERM if i == told else 0 for i in range(2)]
    steps = [step for step, loss, _ in losses(out) if loss is not None]
    assert steps == [*range(1, len(steps) + 1)]
    saved = [int(p.name) for p in (out / "checkpoints").iterdir() if p.name.isdigit()]
    assert max(saved) == steps[-1]
