"""The rules of calls with a mark, which tells the compiler where or how to run the body.

Examples are `jax.experimental.compute_on` and XLA metadata. The call becomes two calls, one for the
forward and one for the backward pass, and both have its mark. Residuals are in the memory of the
device, whatever memory the outputs of the call are in. Some calls that are always replaced by
their body are declared here too. The base classes `Structured` and `Node` describe the methods
(`xform.interpret.node`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import jax

from xform._jax import JaxprEqn, compute_on, linear_part, with_metadata
from xform.interpret.joint import analyze
from xform.interpret.jvp import jvp
from xform.interpret.node import Node, Schedules, Structured, gather, present_mask, spread
from xform.program.arithmetic import Value, instantiate
from xform.program.ir import Mask, program
from xform.registry.table import declare
from xform.registry.traits import Traits
from xform.rules.call import CallNode, InlineCall

# A function that puts the mark of an equation on another function. It takes the equation, a
# function of pytrees, and the memory spaces of that function's outputs (a prefix of their tree).
Mark = Callable[[JaxprEqn, Callable[..., Any], Any], Callable[..., Any]]
DEVICE = jax.memory.Space.Device


def _compute_on(eqn: JaxprEqn, f: Callable[..., Any], spaces: Any) -> Callable[..., Any]:
    options = eqn.params["compiler_options_json"]
    return compute_on(
        f,
        compute_type=eqn.params["compute_type"],
        out_memory_spaces=spaces,
        compiler_options=None if options is None else json.loads(options),
    )


def _metadata(eqn: JaxprEqn, f: Callable[..., Any], spaces: Any) -> Callable[..., Any]:
    return with_metadata(f, eqn.params)


class _MarkedNode(CallNode):
    """The forward and backward pass of a call, as two calls with its mark."""

    def __init__(self, eqn: JaxprEqn, joint: Any, push: bool, mark: Mark):
        super().__init__(eqn, joint, push)
        self.mark = mark

    def forward(self, schedules: Schedules, xs: Sequence[Value], used: Mask):
        def run(xs: list[Value]):
            outs, saved = super(_MarkedNode, self).forward(schedules, xs, used)
            return gather(outs, used), saved

        spaces = gather(_memory_spaces(self.eqn.outvars), used), DEVICE
        outs, saved = self.mark(self.eqn, run, spaces)(list(xs))
        return spread(outs, used), saved

    def backward(self, schedules: Schedules, token: Any, xs: Sequence[Value],
                 seeds: Sequence[Value], together: bool) -> list[Value]:  # fmt: skip
        present = self.present_results(present_mask(seeds))

        def run(token: Any, xs: list[Value], seeds: list[Value]) -> list[Value]:
            results = super(_MarkedNode, self).backward(schedules, token, xs, seeds, together)
            return gather(results, present)

        variables = self.eqn.outvars if self.push else self.eqn.invars
        spaces = gather(gather(_memory_spaces(variables), self.results), present)
        results = self.mark(linear_part(self.eqn), run, spaces)(token, list(xs), list(seeds))
        return spread(results, present)


class MarkedCall(Structured):
    """The rule of a call with a mark."""

    mark: Mark

    def jvp(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        prog = program(eqn.params["jaxpr"])
        on = self.active(eqn, tuple(dx is not None for dx in dxs))

        def run(xs: list[Value], dxs: list[Value]):
            ys, dys = jvp(prog, xs, dxs)
            return ys, instantiate(dys, prog.out_avals, on)

        spaces = _memory_spaces(eqn.outvars)
        ys, dys = type(self).mark(eqn, run, (spaces, gather(spaces, on)))(list(xs), list(dxs))
        return ys, spread(dys, on)

    def node(self, eqn: JaxprEqn, active: Mask, wanted: Mask, push: bool) -> Node:
        joint = analyze(program(eqn.params["jaxpr"]), active, wanted, push)
        return _MarkedNode(eqn, joint, push, type(self).mark)


class ComputeOn(MarkedCall):
    """The rule of a call that `jax.experimental.compute_on` makes (`compute_on2` in JAX 0.10)."""

    mark = staticmethod(_compute_on)


class Metadata(MarkedCall):
    """The rule of `xla_metadata_call` and `scheduling_group`."""

    mark = staticmethod(_metadata)


def _memory_spaces(variables: Sequence[Any]) -> list[Any]:
    return [v.aval.memory_space for v in variables]


_MARK = Traits(call="jaxpr", calls="mark")

declare(ComputeOn, "compute_on", "structured", (), _MARK, supported_params=(
    "jaxpr", "compute_type", "out_memory_spaces", "compiler_options_json",
))  # fmt: skip
declare(Metadata, "xla_metadata_call", "structured", (), _MARK, supported_params=None)
# Composites and fused calls. They are replaced by their bodies when they are differentiated.
declare(InlineCall, "composite", "structured", (), _MARK, supported_params=(
    "jaxpr", "call_jaxpr", "name", "attributes", "version",
))  # fmt: skip
declare(InlineCall, "fused_call", "structured", (), _MARK, supported_params=None)
declare(InlineCall, "call", "structured", (),
        Traits(call="call_jaxpr", calls="mark"), supported_params=None)  # fmt: skip
