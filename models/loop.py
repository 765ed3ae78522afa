"""The training loop: batches in, losses and checkpoints out, to be stopped and resumed at will."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from rich.console import Console

from models.data import Corpus, load_corpus, train_batches, validation_batches
from models.errors import InputError
from models.record import Display, Log
from models.run import RunConfig, start
from models.step import Metrics, TrainState, compile_step, make_evaluate
from models.store import Store


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    state: TrainState
    step: int
    interrupted: bool


def train(run: RunConfig, console: Console) -> Outcome:
    """Train until `run.optim.steps` updates are done, a time limit, or an interrupt.

    Writes `log.jsonl` and `checkpoints/` to `run.out`. Every ending but a kill saves the state
    first, and a kill costs the steps since the last save.

    Raises:
      InputError: data, folder or checkpoint cannot be used.
    """
    started = time.perf_counter()
    corpus = load_corpus(run.data, run.model.context)
    try:
        run.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot create {run.out}: {error.strerror}") from error
    store = Store(run.out / "checkpoints", keep=run.keep, background=run.background_saves)
    with contextlib.closing(store):
        state, meta = start(run, corpus, store, console)
        first = 0 if meta is None else meta["step"]
        log = Log(run.out / "log.jsonl", after=first)
        display = Display(console, first=first, total=run.optim.steps, every=run.log_every)
        with contextlib.closing(log), display, _interrupts(display.say) as interrupted:
            batches = _Batches(run, corpus, None if meta is None else meta["data_state"])
            evaluate = _evaluation(run, corpus)
            compiled = compile_step(run.model, run.optim, run.tokens_shape())
            reporter = _Reporter(run, log, display)

            def judge(step: int) -> None:
                reporter.flush()
                bits = evaluate(state)
                log.write(step=step, validation_bits_per_byte=bits)
                display.say(f"step {step}: validation {bits:.3f} bits per byte")
                reporter.restart_clock()

            def save(step: int) -> None:
                reporter.flush()
                meta = {
                    "identity": run.identity(corpus),
                    "model": dataclasses.asdict(run.model),
                    "data_state": batches.state(),
                }
                store.save(step, state, meta)

            if first == 0:
                judge(0)
            step, saved = first, first
            out_of_time = False
            while step < run.optim.steps and not interrupted() and not out_of_time:
                state, metrics = compiled(state, batches.next())
                step += 1
                reporter.push(step, metrics)
                out_of_time = time.perf_counter() - started > run.max_seconds
                last = step == run.optim.steps or out_of_time
                if last or step % run.eval_every == 0:
                    judge(step)
                if last or step % run.save_every == 0:
                    save(step)
                    saved = step
            if saved != step:
                save(step)
            store.wait()
            return Outcome(state, step, interrupted())


class _Batches:
    """Batches in the shape of a step, and the state that `--resume` needs to go on from there."""

    def __init__(self, run: RunConfig, corpus: Corpus, state: dict[str, Any] | None) -> None:
        self._shape = run.tokens_shape()
        self._iterator = train_batches(
            corpus.train,
            window=run.model.context,
            batch=run.batch * run.accumulate,
            seed=run.seed,
        )
        if state is not None:
            self._iterator.set_state(state)

    def next(self) -> np.ndarray:
        return next(self._iterator).reshape(self._shape)

    def state(self) -> dict[str, Any]:
        return self._iterator.get_state()


class _Reporter:
    """Logs each step when the next one has been started, so that the device never waits for it."""

    def __init__(self, run: RunConfig, log: Log, display: Display) -> None:
        self._tokens = run.batch * run.accumulate * run.model.context
        self._log = log
        self._display = display
        self._pending: tuple[int, Metrics] | None = None
        self._seconds: float | None = None
        self.restart_clock()

    def restart_clock(self) -> None:
        self._clock = time.perf_counter()

    def push(self, step: int, metrics: Metrics) -> None:
        self.flush()
        self._pending = (step, metrics)

    def flush(self) -> None:
        if self._pending is None:
            return
        step, metrics = self._pending
        self._pending = None
        values = {name: float(value) for name, value in metrics.items()}
        if not math.isfinite(values["loss"] + values["grad_norm"]):
            raise InputError(
                f"the loss of step {step} is {values['loss']}, its gradient's norm"
                f" {values['grad_norm']}: lower --learning-rate; what was saved is intact"
            )
        now = time.perf_counter()
        elapsed, self._clock = now - self._clock, now
        self._log.write(step=step, **values, seconds=elapsed)
        # A moving average over about ten steps: a single one jumps with the machine's load.
        before = elapsed if self._seconds is None else self._seconds
        self._seconds = 0.9 * before + 0.1 * elapsed
        self._display.update(step, values["loss"], self._seconds, self._tokens / self._seconds)


def _evaluation(run: RunConfig, corpus: Corpus) -> Callable[[TrainState], float]:
    batches = validation_batches(
        corpus.validation,
        window=run.model.context,
        batch=run.batch,
        windows=run.eval_windows,
    )
    evaluate = make_evaluate(run.model)

    def bits_per_byte(state: TrainState) -> float:
        losses = [evaluate(state.params, batch) for batch in batches]
        return float(np.mean(losses)) / math.log(2)

    return bits_per_byte


@contextlib.contextmanager
def _interrupts(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Within, a first Ctrl-C is remembered and told, and a second one acts as it always does."""
    seen = False
    before = signal.getsignal(signal.SIGINT)

    def note(*_: object) -> None:
        nonlocal seen
        seen = True
        say("stopping after this step, and saving; press again to stop at once")
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, before)
