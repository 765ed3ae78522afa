"""`checkpoints_per_while_loop`: set how many states a loop of unknown length stores.

Reverse mode goes back through such a loop from stored states (`interpret/checkpoints.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from xform.errors import WrongArgument
from xform.interpret.checkpoints import SNAPSHOTS


def checkpoints_per_while_loop(n: int) -> AbstractContextManager[None]:
    """Set how many states reverse mode stores for each `lax.while_loop` in this context.

    The default is 32.

    The setting applies to `lax.while_loop`, and to `lax.fori_loop` with a traced trip count. The
    backward pass of such a loop recomputes parts of it from stored states. The derivative is exact
    for any number of steps. `n` is read when a derivative is traced, so a compiled function keeps
    the value from that time.

    Args:
      n: the number of states, at least 1.

    Returns:
      A context manager that is also a decorator.

    Raises:
      WrongArgument: `n` is not a positive integer.

    Memory: `n` + 2 states, for any number of steps. A state is the part of the loop's carry that
    the derivative of a step reads. The forward pass saves nothing else. The backward pass also
    holds the intermediate values of one step at a time. A loop inside `lax.scan` stores these
    states for each iteration of the scan. A loop inside another while loop stores them once.

    Time: in a loop of at most `n` steps, each step runs once forward, and once more to be
    differentiated. In a longer loop, each step is also recomputed, this many times on average:

    | steps | 100 | 1000 | 5000 | 100,000 |
    | --- | --- | --- | --- | --- |
    | n = 4 | 3.1 | 7.8 | 12 | 32 |
    | n = 32 | 0.9 | 1.6 | 2.0 | 3.5 |
    | n = 100 | 0.0 | 0.9 | 1.4 | 2.0 |

    Under `vmap`, all examples run for as many steps as the longest one. A new state is written into
    the memory of the stored states, which XLA updates without copying it. XLA copies it if `vmap`
    maps over the pullbacks themselves, as in `jax.vmap(lambda pull, ct: pull(ct))(pulls, cts)`.
    Reverse mode over reverse mode goes back through the loops of both passes, and stores `n` times
    the memory above. Prefer forward over reverse (`xform.hessian`, `xform.hvp`).

    Source: Griewank and Walther, "Algorithm 799: revolve", 2000; Stumm and Walther, "New
    algorithms for optimal online checkpointing", 2010.

    >>> def root(a):  # Newton's iteration, until it converges
    ...     moving = lambda s: abs(s[0] - s[1]) > 1e-6
    ...     step = lambda s: (0.5 * (s[0] + a / s[0]), s[0])
    ...     return jax.lax.while_loop(moving, step, (a, 0.0))[0]
    >>> with xform.policies.checkpoints_per_while_loop(4):
    ...     slope = xform.grad(root)(9.0)
    >>> print(f"{slope:.4f}")
    0.1667
    """
    try:
        count = operator.index(n)
    except TypeError:
        count = 0
    if count < 1:
        raise WrongArgument(
            f"checkpoints_per_while_loop({n!r})",
            "the backward pass of a loop starts from a stored state, so it needs at least one",
            "",
            "pass a positive integer",
        )
    return _storing(count)


@contextmanager
def _storing(n: int) -> Generator[None, Any, None]:
    """Return a context in which each while loop stores `n` states."""
    token = SNAPSHOTS.set(n)
    try:
        yield
    finally:
        SNAPSHOTS.reset(token)
