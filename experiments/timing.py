"""Compare the speed of two compiled functions on a noisy machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


def seconds(run: Callable[..., Any], args: Sequence[Any]) -> float:
    """Return the wall seconds of one call, to the end of the computation."""
    start = time.perf_counter()
    jax.block_until_ready(run(*args))
    return time.perf_counter() - start


def paired(one: Callable[..., Any], other: Callable[..., Any], args: Sequence[Any], n: int = 9):
    """Return the median ratio of times `one / other`, with its quartiles.

    The two alternate in one process and swap their order, so a slow machine slows both. Each pair
    gives one ratio.
    """
    for run in (one, other):
        jax.block_until_ready(run(*args))
    ratios: list[float] = []
    for i in range(n):
        if i % 2:
            b, a = seconds(other, args), seconds(one, args)
        else:
            a, b = seconds(one, args), seconds(other, args)
        ratios.append(a / b)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return middle, low, high
