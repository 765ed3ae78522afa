"""One process of the fuzz: receives seeds through a pipe, and returns results."""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import jax
import numpy as np

from tests import own_ad
from tests.fuzz.cases import Case, case
from tests.fuzz.check import Outcome, check
from tests.fuzz.generate import Sample, sample
from tests.fuzz.modes import order
from tests.fuzz.shrink import shrink
from tests.fuzz.source import depth

# Programs run one primitive at a time. Compiled programs are small, or only compared.
_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
EAGER, COMPILED = 20, 50  # one program out of this many
_TRACED = ("staged", "staged", "closed", "single")
_SECONDS = 90.0  # limit for reducing a failure
_FRESH = 100  # programs after which JAX's caches are cleared, because they hold every trace


@dataclasses.dataclass
class Result:
    """The result of one program; `case` is a failure in the form that the tests store."""

    seed: int
    outcome: Outcome
    ways: tuple[str, ...] = ()
    order: int = 0
    depth: int = 0
    case: Case | None = None


# Ways to run all programs under a condition, instead of those of `ways`, by its name.
CONDITIONS = {"symbolic": ("symbolic",)}


def ways(seed: int, condition: str = "") -> tuple[str, ...]:
    """Return how a program is run: always traced, sometimes also eagerly or compiled."""
    if condition:
        return CONDITIONS[condition]
    more = ["eager"] * (seed % EAGER == 0) + ["single-eager"] * (seed % EAGER == EAGER // 2)
    more += ["compiled"] * (seed % COMPILED == COMPILED // 2)
    return (_TRACED[seed % len(_TRACED)], *more)


def prepare() -> None:
    """Set up JAX and NumPy for the comparison: CPU, 64 bits. Call it before JAX's first use."""
    if _FLAGS not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    # The place where an exception was raised tells whose failure it is.
    jax.config.update("jax_traceback_filtering", "off")
    np.seterr(all="ignore")


def work(pipe: Connection, condition: str) -> None:
    """Check the seeds from the pipe until it is closed, under a condition ("" means none)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    prepare()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)
    done = 0
    with own_ad.guard():
        while True:
            try:
                seed, small = pipe.recv()
            except EOFError:
                return
            pipe.send(one(seed, small, condition))
            done += 1
            if done % _FRESH == 0:
                jax.clear_caches()
                gc.collect()


def one(seed: int, small: bool, condition: str = "") -> Result:
    """Check one program. If it fails and `small` is set, find a smaller failing one."""
    s, how = sample(seed), ways(seed, condition)
    outcome = check(s, how)
    result = Result(seed, outcome, how, order(s.levels), depth(s.block))
    if outcome.failed and small:
        result.case = case(*smaller(s, outcome, how))
    return result


def smaller(s: Sample, outcome: Outcome, how: Sequence[str]) -> tuple[Sample, Outcome]:
    """Return a smaller sample that fails if it is run in the ways `how`, and how it fails."""
    end = time.monotonic() + _SECONDS
    s = shrink(s, lambda t: time.monotonic() < end and check(t, how).kind == outcome.kind)
    return s, check(s, how)
