"""The optimal places of a loop's stored states, and how many steps run again from them.

A slot is the memory for one stored state of a loop of known length. Griewank and Walther,
"Algorithm 799: revolve", 2000, section 2. `checkpoints.py` has the loops.
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np


@functools.lru_cache(maxsize=64)
def slot_of_each_step(length: int, n: int) -> np.ndarray:
    """Return the slot for the state before each step of a loop of known length.

    Slots 0 to n - 1 keep their state for the backward pass. Each other state goes to the extra slot
    n, where the next one overwrites it.
    """
    indices = np.full(length, n, np.int32)
    i, free = 0, n
    while free and i < length:
        indices[i] = n - free
        free -= 1
        i += _known_distance(length - i, free) if length - i > 1 else 1
    return indices


def _known_distance(length: int, free: int) -> int:
    """Compute `_distance` for Python integers; `length` is greater than 1."""
    if not free:
        return length - 1
    runs = _least_runs(length, free + 1)
    return min(math.comb(free + runs, free + 1), length - math.comb(free + runs - 1, free))


def _least_runs(length: int, n: int) -> int:
    """Return the least t such that t runs of each step suffice for the backward pass, with n slots.

    The loop has `length` steps.
    """
    return next(t for t in itertools.count() if math.comb(n + t, n) >= length)


def steps_run(length: int, n: int) -> int:
    """Return how many steps a loop runs in both passes together, with n slots at the best places.

    Only the steps that compute states count: all but the last in the forward pass, and the steps
    that the backward pass recomputes. Griewank and Walther, 2000, section 2.

    >>> from xform.interpret.slots import steps_run
    >>> steps_run(1000, 44)
    1954
    """
    if length < 2:
        return 0
    runs = _least_runs(length, n)
    return runs * length - math.comb(n + runs, n + 1)


def recomputed_steps(length: int, n: int) -> int:
    """Return how many steps the backward pass runs again to compute states, with n slots."""
    return steps_run(length, n) - max(length - 1, 0)
