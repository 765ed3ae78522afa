"""A training run in separate processes: undisturbed, or killed at random moments and resumed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from models.train.folder import CHECKPOINTS, LOG
from models.train.log import read_records
from models.train.store import Store

COMMAND = [sys.executable, "-m", "models", "train"]
FURTHEST = 40


@dataclasses.dataclass(frozen=True)
class Life:
    """One process of a run, from its start to its kill.

    Attributes:
      began, ended: seconds since the first process of the run began.
      resumed: the step from which it continued.
      reached: the last step that it logged.
      moment: its state when it was killed: "starting", before its first step, "training", or
        "saving", while a checkpoint was written.
    """

    began: float
    ended: float
    resumed: int
    reached: int
    moment: str


def begun(out: Path, flags: list[str], devices: int = 1) -> subprocess.Popen[bytes]:
    """Start or continue the run of a folder on this many CPU devices, and return its process."""
    resume = ["--resume"] if saved(out) else []
    environment = {**os.environ, "JAX_PLATFORMS": "cpu",
                   "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}  # fmt: skip
    command = [*COMMAND, *flags, "--out", str(out), *resume]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def finished(out: Path, flags: list[str], devices: int = 1) -> float:
    """Let a run continue to its end, and return the seconds that it took."""
    began = time.perf_counter()
    if begun(out, flags, devices).wait():
        raise RuntimeError(f"the run in {out} failed")
    return time.perf_counter() - began


def killed(out: Path, flags: list[str], kills: int, usual: float) -> list[Life]:
    """Kill a run `kills` times and resume it after each kill but the last.

    Half of the moments is drawn from the `usual` seconds that a process takes to its first step.
    The other half is one of the `FURTHEST` steps after the last saved one. Up to 0.1 seconds are
    added to each.
    """
    rng, first = random.Random(kills), time.perf_counter()
    lives: list[Life] = []
    for _ in range(kills):
        if rng.random() < 0.5:
            moment = rng.uniform(0, usual)
            dies = lambda age, m=moment: age > m
        else:
            step = saved(out) + rng.randint(1, FURTHEST)
            dies = lambda _, n=step: logged(out) >= n
        later = rng.uniform(0, 0.1)
        lives.append(_life(out, flags, 1, first, dies, later))
        print(len(lives), lives[-1], flush=True)
    return lives


def killed_after(out: Path, flags: list[str], step: int, devices: int) -> Life:
    """Kill a run after it has saved a step, or a later one."""
    reached = lambda _: saved(out) >= step
    return _life(out, flags, devices, time.perf_counter(), reached)


def _life(out: Path, flags: list[str], devices: int, first: float,
          dies: Callable[[float], bool], later: float = 0.0) -> Life:  # fmt: skip
    resumed, began, clock = saved(out), time.perf_counter(), time.time()
    process = begun(out, flags, devices)
    while not dies(time.perf_counter() - began):
        if process.poll() is not None:
            raise RuntimeError(f"the run in {out} ended by itself: give it more steps")
        time.sleep(0.01)
    time.sleep(later)
    process.send_signal(signal.SIGKILL)
    process.wait()
    ended = time.perf_counter()
    reached = logged(out) if _changed(out / LOG) > clock else resumed
    moment = "starting" if reached == resumed else "training"
    if moment == "training" and any("tmp" in p.name for p in (out / CHECKPOINTS).iterdir()):
        moment = "saving"
    return Life(began - first, ended - first, resumed, reached, moment)


def saved(out: Path) -> int:
    """Return the last saved step; 0 without one."""
    folder = out / CHECKPOINTS
    names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    return max((int(name) for name in names if name.isdigit()), default=0)


def logged(out: Path) -> int:
    """Return the last logged step; 0 without one."""
    return max((r["step"] for r in read_records(out / LOG)), default=0)


def records(out: Path) -> list[dict[str, Any]]:
    """Return everything that the log records for each step, except times."""
    kept = lambda record: {name: x for name, x in record.items() if "second" not in name}
    return [kept(record) for record in read_records(out / LOG)]


def losses(out: Path) -> list[float]:
    """Return the loss of each step."""
    return [r["loss"] for r in read_records(out / LOG) if "loss" in r]


def arrays(out: Path) -> dict[str, int]:
    """Return checksums of all arrays of the last checkpoint, by name."""
    with contextlib.closing(Store(out / CHECKPOINTS, read_only=True)) as store:
        return store.meta(store.steps()[-1])["checksums"]


def _changed(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0
