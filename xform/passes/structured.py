"""Structured equations (loops, branches, calls): read their programs, and rebuild them with others.

A loop, branch or call with new programs is rebuilt by the JAX function that made it, in a trace of
its own. The equations of that trace replace the original equation. Calls with shardings, remat
regions and custom rules are never rebuilt, because their parameters matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from xform._jax import JaxprEqn, Primitive, Var, callee, cond_p, jit_p, scan_counts, scan_p, while_p
from xform.program.equation import scan_options, switch
from xform.program.ir import Mask, Program, evaluate, gather, program, spread, trace
from xform.program.source import name_stack, source
from xform.registry.table import traits


def called_body(eqn: JaxprEqn) -> Program:
    """Return the program that a call runs."""
    return program(callee(eqn.params, traits(eqn.primitive).call))


def plain_call_body(eqn: JaxprEqn) -> Program | None:
    """Return the body of a call that has no other meaning than its body; else None."""
    known = traits(eqn.primitive)
    held = callee(eqn.params, known.call)
    return program(held) if held is not None and not known.calls else None


def region(eqn: JaxprEqn) -> bool:
    """Whether an equation is a remat region that JAX has not yet differentiated."""
    return traits(eqn.primitive).calls == "region" and not eqn.params["differentiated"]


def sharding(s: Any) -> Any:
    """Return a sharding of a jit equation; None if it leaves the choice to the compiler."""
    return s if isinstance(s, jax.sharding.Sharding) else None


def has_shardings(eqn: JaxprEqn) -> bool:
    """Whether a jit equation has shardings for inputs or outputs. Such a call is not inlined."""
    where = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(sharding(s) is not None for s in where)


def bodies(eqn: JaxprEqn) -> tuple[Program, ...]:
    """Return the programs of an equation that may be rewritten; empty if it has none."""
    params = eqn.params
    if eqn.primitive is while_p:
        return program(params["cond_jaxpr"]), program(params["body_jaxpr"])
    if eqn.primitive is cond_p:
        return tuple(map(program, params["branches"]))
    plain = eqn.primitive is jit_p and not has_shardings(eqn) and not _special(params)
    return (program(params["jaxpr"]),) if plain or eqn.primitive is scan_p else ()


def _special(params: dict[str, Any]) -> bool:
    """Whether a jit has layouts, donated inputs, compiler options or a mesh."""
    layouts = (*params.get("in_layouts", ()), *params.get("out_layouts", ()))
    donated, options = params.get("donated_invars", ()), params.get("compiler_options_kvs", ())
    meshless = getattr(params.get("ctx_mesh"), "empty", True)
    return any(donated) or bool(options) or any(x is not None for x in layouts) or not meshless


def nested(eqn: JaxprEqn, f: Callable[[Program], Program]) -> Program | None:
    """Apply `f` to the programs of an equation, and return the program that replaces it.

    None if `f` changes none of them, or if the outputs would have other types.
    """
    old = bodies(eqn)
    new = [f(p) for p in old]
    if all(n is p for n, p in zip(new, old, strict=True)):
        return None
    return rebuild_equation(eqn, new, (True,) * len(eqn.outvars))


def rebuild_equation(eqn: JaxprEqn, new: Sequence[Program], used: Mask) -> Program | None:
    """Rebuild an equation with new nested programs, as a program.

    Args:
      eqn: a scan, while loop, cond or jit.
      new: its new programs. They have all inputs of the old programs, and only the used outputs.
        The condition of a while loop keeps its output. Inputs that nothing reads are dropped.
      used: which outputs of the equation are used. A value that a loop carries is used if one of
        the loop's own programs reads it.

    Returns:
      A program from the inputs of the equation to its used outputs; None if the outputs would have
      other types.
    """
    make = _MAKERS[eqn.primitive]

    def run(*xs: Any) -> list[Any]:
        with source(eqn, name_stack()), eqn.ctx.manager:
            return make(eqn, new, used, xs)

    prog = trace(run, *[v.aval for v in eqn.invars])
    if eqn.primitive is cond_p:
        prog = _unclamped(prog)
    same = prog.out_avals == [v.aval for v in gather(eqn.outvars, used)]
    return prog if same else None


def inputs_read(*programs: Program) -> Mask:
    """Return which inputs are read or returned by any of some programs with the same inputs."""
    mask: list[bool] = [False] * len(programs[0].inputs)
    for prog in programs:
        read: set[Any] = {v for e in prog.equations for v in e.invars if isinstance(v, Var)}
        read |= {v for v in prog.outputs if isinstance(v, Var)}
        mask = [on or v in read for on, v in zip(mask, prog.inputs, strict=True)]
    return tuple(mask)


def _scan(eqn: JaxprEqn, new: Sequence[Program], used: Mask, xs: Sequence[Any]) -> list[Any]:
    (steps,) = new
    nc, nk = scan_counts(eqn.params)
    carried, read = used[:nk], inputs_read(steps)[nc + nk :]
    consts, start = xs[:nc], gather(xs[nc : nc + nk], carried)
    n = len(start)

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        ys = evaluate(steps, [*consts, *spread(carry, carried), *spread(x, read)])
        return ys[:n], ys[n:]

    seq = gather(xs[nc + nk :], read)
    carry, ys = lax.scan(step, start, seq, **scan_options(eqn.params))
    return [*carry, *ys]


def _while(eqn: JaxprEqn, new: Sequence[Program], used: Mask, xs: Sequence[Any]) -> list[Any]:
    until, steps = new
    a = eqn.params["cond_nconsts"]
    b = a + eqn.params["body_nconsts"]
    before, inside = xs[:a], xs[a:b]
    return lax.while_loop(
        lambda state: evaluate(until, [*before, *spread(state, used)])[0],
        lambda state: evaluate(steps, [*inside, *spread(state, used)]),
        gather(xs[b:], used),
    )


def _cond(eqn: JaxprEqn, new: Sequence[Program], used: Mask, xs: Sequence[Any]) -> list[Any]:
    index, *operands = xs
    read = inputs_read(*new)

    def branch(prog: Program) -> Callable[..., list[Any]]:
        return lambda inputs: evaluate(prog, spread(inputs, read))

    return switch(eqn.params, index, list(map(branch, new)), gather(operands, read))


def _unclamped(prog: Program) -> Program:
    """Remove the clamp of the index that `lax.switch` adds: here the index is in range."""
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
    (inner,) = new
    read = inputs_read(inner)
    options = {k: eqn.params[k] for k in ("inline", "keep_unused")}
    # One jitted function per program, so that a program that is called often is compiled once.
    key = "jitted", eqn.params["name"], *options.values()
    if key not in inner.cache:

        def run(*inputs: Any) -> list[Any]:
            return evaluate(inner, spread(inputs, read))

        run.__name__ = eqn.params["name"]
        inner.cache[key] = jax.jit(run, **options)
    return inner.cache[key](*gather(xs, read))


Makes = Callable[[JaxprEqn, Sequence[Program], Mask, Sequence[Any]], list[Any]]

_MAKERS: dict[Primitive, Makes] = {scan_p: _scan, while_p: _while, cond_p: _cond, jit_p: _jit}
