"""Equations that contain programs (loops, branches, calls): read the programs, or replace them.

A *structured* equation is a scan, while loop, cond or call. Its *bodies* are the programs in its
parameters. If a pass changes a body, the rule of the primitive rebuilds the equation, by the JAX
function that made it, such as `lax.scan`, in a trace of its own (`Rule.rebuild`). The equations of
that trace replace the original equation.
Some calls are never rebuilt, because a rebuilt call would lose their other parameters: calls with
shardings, remat regions (`jax.checkpoint`), and functions with custom derivative rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from xform._jax import JaxprEqn, Var, callee
from xform.program.equation import context
from xform.program.flow import BodyFunction, Flow
from xform.program.ir import Mask, Program, evaluate, gather, program, spread, trace
from xform.program.source import name_stack, source
from xform.registry.table import flow_of, rule_of, traits


def called_body(eqn: JaxprEqn) -> Program:
    """Return the program that a call runs."""
    return program(callee(eqn.params, traits(eqn.primitive).call))


def plain_call_body(eqn: JaxprEqn) -> Program | None:
    """Return the body of a call that only runs its body; None for any other equation."""
    call_traits = traits(eqn.primitive)
    jaxpr = callee(eqn.params, call_traits.call)
    return program(jaxpr) if jaxpr is not None and not call_traits.calls else None


def is_remat_region(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a remat region that JAX has not yet differentiated."""
    return traits(eqn.primitive).calls == "region" and not eqn.params["differentiated"]


def is_recomputation(eqn: JaxprEqn) -> bool:
    """Return whether an equation recomputes a remat region, in a backward pass made by JAX.

    The compiler must not merge it with the forward pass. In a scan it cannot, and JAX then sets
    `prevent_cse=False`.
    """
    if traits(eqn.primitive).calls != "region" or not eqn.params["differentiated"]:
        return False
    prevent = eqn.params["prevent_cse"]
    return prevent if isinstance(prevent, bool) else any(prevent)


def chosen_sharding(s: Any) -> Any:
    """Return a sharding parameter of a jit equation; None if the compiler chooses the sharding."""
    return s if isinstance(s, jax.sharding.Sharding) else None


def has_shardings(eqn: JaxprEqn) -> bool:
    """Return whether a jit equation has shardings of inputs or outputs, so it is not inlined."""
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(chosen_sharding(s) is not None for s in shardings)


def bodies(eqn: JaxprEqn) -> tuple[Program, ...]:
    """Return the programs of an equation that a pass may change; empty if it has none.

    For a while loop these are the condition and the body.
    """
    flow, calls = flow_of(eqn), traits(eqn.primitive).calls
    if flow is None or flow.is_local:
        return ()
    fixed = flow.is_call and (calls or has_shardings(eqn) or _has_options(eqn.params))
    return () if fixed else flow.programs


def nested_programs(eqn: JaxprEqn) -> tuple[Program, ...]:
    """Return the programs that an equation runs on whole values: it is a loop, branch or call.

    A `shard_map` runs its program on parts of values. It has none.
    """
    flow = flow_of(eqn)
    return () if flow is None or flow.is_local else flow.programs


def _has_options(params: dict[str, Any]) -> bool:
    """Return whether a jit has layouts, donated inputs, compiler options or a mesh."""
    layouts = (*params.get("in_layouts", ()), *params.get("out_layouts", ()))
    donated, options = params.get("donated_invars", ()), params.get("compiler_options_kvs", ())
    meshless = getattr(params.get("ctx_mesh"), "empty", True)
    return any(donated) or bool(options) or any(x is not None for x in layouts) or not meshless


def map_bodies(eqn: JaxprEqn, f: Callable[[Program], Program]) -> Program | None:
    """Apply `f` to the bodies of an equation; return a program that replaces the equation.

    None if `f` changes no body, or if the outputs would have other types.
    """
    old = bodies(eqn)
    new = [f(p) for p in old]
    if all(n is p for n, p in zip(new, old, strict=True)):
        return None
    return rebuild_equation(eqn, new, (True,) * len(eqn.outvars))


def rebuild_equation(eqn: JaxprEqn, new: Sequence[Program], used: Mask) -> Program | None:
    """Rebuild an equation with new bodies. The result is a small program that replaces it.

    Args:
      eqn: an equation that has `bodies`.
      new: the new bodies. They have all inputs of the old bodies, and only the used outputs. The
        condition of a while loop keeps its output. Inputs that no new body reads are dropped from
        the rebuilt equation.
      used: which outputs of the equation are used. A value that a loop carries is used if one of
        the loop's own bodies reads it.

    Returns:
      A program from the inputs of the equation to its used outputs; None if the outputs would have
      other types.
    """
    rule, flow = rule_of(eqn.primitive), flow_of(eqn)
    assert rule is not None
    assert flow is not None
    kept = _operands_kept(flow, new, used)
    name, masks = eqn.params.get("name", "body"), outputs_used(flow, used)
    functions = [_function(p, name, mask) for p, mask in zip(new, masks, strict=True)]

    def run(*xs: Any) -> list[Any]:
        operands = [x if k in kept else None for k, x in enumerate(xs)]
        with source(eqn, name_stack()), context(eqn):
            return gather(rule.rebuild(eqn, operands, functions)[0], used)

    prog = trace(run, *[v.aval for v in eqn.invars])
    if flow.index is not None:
        prog = _remove_clamp(prog)
    same = prog.out_avals == [v.aval for v in gather(eqn.outvars, used)]
    return prog if same else None


def outputs_used(flow: Flow, used: Mask) -> list[Mask]:
    """Return which outputs of each of `flow.programs` are used, if some results are."""
    condition: list[Mask] = [] if flow.condition is None else [(True,)]
    return [*condition, *(tuple(used[r] for r in body.results) for body in flow.bodies)]


def _operands_kept(flow: Flow, new: Sequence[Program], used: Mask) -> set[int]:
    """Return the operands of the rebuilt equation: used carries, and others that are read."""
    bodies = flow.bodies if flow.condition is None else (flow.condition, *flow.bodies)
    kept = {k for body, prog in zip(bodies, new, strict=True)
            for k in gather(body.operands, inputs_read(prog))}  # fmt: skip
    kept -= flow.carried.keys()
    kept |= {k for k, r in flow.carried.items() if used[r]}
    return kept if flow.index is None else {flow.index, *kept}


def _function(prog: Program, name: str, used: Mask) -> BodyFunction:
    """Return a program as a function for `Rule.rebuild`, with None for outputs it does not have.

    There is one function for each program, so that a body that is called often is compiled once.
    """
    key = "function", name, used
    if key not in prog.cache:

        def run(xs: list[Any], each: Any) -> tuple[list[Any], Any]:
            return spread(evaluate(prog, xs), used), None

        run.__name__ = name
        prog.cache[key] = run
    return prog.cache[key]


def inputs_read(*programs: Program) -> Mask:
    """Return which inputs any of the programs reads or returns. They all have the same inputs."""
    mask: list[bool] = [False] * len(programs[0].inputs)
    for prog in programs:
        read: set[Any] = {v for e in prog.equations for v in e.invars if isinstance(v, Var)}
        read |= {v for v in prog.outputs if isinstance(v, Var)}
        mask = [on or v in read for on, v in zip(mask, prog.inputs, strict=True)]
    return tuple(mask)


def _remove_clamp(prog: Program) -> Program:
    """Remove the clamp that `lax.switch` adds to the index: here the index is always in range."""
    clamps = {e.outvars[0]: e for e in prog.equations if e.primitive is lax.clamp_p}
    index = prog.inputs[0]
    kept: list[JaxprEqn] = []
    for e in prog.equations:
        branches = (flow := flow_of(e)) is not None and flow.index == 0
        clamp = clamps.get(e.invars[0]) if branches else None  # pyright: ignore[reportArgumentType, reportCallIssue]
        if clamp is not None and clamp.invars[1] is index:
            e = e.replace(invars=[index, *e.invars[1:]])
            kept = [k for k in kept if k is not clamp]
        kept.append(e)
    return Program(prog.inputs, prog.consts, tuple(kept), prog.outputs)
