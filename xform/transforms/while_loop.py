"""`while_checkpoints`: how many states a loop of unknown length stores for its way back."""

from __future__ import annotations

import operator
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from xform.errors import WrongArgument
from xform.interpret.checkpoints import SNAPSHOTS


def while_checkpoints(n: int) -> AbstractContextManager[None]:
    """Within this context, reverse mode stores `n` states of each `lax.while_loop` (32 without it).

    Reverse mode through `lax.while_loop`, and `lax.fori_loop` with a traced number of steps, goes
    back by running parts of the loop again from stored states, and is exact for any number of
    steps. `n` is read where a derivative is traced: a function that is compiled keeps the number
    that held then.

    Args:
      n: the number of states, at least 1.

    Returns:
      A context manager, which is also a decorator.

    Raises:
      WrongArgument: `n` is not a positive integer.

    Memory: `n` + 2 states, however many steps there are. A state is what the derivative of a step
    reads of the loop's carries; nothing else is kept from forward to backward, and the intermediate
    values of one step while it is gone back over. A loop inside `lax.scan` stores that many states
    in each of the scan's trips; a loop inside a loop, once.

    Time: up to `n` steps, each is run once forward and once to be differentiated. Further runs of
    each step, on average:

    | steps | 100 | 1000 | 5000 | 100,000 |
    | --- | --- | --- | --- | --- |
    | n = 4 | 3.1 | 7.8 | 12 | 32 |
    | n = 32 | 0.9 | 1.6 | 2.0 | 3.5 |
    | n = 100 | 0.0 | 0.9 | 1.4 | 2.0 |

    Under `vmap` all lanes run as long as the longest, and the stored states are not copied; they
    are where it is pullbacks that are batched (`jax.vmap` of a function of several `pull`s).
    `xform.vjp` of such a derivative goes back through the loops of both passes, and stores
    `n` times the memory above: prefer forward over reverse (`xform.hessian`, `xform.hvp`).

    Source: Griewank and Walther, "Algorithm 799: revolve", 2000; Stumm and Walther, "New
    algorithms for optimal online checkpointing", 2010.

    >>> def root(a):  # Newton's iteration, until it stands still
    ...     moving = lambda s: abs(s[0] - s[1]) > 1e-6
    ...     step = lambda s: (0.5 * (s[0] + a / s[0]), s[0])
    ...     return jax.lax.while_loop(moving, step, (a, 0.0))[0]
    >>> with xform.while_checkpoints(4):
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
            f"while_checkpoints({n!r})",
            "the way back through a loop starts from a stored state, so there is at least one",
            "",
            "pass a positive integer",
        )
    return _slots(count)


@contextmanager
def _slots(n: int) -> Generator[None, Any, None]:
    token = SNAPSHOTS.set(n)
    try:
        yield
    finally:
        SNAPSHOTS.reset(token)
