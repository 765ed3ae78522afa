"""Equations that contain programs (loops, branches, calls): read the programs, or replace them.

A *structured* equation is a scan, while loop, cond or call. Its *bodies* are the programs in its
parameters. If a pass changes a body, the equation is rebuilt by the JAX function that made it, such
as `lax.scan`, in a trace of its own. The equations of that trace replace the original equation.
Some calls are never rebuilt, because a rebuilt call would lose their other parameters: calls with
shardings, remat regions (`jax.checkpoint`), and functions with custom derivative rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from xform._jax import (
    JaxprEqn,
    Primitive,
    Var,
    callee,
    cond_p,
    jit,
    jit_p,
    scan_counts,
    scan_p,
    while_p,
)
from xform.program.equation import context, scan_like, switch
from xform.program.ir import Mask, Program, evaluate, gather, program, spread, trace
from xform.program.source import name_stack, source
from xform.registry.table import flow_of, traits


def called_body(eqn: JaxprEqn) -> Program:
    """Return the program that a call runs."""
    return program(callee(eqn.params, traits(eqn.primitive).call))


def plain_call_body(eqn: JaxprEqn) -> Program | None:
    """Return the body of a call that only runs its body; None for any other equation."""
    call_traits = traits(eqn.primitive)
    jaxpr = callee(eqn.params, call_traits.call)
    return program(jaxpr) if jaxpr is not None and not call_traits.calls else None


def is_remat_region(eqn: JaxprEqn) -> bool:
    """Whether an equation is a remat region that JAX has not yet differentiated."""
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
    """Whether a jit equation has shardings for inputs or outputs. Such a call is not inlined."""
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(chosen_sharding(s) is not None for s in shardings)


def bodies(eqn: JaxprEqn) -> tuple[Program, ...]:
    """Return the programs of an equation that a pass may change; empty if it has none.

    For a while loop these are the condition and the body.
    """
    params = eqn.params
    if eqn.primitive is while_p:
        return program(params["cond_jaxpr"]), program(params["body_jaxpr"])
    if eqn.primitive is cond_p:
        return tuple(map(program, params["branches"]))
    plain = eqn.primitive is jit_p and not has_shardings(eqn) and not _has_options(params)
    return (program(params["jaxpr"]),) if plain or eqn.primitive is scan_p else ()


def nested_programs(eqn: JaxprEqn) -> tuple[Program, ...]:
    """Return the programs that an equation runs on whole values: it is a loop, branch or call.

    A `shard_map` runs its program on parts of values. It has none.
    """
    flow = flow_of(eqn)
    return () if flow is None or flow.is_local else flow.programs


def _has_options(params: dict[str, Any]) -> bool:
    """Whether a jit has layouts, donated inputs, compiler options or a mesh."""
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
      eqn: a scan, while loop, cond or jit.
      new: the new bodies. They have all inputs of the old bodies, and only the used outputs. The
        condition of a while loop keeps its output. Inputs that no new body reads are dropped from
        the rebuilt equation.
      used: which outputs of the equation are used. A value that a loop carries is used if one of
        the loop's own bodies reads it.

    Returns:
      A program from the inputs of the equation to its used outputs; None if the outputs would have
      other types.
    """
    bind_new = _REBUILDERS[eqn.primitive]

    def run(*xs: Any) -> list[Any]:
        with source(eqn, name_stack()), context(eqn):
            return bind_new(eqn, new, used, xs)

    prog = trace(run, *[v.aval for v in eqn.invars])
    if eqn.primitive is cond_p:
        prog = _remove_clamp(prog)
    same = prog.out_avals == [v.aval for v in gather(eqn.outvars, used)]
    return prog if same else None


def inputs_read(*programs: Program) -> Mask:
    """Return which inputs any of the programs reads or returns. They all have the same inputs."""
    mask: list[bool] = [False] * len(programs[0].inputs)
    for prog in programs:
        read: set[Any] = {v for e in prog.equations for v in e.invars if isinstance(v, Var)}
        read |= {v for v in prog.outputs if isinstance(v, Var)}
        mask = [on or v in read for on, v in zip(mask, prog.inputs, strict=True)]
    return tuple(mask)


# One function for each structured primitive. It binds the equation again, with the new bodies and
# the inputs `xs` of the old equation, and returns the used outputs.


def _scan(eqn: JaxprEqn, new: Sequence[Program], used: Mask, xs: Sequence[Any]) -> list[Any]:
    (body,) = new
    n_consts, n_carry = scan_counts(eqn.params)
    first_scanned = n_consts + n_carry
    carried, read = used[:n_carry], inputs_read(body)[first_scanned:]
    consts, start = xs[:n_consts], gather(xs[n_consts:first_scanned], carried)
    n = len(start)

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        ys = evaluate(body, [*consts, *spread(carry, carried), *spread(x, read)])
        return ys[:n], ys[n:]

    scanned = gather(xs[first_scanned:], read)
    carry, ys = scan_like(eqn.params, step, start, scanned)
    return [*carry, *ys]


def _while(eqn: JaxprEqn, new: Sequence[Program], used: Mask, xs: Sequence[Any]) -> list[Any]:
    cond, body = new
    n_cond = eqn.params["cond_nconsts"]
    n_consts = n_cond + eqn.params["body_nconsts"]
    cond_consts, body_consts = xs[:n_cond], xs[n_cond:n_consts]
    return lax.while_loop(
        lambda state: evaluate(cond, [*cond_consts, *spread(state, used)])[0],
        lambda state: evaluate(body, [*body_consts, *spread(state, used)]),
        gather(xs[n_consts:], used),
    )


def _cond(eqn: JaxprEqn, new: Sequence[Program], used: Mask, xs: Sequence[Any]) -> list[Any]:
    index, *operands = xs
    read = inputs_read(*new)

    def branch(prog: Program) -> Callable[..., list[Any]]:
        return lambda inputs: evaluate(prog, spread(inputs, read))

    return switch(eqn.params, index, list(map(branch, new)), gather(operands, read))


def _remove_clamp(prog: Program) -> Program:
    """Remove the clamp that `lax.switch` adds to the index: here the index is always in range."""
    clamps = {e.outvars[0]: e for e in prog.equations if e.primitive is lax.clamp_p}
    index = prog.inputs[0]
    kept: list[JaxprEqn] = []
    for e in prog.equations:
        clamp = clamps.get(e.invars[0]) if e.primitive is cond_p else None  # pyright: ignore[reportArgumentType, reportCallIssue]
        if clamp is not None and clamp.invars[1] is index:
            e = e.replace(invars=[index, *e.invars[1:]])
            kept = [k for k in kept if k is not clamp]
        kept.append(e)
    return Program(prog.inputs, prog.consts, tuple(kept), prog.outputs)


def _jit(eqn: JaxprEqn, new: Sequence[Program], used: Mask, xs: Sequence[Any]) -> list[Any]:
    (body,) = new
    read = inputs_read(body)
    options = {k: eqn.params[k] for k in ("inline", "keep_unused")}
    # One jitted function for each body, so that a body that is called often is compiled once.
    key = "jitted", eqn.params["name"], *options.values()
    if key not in body.cache:

        def run(*inputs: Any) -> list[Any]:
            return evaluate(body, spread(inputs, read))

        run.__name__ = eqn.params["name"]
        body.cache[key] = jit(run, **options)
    return body.cache[key](*gather(xs, read))


_Rebuilder = Callable[[JaxprEqn, Sequence[Program], Mask, Sequence[Any]], list[Any]]

_REBUILDERS: dict[Primitive, _Rebuilder] = {
    scan_p: _scan, while_p: _while, cond_p: _cond, jit_p: _jit,
}  # fmt: skip
