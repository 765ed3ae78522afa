"""The node of a `lax.while_loop` in `linearize`: the linear map runs the loop again, with tangents.

The number of steps is unknown, so nothing of them is saved. `Node` describes the methods of a node
(`xform.interpret.node`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xform._jax import JaxprEqn, tangent_aval
from xform.errors import NoForwardMode
from xform.interpret.node import NodeWithoutResiduals, Schedules, gather, spread
from xform.interpret.repeat import check_repeatable
from xform.program.arithmetic import Value
from xform.program.ir import Mask
from xform.registry.table import lookup
from xform.rules.refused import refused_p

# What to do about an operation of a loop that must not run twice.
MUST_NOT_REPEAT = (
    "move that out of the loop, draw random numbers from a key (jax.random), or use lax.scan, "
    "which saves such values"
)


class WhilePushNode(NodeWithoutResiduals):
    """A while loop in `linearize`."""

    loop = True
    unknown_length = True

    def __init__(self, eqn: JaxprEqn, seeded: Mask, results: Mask):
        super().__init__(eqn, [], seeded, results, push=True)
        reason = "the linear map runs the loop again"
        check_repeatable([eqn], "linearize of while_loop", "the loop", reason, MUST_NOT_REPEAT)

    def backward(self, schedules: Schedules, token: Any, xs: Sequence[Value],
                 seeds: Sequence[Value], together: bool) -> list[Value]:  # fmt: skip
        rule: Any = lookup(self.eqn)
        try:
            _, dys = rule.jvp(self.eqn, xs, spread(seeds, self.seeded))
        except NoForwardMode as error:
            # As in JAX, the call of the linear map is an error, but not the call of `linearize`.
            return self._refused(seeds, error)
        return gather(dys, self.results)

    def _refused(self, seeds: Sequence[Value], error: NoForwardMode) -> list[Value]:
        """Return tangents whose evaluation raises the error; so does their transpose."""
        avals = tuple(tangent_aval(v.aval) for v in gather(self.eqn.outvars, self.results))

        def pull(residuals: Sequence[Value], cts: Sequence[Value]) -> list[Value]:
            raise error

        return refused_p.bind(*seeds, where=error.where, avals=avals, pull=pull, held=0)
