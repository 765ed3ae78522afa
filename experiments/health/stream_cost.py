"""What does a stream of health reports at every 50 steps add to the time of the trainer?

python -m experiments.health.stream_cost [--again]
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from experiments.report import keep, known, write_table
from models.data.batches import Share
from models.nets.gpt2 import GPT2Config
from models.train.display import Display
from models.train.health import Health
from models.train.kinds import of_model
from models.train.log import Log
from models.train.optim import OptimConfig
from models.train.planned import plan_step, policy_of
from models.train.report import Reporter
from models.train.state import init_state

HERE = Path(__file__).parent
FILE = HERE / "stream_cost.json"
STEPS, EVERY = 200, 50
# GPT-2 small on short sequences, its layers and heads with smaller sizes, and a preset.
MODELS = {
    "GPT-2 small (124M), 1 x 64 tokens": (GPT2Config(50257, 64, 768, 12, 12, dropout=0.0), 1),
    "12 layers of 192, 4 x 128 tokens": (GPT2Config(256, 128, 192, 12, 12, dropout=0.0), 4),
    "trainer's preset tiny, 16 x 128 tokens": (GPT2Config(dropout=0.0), 16),
}


class Training:
    """A run of the trainer's parts, one step at a time, with or without reports."""

    def __init__(self, run: Any, folder: Path, opened: contextlib.ExitStack) -> None:
        folder.mkdir()
        self._planned = plan_step(run, policy_of(run.policy))
        display = Display(Console(quiet=True), first=0, total=STEPS, every=STEPS)
        log = opened.enter_context(contextlib.closing(Log(folder / "log.jsonl", after=None)))
        start = time.perf_counter()
        self._health = Health(run, None, folder / "health.jsonl", None, log, display)
        self.compile_seconds = time.perf_counter() - start
        self._reporter = Reporter(run, self._planned, log, display)
        self._state = init_state(run.model, run.optim, 0)
        self.seconds = list[float]()

    def step(self, number: int, batch: Any) -> None:
        """Run a step as the trainer does, to its end, and add its seconds."""
        start = time.perf_counter()
        due = self._health.due(number)
        run_step = self._health.step if due else self._planned.step
        self._state, metrics = run_step(self._state, batch)
        readings = metrics.pop("health", None)
        self._reporter.push(number, metrics)
        if due:
            self._reporter.flush()
            self._health.write(number, float(metrics["loss"]), readings)
        jax.block_until_ready(self._state)
        self.seconds.append(time.perf_counter() - start)


def measure(model: Any, batch: int) -> dict[str, float]:
    """Return the seconds of 200 steps with reports and without, whose steps alternate."""
    run = dataclasses.replace(of_model(model), batch=batch, optim=OptimConfig(steps=STEPS))
    data = run.load()
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    batches = run.batches(data, Share(0, 1), here)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as opened:
        with_reports = dataclasses.replace(run, health_every=EVERY)
        on = Training(with_reports, Path(name) / "on", opened)
        off = Training(run, Path(name) / "off", opened)
        for number in range(STEPS + 1):
            arrays = next(batches)
            pair = (on, off) if number % 2 else (off, on)
            for training in pair:
                training.step(number, arrays)
        # Step 0 warms up. It also has a report, the first run of that program.
        a, b = on.seconds[1:], off.seconds[1:]
    at_reports = [i for i in range(STEPS) if (i + 1) % EVERY == 0]
    added = [a[i] / b[i] for i in at_reports]
    return {
        "step_seconds": statistics.median(b),
        "ratio": sum(a) / sum(b),
        "others": sum(x for i, x in enumerate(a) if i not in at_reports)
        / sum(x for i, x in enumerate(b) if i not in at_reports),
        "step_with_report": statistics.median(added),
        "compile_seconds": on.compile_seconds,
    }


def main() -> None:
    """Measure what is missing, keep the results, and print the table."""
    again = "--again" in sys.argv
    for name, (model, batch) in MODELS.items():
        if again or name not in known(FILE):
            print(name, keep(FILE, name, measure(model, batch))[name], flush=True)
    rows: list[list[str]] = []
    for name, found in known(FILE).items():
        amortized = 1 + (found["step_with_report"] - 1) / EVERY
        rows.append([
            name, f"{1e3 * found['step_seconds']:.0f} ms", f"{found['ratio']:.3f}",
            f"{found['others']:.3f}", f"{found['step_with_report']:.2f}", f"{amortized:.4f}",
            f"{found['compile_seconds']:.0f} s",
        ])  # fmt: skip
    head = ["model", "step", "200 steps, with / without", "the 196 equal steps", "step with report",
            "amortized", "second program compiles"]  # fmt: skip
    write_table(HERE, head, rows, "stream_cost")


if __name__ == "__main__":
    main()
