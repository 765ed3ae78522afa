"""Run the two parts of a loop, branch or call outside `jit`, and users' backward functions.

A structured equation, such as a loop, a branch or a call, is differentiated in two parts. Its rule
binds a `fork`, which stands for the forward part and returns a token with the residuals, and later
a `join`, which stands for the backward part (`interpret/node.py`). Both have the same Node as a
parameter. Under `jit` they are equations of a program that is planned. Outside `jit` the trace
`RunNodes` runs each part when it is bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from xform._jax import JaxprEqn, Primitive, cotangent_aval, current_trace, set_current_trace
from xform.interpret.node import EagerToken, Node, Pull, fork_p, gather, join_p, spread
from xform.interpret.pullback import RULE_RETURNED_NONE, check_cotangent
from xform.interpret.staged import Split
from xform.planner.decide import schedule
from xform.program.arithmetic import Value
from xform.program.arrays import zeros
from xform.program.ir import Mask


class RunNodes(Split):
    """A trace that runs the parts of a node when its fork and its join are bound.

    It is a `Split` (`interpret/staged.py`), so it may also have a trace that stages operations on
    tangents or cotangents.
    """

    def process_primitive(self, primitive: Primitive, args: Sequence[Any], params: Any, /) -> Any:
        """Run the part of a node, or a user's backward function, that an operation stands for."""
        if primitive is _user_backward_p and not self.stages(args):
            with set_current_trace(self):
                return params["run"](*args)
        if primitive not in (fork_p, join_p):
            return super().process_primitive(primitive, args, params)
        node: Node = params["node"].node
        schedules = [schedule(j, node.policy if node.region else None) for j in node.joints]
        trace = self.outside if self.staged is None else self
        if primitive is fork_p:
            with set_current_trace(trace):
                ys, value = node.forward(schedules, args, (True,) * len(node.eqn.outvars))
            reads = zip(args, node.reads(schedules), strict=True)
            return [*ys, EagerToken(self, value, [x if on else None for x, on in reads])]
        token, given = args[0], params["given"]
        seeds = spread(args[len(args) - sum(given) :], given)
        if node.region and self.staged is not None:
            # A remat region recomputes when the linear map is called, not when the map is made.
            trace = self.staged
        with set_current_trace(trace):
            results = node.backward(schedules, token.value, token.inputs, seeds, False)
        return gather(results, node.present_results(given))

    def stages(self, args: Sequence[Any]) -> bool:
        """Return whether this trace stages an operation on `args`."""
        return self.staged is not None and self.trace_for(args) is self.staged


def with_nodes(f: Callable[..., Any], *args: Any) -> Any:
    """Call a function that may bind fork, join or `_user_backward_p`, under a `RunNodes` trace."""
    current = current_trace()
    with set_current_trace(current if isinstance(current, RunNodes) else RunNodes(current)):
        return f(*args)


# The call of a user's backward function in a staged linear map. It runs when the map is called.
_user_backward_p = Primitive("xform_later")
_user_backward_p.multiple_results = True
_user_backward_p.def_abstract_eval(lambda *_, run, avals: list(avals))


def pull_by_user(eqn: JaxprEqn, residuals: Sequence[Value], on: Mask,
                  pull: Callable[..., list[Value]]) -> Pull:  # fmt: skip
    """Return the pullback of a `custom_vjp` call, whose inputs `on` are differentiated.

    `pull(residuals, cts)` calls the user's backward function. If the whole pullback is made into a
    program, the cotangents are staged. Then that call is recorded, and runs with the program.
    """
    inputs: list[Any] = gather(eqn.invars, on)
    avals = tuple(cotangent_aval(v.aval) for v in inputs)

    def run(cts: Sequence[Value]) -> list[Value]:
        present = tuple(ct is not None for ct in cts)
        current = current_trace()
        staged = isinstance(current, RunNodes) and current.stages(gather(cts, present))
        if not staged:
            return pull(residuals, cts)

        def run_later(*values: Value) -> list[Value]:
            residual_values, cts = values[: len(residuals)], values[len(residuals) :]
            in_cts = gather(pull(residual_values, spread(cts, present)), on)
            results = [None if ct is RULE_RETURNED_NONE else ct for ct in in_cts]
            for v, ct in zip(inputs, results, strict=True):
                if ct is not None:
                    check_cotangent(eqn, v, ct)
            return [zeros(a) if ct is None else jax.lax.convert_element_type(ct, a.dtype)
                    for ct, a in zip(results, avals, strict=True)]  # fmt: skip

        present_cts = gather(cts, present)
        out = _user_backward_p.bind(*residuals, *present_cts, run=run_later, avals=avals)
        return spread(out, on)

    return run
