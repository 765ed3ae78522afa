"""What is said of each step: to the log, and to whoever watches."""

from __future__ import annotations

import time

from models.errors import InputError
from models.train.config import RunConfig
from models.train.device import peak_bytes, speed
from models.train.display import Display
from models.train.log import Log
from models.train.planned import PlannedStep
from models.train.step import Metrics

# A forward pass costs a third of a step: the backward pass has two products for each of its own.
PASSES = 3


class Reporter:
    """Logs each step when the next one has been started, so that the device never waits for it.

    The utilization (MFU) is of the FLOPs that the loss and its derivative need, without those that
    are run again; it is not logged where the device's speed is not known, nor is the memory that
    the device counts.
    """

    def __init__(self, run: RunConfig, planned: PlannedStep, log: Log, display: Display) -> None:
        self._run = run
        self._units = run.batch * run.accumulate * run.length
        self._flops = PASSES * planned.plan.forward_flops * run.accumulate
        self._speed = speed()
        self._predicted = planned.predicted_bytes or planned.total_bytes
        self._log = log
        self._display = display
        self._pending: tuple[int, Metrics] | None = None
        self._seconds: float | None = None
        self._skipped = 0
        self.restart_clock()

    def restart_clock(self) -> None:
        """Count no time before now for the next step."""
        self._clock = time.perf_counter()

    def push(self, step: int, metrics: Metrics) -> None:
        """Take the metrics of a step that was started, and log those of the step before."""
        self.flush()
        self._pending = (step, metrics)

    def flush(self) -> None:
        """Log what is pending.

        Raises:
          InputError: too many steps in a row were skipped.
        """
        if self._pending is None:
            return
        step, metrics = self._pending
        self._pending = None
        values = {name: float(value) for name, value in metrics.items()}
        now = time.perf_counter()
        elapsed, self._clock = now - self._clock, now
        # A moving average over about ten steps: a single one jumps with the machine's load.
        before = elapsed if self._seconds is None else self._seconds
        self._seconds = 0.9 * before + 0.1 * elapsed
        speed = {f"{self._run.unit}_per_second": self._units / elapsed}
        mfu = None
        if self._speed is not None:
            mfu = self._flops / self._seconds / self._speed
            speed["mfu"] = self._flops / elapsed / self._speed
        self._log.write(step=step, **values, seconds=elapsed, **speed, **self._memory())
        rate = f"{self._units / self._seconds:,.0f} {self._run.unit}/s"
        self._display.update(step, self._run.said(values), self._seconds, rate, mfu)
        self._count(step, values)

    def _memory(self) -> dict[str, float]:
        """Bytes in use at most, beside those that the plan predicted."""
        used = peak_bytes()
        return {} if used is None else {"peak_bytes": used, "peak_to_plan": used / self._predicted}

    def _count(self, step: int, values: dict[str, float]) -> None:
        self._skipped = self._skipped + 1 if values["skipped"] else 0
        if not self._skipped:
            return
        what = f"loss {values['loss']:.4g}, norm of the gradient {values['grad_norm']:.4g}"
        self._display.say(f"step {step} was skipped: {what}")
        if self._skipped > self._run.optim.most_skips:
            raise InputError(
                f"{self._skipped} steps in a row were skipped, the last with {what}: continue from"
                " a checkpoint with --resume-step and a lower --learning-rate (--override"
                " learning_rate), or raise --spike or --most-skips if that is no harm"
            )
