"""Trace the derivative rule of a custom function at its call, and make the call use the trace.

`stage_jvp` and `stage_vjp` trace the rule of a call and return another call of the same primitive.
The rule of that call is the traced program, and its function is the part of the program that
computes the outputs. So the user's function itself does not run, as in JAX. A rule with
`symbolic_zeros=True` sees which arguments have no tangent. It runs again if a later derivative has
a different set of such arguments than the trace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from xform._jax import (
    JaxprEqn,
    Tracer,
    Var,
    current_trace,
    is_reference,
    is_zero,
    set_current_trace,
    tangent_aval,
)
from xform._jax.custom_functions import call_again, with_more_cotangents, wrap_like
from xform._jax.wrappers import innermost
from xform.interpret.staged import SubstituteKnown
from xform.passes.dce import live
from xform.program.arithmetic import Value, differentiable
from xform.program.arrays import zeros
from xform.program.fingerprint import fingerprint
from xform.program.ir import Mask, Program, evaluate, gather, spread
from xform.rules.user_rules import fill_zeros, push_by_rule, residual_for_rule

# `trace_rule(run, types)` traces `run` at the arguments of the call, followed by inputs of `types`.
TraceRule = Callable[[Callable[..., Sequence[Value]], Sequence[Any]], Program]


@dataclasses.dataclass(frozen=True)
class StagedCall:
    """A call of a custom function whose rule has been traced.

    Attributes:
      functions: the function and its rules, as JAX's primitive takes them.
      args: the arguments of the call, and the tracers that the rule closes over.
      options: the other parameters of the call.
      first_output: the index of the first output of the call among the results of the traced rule.
      has_tangent: which outputs have a tangent.
    """

    functions: tuple[Any, ...]
    args: list[Value]
    options: dict[str, Any]
    first_output: int
    has_tangent: Mask


@dataclasses.dataclass(frozen=True, eq=False)
class StagedJvp:
    """The traced rule of a `custom_jvp` call.

    Attributes:
      program: the traced rule. Its inputs are the arguments of the call, tangents, and the values
        that the rule closes over. Its outputs are those of the call, and tangents.
      with_tangent: which arguments have a tangent among the inputs of the program.
      has_tangent: which outputs have a tangent among the outputs of the program.
      user_rule: the user's rule if it takes symbolic zeros; else None.
    """

    program: Program
    with_tangent: Mask
    has_tangent: Mask
    user_rule: Any

    def __fingerprint__(self) -> Any:
        """Return what identifies the rule, see `xform.program.fingerprint`."""
        return fingerprint(self.program), self.with_tangent, self.has_tangent, self.user_rule

    def serves(self, active: Mask) -> bool:
        """Return whether the program computes the tangents if the inputs `active` have one."""
        n = len(self.with_tangent)
        return self.user_rule is None or active[:n] == self.with_tangent

    def push(self, xs: Sequence[Value], dxs: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        """Return the outputs, and their tangents. A tangent that is None is zero."""
        n, n_ys = len(self.with_tangent), len(self.has_tangent)
        pairs = zip(gather(dxs[:n], self.with_tangent), self.program.inputs[n:], strict=False)
        tangents = [zeros(v.aval) if dx is None else dx for dx, v in pairs]
        out = evaluate(self.program, [*xs[:n], *tangents, *xs[n:]])
        return out[:n_ys], spread(out[n_ys:], self.has_tangent)

    def __call__(self, *values: Value) -> list[Value]:
        """Return outputs and tangents, as a user's rule does. `values` are inputs and tangents."""
        half, n = len(values) // 2, len(self.with_tangent)
        xs, dxs = values[:half], values[half:]
        if not self.serves(tuple(not is_zero(dx) for dx in dxs)):
            return call_again(self.user_rule, *xs[:n], *dxs[:n])
        ys, dys = self.push(xs, dxs)
        symbolic = self.user_rule is not None
        return [*ys, *fill_zeros(dys, list(map(jax.typeof, ys)), symbolic)]


def stage_jvp(fun: Any, jvp: Any, options: dict[str, Any], args: Sequence[Value], active: Mask,
              trace_rule: TraceRule) -> StagedCall:  # fmt: skip
    """Trace the rule of a `custom_jvp` call whose arguments `active` have a tangent.

    `options` are the call's other parameters. A rule that takes no symbolic zeros gets arrays of
    zeros for arguments without a tangent, so one trace serves every `active`.
    """
    avals, n, symbolic = list(map(jax.typeof, args)), len(args), options["symbolic_zeros"]
    on = active if symbolic else tuple(map(differentiable, avals))
    has_tangent: list[bool] = []

    def run(*values: Value) -> list[Value]:
        xs, dxs = _known_or_traced(args, values[:n]), spread(values[n:], on)
        ys, dys = push_by_rule(jvp.call_wrapped, symbolic, xs, dxs)
        has_tangent[:] = [dy is not None for dy in dys]
        return [*ys, *gather(dys, has_tangent)]

    types = [tangent_aval(a) for a in gather(avals, on)]
    prog, closed_over = _lift(trace_rule(run, types), args)
    outputs = prog.outputs[: len(has_tangent)]
    rule = StagedJvp(prog, on, tuple(has_tangent), jvp if symbolic else None)
    functions = _primal(fun, prog, outputs, n), wrap_like(jvp, rule)
    return StagedCall(functions, [*args, *closed_over], options, 0, rule.has_tangent)


@dataclasses.dataclass(eq=False)
class StagedForward:
    """The traced forward function of a `custom_vjp` call.

    Attributes:
      program: the traced function, from the arguments of the call and the values that the function
        closes over to residuals and outputs. A residual that is simply an argument is not an output
        of the program.
      forwarded: for each residual the position of the argument that it is; None for others.
      active: which arguments have a tangent.
      user_function: a function that calls the user's function and returns residuals, outputs and
        `forwarded`. None if the user's function does not see which arguments have a tangent.
    """

    program: Program
    forwarded: tuple[int | None, ...]
    active: Mask
    user_function: Callable[..., tuple[list[Value], tuple[int | None, ...]]] | None

    def __post_init__(self) -> None:
        self.last_forwarded = self.forwarded  # of the last call

    def __fingerprint__(self) -> Any:
        """Return what identifies the function, see `xform.program.fingerprint`."""
        active = None if self.user_function is None else self.active
        return fingerprint(self.program), self.forwarded, active

    def __call__(self, *values_and_flags: Any) -> list[Value]:
        """Return residuals and outputs, from arguments and whether each has a tangent."""
        values, flags, n = values_and_flags[::2], values_and_flags[1::2], len(self.active)
        if self.user_function is not None and tuple(flags[:n]) != self.active:
            out, self.last_forwarded = self.user_function(values[:n], flags[:n])
            return out
        self.last_forwarded = self.forwarded
        return evaluate(self.program, values)


@dataclasses.dataclass(frozen=True, eq=False)
class BackwardOfKnown:
    """The backward function of a `custom_vjp` call with known arguments.

    The user's function gets the residuals that are such arguments as known values, as in JAX. Its
    operations on them are recorded as operations on the residuals.

    Attributes:
      bwd: the user's backward function.
      known: the value of each argument that is known; None for others.
      forward: the forward function of the call.
    """

    bwd: Any
    known: tuple[Value | None, ...]
    forward: StagedForward

    def __fingerprint__(self) -> Any:
        """Return what identifies the function, see `xform.program.fingerprint`."""
        return self.bwd, self.known

    def __call__(self, *residuals_and_cts: Any) -> Any:
        """Call the user's function."""
        positions = self.forward.last_forwarded
        given, values = list(residuals_and_cts), {}
        for i, (position, residual) in enumerate(zip(positions, given, strict=False)):
            known = None if position is None else self.known[position]
            if known is not None and isinstance(residual, Tracer):
                given[i], values[id(known)] = known, residual
        if not values:
            return self.bwd.call_wrapped(*given)
        with set_current_trace(SubstituteKnown(current_trace(), values)):
            return self.bwd.call_wrapped(*given)


def stage_vjp(fun: Any, fwd: Any, bwd: Any, options: dict[str, Any], args: Sequence[Value],
              active: Mask, trace_rule: TraceRule) -> StagedCall:  # fmt: skip
    """Trace the forward function of a `custom_vjp` call whose arguments `active` have a tangent.

    `options` are the call's other parameters. A forward function that takes no symbolic zeros is
    not told which arguments these are, so one trace serves every `active`. The backward function is
    not called.
    """
    symbolic, out_trees, found = options["symbolic_zeros"], options["out_trees"], []

    def call(xs: Sequence[Value], flags: Sequence[bool]):
        out = call_again(fwd, *[a for pair in zip(xs, flags, strict=True) for a in pair])
        return out, tuple(out_trees()[2])

    def run(*values: Value) -> list[Value]:
        out, found[:] = call(_known_or_traced(args, values), active)
        return out

    prog, closed_over = _lift(trace_rule(run, []), args)
    forward = StagedForward(prog, tuple(found), active, call if symbolic else None)
    n_residuals = found.count(None)
    outputs = prog.outputs[n_residuals:]
    known = tuple([residual_for_rule(x) if _is_known(x) else None for x in args])
    backward = (
        wrap_like(bwd, BackwardOfKnown(bwd, known, forward)) if any(map(_is_known, args)) else bwd
    )
    backward = with_more_cotangents(backward, list(map(jax.typeof, closed_over)))
    functions = _primal(fun, prog, outputs, len(args)), wrap_like(fwd, forward), backward
    has_tangent = tuple(differentiable(v.aval) for v in outputs)
    options = {**options, "out_trees": lambda: (*out_trees()[:2], forward.last_forwarded)}
    return StagedCall(functions, [*args, *closed_over], options, n_residuals, has_tangent)


def staged_rule(eqn: JaxprEqn, param: str, kind: type[Any]) -> Any:
    """Return the traced rule of an equation, in its parameter `param`; None if it has none."""
    rule = innermost(eqn.params[param])
    return rule if isinstance(rule, kind) else None


def _known_or_traced(args: Sequence[Value], values: Sequence[Value]) -> list[Value]:
    """Return each argument of a call if it is known, else the traced value that stands for it."""
    return [x if _is_known(x) else v for x, v in zip(args, values, strict=True)]


def _is_known(x: Value) -> bool:
    """Return whether an argument is an array or a number, neither traced nor a reference."""
    return not isinstance(x, Tracer) and not is_reference(jax.typeof(x))


def _lift(prog: Program, args: Sequence[Value]) -> tuple[Program, list[Value]]:
    """Turn constants of a traced rule into inputs: known arguments of the call, and tracers.

    Return the program, and the tracers, which become its last inputs. The program does not depend
    on which arguments are known. So a plan that was made while the arguments were traced also fits
    a call with known arguments.
    """
    position = {id(x): i for i, x in reversed([*enumerate(args)]) if _is_known(x)}
    inputs, tracers, consts = list(prog.inputs), [], []
    for v, x in prog.consts:
        if id(x) in position:
            inputs[position[id(x)]] = v  # the trace captured the argument as a constant
        elif isinstance(x, Tracer):
            inputs.append(v)
            tracers.append(x)
        else:
            consts.append((v, x))
    return Program(tuple(inputs), tuple(consts), prog.equations, prog.outputs), tracers


def _primal(fun: Any, prog: Program, outputs: Sequence[Any], n: int) -> Any:
    """Return the function that computes `outputs` of a traced rule from the arguments of a call.

    The inputs of `prog` are `n` arguments, tangents, and values that the rule closes over. Tangents
    that the equations of the outputs still read are zeros: a loop may compute both.
    """
    equations = live(prog.equations, outputs)
    reads = {v for eqn in equations for v in eqn.invars if isinstance(v, Var)}
    primal = Program(prog.inputs, prog.consts, equations, tuple(outputs))

    def run(*values: Value) -> list[Value]:
        tangents = prog.inputs[n : n + len(prog.inputs) - len(values)]
        no_tangents = [zeros(v.aval) if v in reads else None for v in tangents]
        return evaluate(primal, [*values[:n], *no_tangents, *values[n:]])

    return wrap_like(fun, run)
