"""Switches: which parts of a program steer XLA. All are on, except in experiments and tests.

`experiments/steering` compiles programs with each of them on and off, for every supported version
of JAX. What makes no difference on any version can go.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Generator

from xform.program.ir import clear_program_cache


@dataclasses.dataclass(frozen=True)
class Steering:
    """Which parts are on.

    Attributes:
      recomputes_wait: recomputed operations wait for a cotangent (`wait.py`).
      early_recomputes_wait: they also do at the beginning of the backward pass, if they are slow.
      operands_wait: so do all operands of a product that is recomputed there, on GPUs.
      selects: on a CPU a barrier is a select; otherwise it is an optimization barrier, as on other
        backends (`barrier.py`).
      gradients_first: a layer waits for the gradients of the layer after it (`gradients_first.py`).
      draws_wait: random draws wait for the layer that reads them (`draws.py`).
      saved_values_written: saved values that are much smaller than what they are computed from are
        written to memory (`must_materialize.py`).
      pooling_operands_written: so are operands of pooling.
      long_chains_written: results of long chains of cheap operations are written to memory
        (`long_chains.py`).
      own_layouts: slices of stacks have layouts of their own (`own_layout.py`).
      sums_in_loops: inner loops add to the gradients of outer loops (`passes/sum_in_loops.py`).
      unpools: max pooling has a backward pass without select-and-scatter (`rules/unpool.py`).
    """

    recomputes_wait: bool = True
    early_recomputes_wait: bool = True
    operands_wait: bool = True
    selects: bool = True
    gradients_first: bool = True
    draws_wait: bool = True
    saved_values_written: bool = True
    pooling_operands_written: bool = True
    long_chains_written: bool = True
    own_layouts: bool = True
    sums_in_loops: bool = True
    unpools: bool = True

    @contextlib.contextmanager
    def used(self) -> Generator[None]:
        """Return a context in which programs are traced and compiled with these switches.

        A function that was jitted before keeps its program.

        >>> from xform.steering.settings import Steering, steering
        >>> with Steering(draws_wait=False).used():
        ...     steering().draws_wait
        False
        >>> steering().draws_wait
        True
        """
        token = _CURRENT.set(self)
        clear_program_cache()
        try:
            yield
        finally:
            _CURRENT.reset(token)
            clear_program_cache()


_ALL = Steering()
_CURRENT = contextvars.ContextVar("xform_steering", default=_ALL)


def steering() -> Steering:
    """Return the current switches."""
    return _CURRENT.get()
