"""Pullbacks that are called later than they are planned, with users' backward functions in them.

A backward function runs when the pullback is called, as in JAX. The plan was made when `vjp` was
called, from what the function did then (`interpret/ahead.py`). It may do something else now: it
reads an attribute that has changed, or the matmul precision. Then the plan does not fit, and the
forward pass runs again under a new one, if it may run twice. `PulledLater` does so for a whole
function, and `run_pulled_later` for a loop, branch or call that runs outside `jit`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

from xform._jax import JaxprEqn, jaxprs_of
from xform.errors import OtherProgram
from xform.interpret import emit
from xform.interpret.ahead import ahead_of_time, up_to_date
from xform.interpret.joint import analyze
from xform.interpret.node import Pull, Structured
from xform.interpret.pullback import vjp
from xform.interpret.repeat import check_repeatable
from xform.program.arithmetic import Value
from xform.program.fingerprint import fingerprint, text_of
from xform.program.ir import Mask, program
from xform.rules.user_rules import calls_with_symbolic_zeros
from xform.transforms.function import Function
from xform.transforms.linear_map import LinearRunner, PlannedRunner
from xform.transforms.run_nodes import with_nodes

_REMEDY = (
    "call the pullback in the function that calls vjp, or let the backward function read only its "
    "arguments"
)


class PulledLater(LinearRunner):
    """Runs a planned backward part if the backward functions do what they did when it was planned.

    `planned` runs it. `inputs` are the inputs of the program, to run its forward pass again.
    """

    def __init__(self, fun: Function, planned: PlannedRunner, inputs: Sequence[Value]):
        self._fun, self._planned = fun, planned
        self._inputs: Sequence[Value] | None = inputs

    def active_outputs(self) -> Mask:
        """Return which outputs depend on a differentiated input."""
        return self._planned.active_outputs()

    def with_explicit_arrays(self, arrays: Any) -> tuple[LinearRunner, Any]:
        """Return a runner that forgets the inputs, and so cannot run the forward pass again.

        A pullback that is passed as a pytree must not hold the inputs as constants.
        """
        new = copy.copy(self)
        new._inputs = None
        return new, arrays

    def run(self, arrays: Any, seeds: Sequence[Value]) -> list[Value]:
        """Run the backward part, and return its results."""
        with ahead_of_time():
            planned = analyze(*self._fun.program_and_masks)
        with up_to_date():
            now = analyze(*self._fun.program_and_masks)
        if fingerprint(now.program) == fingerprint(planned.program):
            return self._planned.run(arrays, seeds)
        if self._inputs is None:
            raise OtherProgram(
                f"pullback of {self._fun.signature.name}",
                "the backward function of a custom_vjp computes something else than when vjp was "
                "called, and the values that it needs now were not kept",
                "",
                _REMEDY,
            )
        _check_runs_again(now.forward, "the function")
        schedule = self._planned.schedule.plan_other(now)
        unused = (False,) * len(self._fun.program.outputs)
        _, saved = emit.forward(schedule, self._inputs, unused)
        again = PlannedRunner(self._fun, schedule, push=False)
        return again.run(again.arrays(saved, self._inputs), seeds)


def run_pulled_later(rule: Structured, eqn: JaxprEqn, xs: Sequence[Value], active: Mask,
                        wanted: Mask, later: bool) -> tuple[Sequence[Value], Pull]:  # fmt: skip
    """Run, outside `jit`, an equation that contains backward functions.

    `later`: the user gets the pullback, and may call it at any time; otherwise it is called at
    once. If the backward functions then do something else, the equation runs again. It also runs
    again if one of them asks for symbolic zeros, and a wanted output got no cotangent.

    Returns:
      The outputs and the pullback.
    """

    def analyzed(wanted: Mask) -> str:
        return text_of(rule.node(eqn, active, wanted, push=False))

    def run(wanted: Mask) -> tuple[Sequence[Value], Pull]:
        return with_nodes(vjp, rule, eqn, xs, active, wanted)

    symbolic = any(calls_with_symbolic_zeros(program(jaxpr)) for jaxpr in jaxprs_of(eqn))
    if not later and not symbolic:
        ys, pull = run(wanted)
        return ys, functools.partial(with_nodes, pull)
    with ahead_of_time():
        planned, (ys, pull) = analyzed(wanted), run(wanted)

    def pull_now(cts: Sequence[Value]) -> list[Value]:
        present = tuple(on and ct is not None for on, ct in zip(wanted, cts, strict=True))
        given = present if symbolic else wanted
        with up_to_date():
            if given == wanted and analyzed(wanted) == planned:
                return with_nodes(pull, cts)
            _check_runs_again([eqn], eqn.primitive.name)
            return with_nodes(run(given)[1], cts)

    return ys, pull_now


def _check_runs_again(equations: Sequence[JaxprEqn], subject: str) -> None:
    reason = (
        "it runs again, because the backward function of a custom_vjp computes something else than "
        "when vjp was called"
    )
    check_repeatable(equations, "pullback", subject, reason, _REMEDY)
