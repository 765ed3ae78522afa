"""Differentiate random programs by xform and by JAX, keep totals, and resume after a stop."""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
from multiprocessing.connection import wait
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from experiments.fuzz.show import close, show
from experiments.fuzz.totals import Totals, fingerprint, report
from experiments.fuzz.worker import CONDITIONS, Result, one, prepare, work
from tests.fuzz.check import Outcome

LIMIT = 300.0  # seconds for one program
SHRUNK = 40  # failures that are reduced; further ones are only counted


class Worker:
    """A process that checks one program after the other, and may crash."""

    def __init__(self, context: Any, condition: str):
        self.context, self.condition = context, condition
        self.start()

    def start(self) -> None:
        """Start a new process."""
        self.pipe, theirs = self.context.Pipe()
        self.process = self.context.Process(target=work, args=(theirs, self.condition), daemon=True)
        self.process.start()
        theirs.close()
        self.seed: int | None = None
        self.since = 0.0

    def give(self, seed: int, shrink: bool) -> None:
        """Send it one program."""
        self.pipe.send((seed, shrink))
        self.seed, self.since = seed, time.monotonic()

    def lost(self) -> bool:
        """Return whether it has died, or takes too long."""
        late = time.monotonic() - self.since > LIMIT
        return self.seed is not None and (late or not self.process.is_alive())

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def run(totals: Totals, n: int, workers: int) -> None:
    """Check programs until `n` have been compared. Totals are updated in the order of seeds."""
    context = multiprocessing.get_context("spawn")
    seeds = itertools.count(totals.next)
    waiting: dict[int, Result] = {}
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[rate]} programs/s"), TimeElapsedColumn(), TextColumn("left:"),
        TimeRemainingColumn(elapsed_when_finished=False),
    )  # fmt: skip
    pool = [Worker(context, totals.condition) for _ in range(workers)]
    started, before, saved = time.monotonic(), totals.programs, time.monotonic()
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as progress:
        task = progress.add_task("", total=n, completed=totals.programs, rate="...")
        try:
            for w in pool:
                w.give(next(seeds), True)
            while totals.programs < n:
                for result in _results(pool):
                    waiting[result.seed] = result
                while totals.next in waiting and totals.programs < n:
                    totals.add(waiting.pop(totals.next))
                for w in pool:
                    if w.seed is None:
                        w.give(next(seeds), len(totals.failures) < SHRUNK)
                now = time.monotonic()
                if now - saved > 10:
                    totals.seconds += now - saved
                    totals.save()
                    saved = now
                rate = (totals.programs - before) / max(now - started, 1e-9)
                progress.update(
                    task,
                    completed=totals.programs,
                    description=f"mismatches {totals.mismatch}, crashes {totals.crash}",
                    rate=f"{rate:.1f}",
                )
        finally:
            for w in pool:
                w.stop()
            totals.seconds += time.monotonic() - saved
            totals.save()


def _results(pool: list[Worker]) -> list[Result]:
    """Return the results so far. A program that kills its process, or does not end, is a crash."""
    out: list[Result] = []
    for pipe in wait([w.pipe for w in pool], timeout=1.0):
        w = next(w for w in pool if w.pipe is pipe)
        try:
            out.append(pipe.recv())
            w.seed = None
        except EOFError:
            w.process.join()
    for w in pool:
        if w.lost():
            assert w.seed is not None
            what = "takes too long" if w.process.is_alive() else "the process died"
            out.append(Result(w.seed, Outcome("crash", "process", text=what)))
            w.stop()
            w.start()
    return out


def main() -> int:
    """Run until `--programs` have been compared; or show one program, or recheck the cases."""
    parser = argparse.ArgumentParser(prog="python -m experiments.fuzz.run", description=__doc__)
    parser.add_argument("-n", "--programs", type=int, default=20_000, help="programs in total")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", type=int, metavar="SEED", help="show one program and its results")
    parser.add_argument("--condition", default="", choices=[*CONDITIONS],
                        help="run all programs under a condition, with totals of its own: "
                        "symbolic has a batch of unknown size, as under jax.export")  # fmt: skip
    parser.add_argument("--cases", action="store_true", help="close the cases that now pass")
    parser.add_argument("--again", action="store_true", help="retry the programs that failed")
    options = parser.parse_args()
    if options.only is not None:
        return show(options.only, options.condition)
    prepare()
    if options.cases:
        return close()
    totals = Totals.load(fingerprint(), options.condition)
    if options.again:
        for seed in [f["seed"] for f in totals.failures]:
            totals.forget(seed)
            totals.add(one(seed, True, options.condition))
        totals.save()
    try:
        run(totals, options.programs, options.workers)
    except KeyboardInterrupt:
        print("Stopped. The same command continues from here.", file=sys.stderr)
    report()
    return 1 if totals.mismatch or totals.crash or totals.invalid else 0


if __name__ == "__main__":
    sys.exit(main())
