"""Reports of the metrics of each step to the log and to the display."""

from __future__ import annotations

import math
import time

from models.errors import InputError
from models.train.config import RunConfig
from models.train.device import flops_per_second, peak_bytes
from models.train.display import Display
from models.train.log import Log
from models.train.planned import PlannedStep
from models.train.step import Metrics

# A step costs as much as three forward passes: for each matrix product of the forward pass, the
# backward pass has two.
PASSES = 3


class Reporter:
    """Logs each step after the next one has been started, so that the device never waits.

    The utilization (MFU) counts the FLOPs of the loss and its derivative, without recomputed ones.
    It is logged if the device's speed is known. Peak memory is logged if the device counts it.
    """

    def __init__(self, run: RunConfig, planned: PlannedStep, log: Log, display: Display) -> None:
        self._run = run
        self._units = run.batch * run.accumulate * run.length
        self._flops = PASSES * planned.plan.forward_flops * run.accumulate
        self._device_speed = flops_per_second()
        self._planned_bytes = planned.total_bytes
        self._log = log
        self._display = display
        self._pending: tuple[int, Metrics] | None = None
        self._seconds: float | None = None
        self._skipped = 0
        self.restart_clock()

    def restart_clock(self) -> None:
        """Start the time measurement of the next step now."""
        self._clock = time.perf_counter()

    def push(self, step: int, metrics: Metrics) -> None:
        """Take the metrics of a step that has been started, and log the step before."""
        self.flush()
        self._pending = (step, metrics)

    def flush(self) -> None:
        """Log the pending step.

        Raises:
          InputError: too many steps in a row were skipped, or the parameters are not finite.
        """
        if self._pending is None:
            return
        step, metrics = self._pending
        self._pending = None
        values = {name: float(value) for name, value in metrics.items()}
        now = time.perf_counter()
        elapsed, self._clock = now - self._clock, now
        # Show a moving average over about ten steps, because single steps vary with the load.
        before = elapsed if self._seconds is None else self._seconds
        self._seconds = 0.9 * before + 0.1 * elapsed
        rates = {f"{self._run.unit}_per_second": self._units / elapsed}
        mfu = None
        if self._device_speed is not None:
            mfu = self._flops / self._seconds / self._device_speed
            rates["mfu"] = self._flops / elapsed / self._device_speed
        self._log.write(step=step, **values, seconds=elapsed, **rates, **self._memory())
        rate = f"{self._units / self._seconds:,.0f} {self._run.unit}/s"
        self._display.update(step, self._run.metrics_text(values), self._seconds, rate, mfu)
        self._check_skips(step, values)

    def _memory(self) -> dict[str, float]:
        """Return the peak memory in use, and its ratio to that of the compiled step."""
        used = peak_bytes()
        return (
            {} if used is None else {"peak_bytes": used, "peak_to_plan": used / self._planned_bytes}
        )

    def _check_skips(self, step: int, values: dict[str, float]) -> None:
        """Report a skipped step, and stop the run after too many in a row.

        Also stop it if a gradient that is not finite was applied. Only a fused update does that.
        """
        self._skipped = self._skipped + 1 if values["skipped"] else 0
        if not self._skipped:
            if not math.isfinite(values["grad_norm"]):
                raise InputError(
                    f"the gradient of step {step} is not finite, and --fused-update has applied it"
                    " already: continue from the last checkpoint with --resume and a lower"
                    " --learning-rate (--override learning_rate), or without --fused-update"
                    " (--override fused_update), which skips such a step"
                )
            return
        numbers = f"loss {values['loss']:.4g}, gradient norm {values['grad_norm']:.4g}"
        self._display.say(f"step {step} was skipped: {numbers}")
        if self._skipped > self._run.optim.max_skips:
            raise InputError(
                f"{self._skipped} steps in a row were skipped, the last with {numbers}: continue"
                " from a checkpoint with --resume-step and a lower --learning-rate (--override"
                " learning_rate), or raise --spike-factor or --max-skips if the skips are harmless"
            )
