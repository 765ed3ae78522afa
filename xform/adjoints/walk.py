"""A program run operation by operation, each of which is recorded with its pullback.

Calls, loops and branches are opened where they are small: what stands for them are the operations
that they run, trip by trip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from xform._jax import JaxprEqn, Literal, Var, cond_p, name_p, scan_counts, scan_p, while_p
from xform.adjoints.colour import Colour, made_by
from xform.adjoints.local import partials_of
from xform.adjoints.parts import Edge, Operation, Pull, Value
from xform.arithmetic import Value as Array
from xform.ir import Program, bind, evaluate, gather, program, read, spread, trace
from xform.passes.inline import small
from xform.passes.listing import Names, literal, operation, programs
from xform.passes.structured import body, called, region
from xform.source import frame, name_stack, source
from xform.table import traits
from xform.transforms.reverse import vjp

Scope = tuple[str, ...]


class Recorder:
    """Values, operations and edges, in the order in which they come about.

    Args:
      expand: calls, loops and branches are opened that run at most so many equations; None: all.
    """

    def __init__(self, expand: int | None):
        self.values: list[Value] = []
        self.operations: list[Operation] = []
        self.edges: list[Edge] = []
        self._expand = expand
        self._names = Names()

    def given(self, array: Array, label: str, colour: Colour) -> int:
        """A value that the function is given, or closes over."""
        text = "input" if label else "constant"
        (made,) = self._add(text, (), [array], [colour], label)
        return made

    def run(self, prog: Program, inputs: Sequence[int], scope: Scope = ()) -> list[int]:
        """The outputs of a program, whose operations are recorded."""
        env: dict[Var, int] = dict(zip(prog.inputs, inputs, strict=True))
        env |= {v: self.given(x, "", "constant") for v, x in prog.consts}
        for eqn in prog.equations:
            ids = [self._atom(v, env) for v in eqn.invars]
            stack = str(eqn.source_info.name_stack)
            within = (*scope, *filter(None, stack.split("/")))
            made = self._opened(eqn, ids, within) or self._closed(eqn, ids, within)
            env.update(zip(eqn.outvars, made, strict=True))
        return [self._atom(v, env) for v in prog.outputs]

    def _atom(self, atom: Any, env: dict[Var, int]) -> int:
        if not isinstance(atom, Literal):
            return env[atom]
        aval: Any = atom.aval
        array = jnp.asarray(read({}, atom), aval.dtype)
        made = Value(len(self.values), literal(atom), "", array, "constant", -1)
        self.values.append(made)
        return made.id

    def _add(self, text: str, inputs: Sequence[int], arrays: Sequence[Array],
             colours: Sequence[Colour], label: str = "", **fields: Any) -> list[int]:  # fmt: skip
        first, at = len(self.values), len(self.operations)
        for i, (x, colour) in enumerate(zip(arrays, colours, strict=True), first):
            self.values.append(Value(i, self._names.plain(i), label, x, colour, at))
        made = list(range(first, first + len(arrays)))
        self.operations.append(Operation(at, text, tuple(inputs), tuple(made), **fields))
        return made

    def _closed(self, eqn: JaxprEqn, ids: Sequence[int], scope: Scope) -> list[int]:
        """One operation."""
        xs = [self.values[i].array for i in ids]
        colours = made_by(eqn, [self.values[i].colour for i in ids], {})
        on = [self.values[i].colour == "active" for i in ids]
        wanted = [c == "active" for c in colours]
        pull: Pull | None = None
        if any(wanted):
            ys, pull = _differentiated(eqn, xs, on, wanted)
        else:
            ys = bind(eqn, xs)
        at = len(self.operations)
        parts: list[Any] = [None] * len(ids)
        if pull is not None:
            elementwise = traits(eqn.primitive).fusion == "elementwise"
            found = partials_of(pull, gather(ys, wanted), gather(xs, on), elementwise)
            parts = spread(found, on)
        for operand, (i, partial) in enumerate(zip(ids, parts, strict=True)):
            self.edges.append(Edge(len(self.edges), i, at, operand, partial))
        label = eqn.params["name"] if eqn.primitive is name_p else ""
        return self._add(operation(eqn), ids, ys, colours, label, scope=scope,
                         where=frame(eqn), closed=_inside(eqn), pull=pull)  # fmt: skip

    def _opened(self, eqn: JaxprEqn, ids: Sequence[int], scope: Scope) -> list[int]:
        """What an equation makes whose operations are recorded in its place; else nothing."""
        if eqn.primitive is while_p:
            return self._while(eqn, ids, scope)
        if self._expand is not None and work(eqn) > self._expand:
            return []
        if eqn.primitive is scan_p:
            return self._scan(eqn, ids, scope) if eqn.params["length"] else []
        if eqn.primitive is cond_p:
            if eqn.params.get("branches_platforms") is not None:
                return []
            taken = int(self.values[ids[0]].array)
            chosen = program(eqn.params["branches"][taken])
            return self.run(chosen, ids[1:], (*scope, f"branch {taken}"))
        inner = called(eqn) or (body(eqn) if region(eqn) else small(eqn))
        if inner is None:
            return []
        name = eqn.params.get("name") or ""
        return self.run(inner, ids, (*scope, f"{eqn.primitive.name} {name}".rstrip()))

    def _scan(self, eqn: JaxprEqn, ids: Sequence[int], scope: Scope) -> list[int]:
        steps, (nc, nk) = program(eqn.params["jaxpr"]), scan_counts(eqn.params)
        consts, carry, seq = ids[:nc], list(ids[nc : nc + nk]), ids[nc + nk :]
        trips = range(eqn.params["length"])
        rows: dict[int, list[int]] = {}
        for t in reversed(trips) if eqn.params["reverse"] else trips:
            inside = (*scope, f"scan, trip {t}")
            take = lambda x, t=t: lax.index_in_dim(x, t, keepdims=False)
            xs = [self._traced(eqn, take, [i], inside) for i in seq]
            made = self.run(steps, [*consts, *carry, *xs], inside)
            carry, rows[t] = made[:nk], made[nk:]
        columns = zip(*(rows[t] for t in trips), strict=True)
        stack = lambda *ys: jnp.stack(ys)
        return [*carry, *(self._traced(eqn, stack, column, scope) for column in columns)]

    def _while(self, eqn: JaxprEqn, ids: Sequence[int], scope: Scope) -> list[int]:
        until, steps = program(eqn.params["cond_jaxpr"]), program(eqn.params["body_jaxpr"])
        a = eqn.params["cond_nconsts"]
        b = a + eqn.params["body_nconsts"]
        arrays = [self.values[i].array for i in ids]
        state, trips, each = arrays[b:], 0, max(1, _work(steps))
        while evaluate(until, [*arrays[:a], *state])[0]:
            trips += 1
            if self._expand is not None and trips * each > self._expand:
                return []
            state = evaluate(steps, [*arrays[a:b], *state])
        carry = list(ids[b:])
        for t in range(trips):
            carry = self.run(steps, [*ids[a:b], *carry], (*scope, f"while, trip {t}"))
        return carry

    def _traced(self, eqn: JaxprEqn, f: Callable[..., Array], ids: Sequence[int], scope: Scope
                ) -> int:  # fmt: skip
        """Something that an opened loop does besides what is in its body."""
        with source(eqn, name_stack()):
            prog = trace(lambda *xs: [f(*xs)], *(self.values[i].array for i in ids))
        (made,) = self.run(prog, ids, scope)
        return made


def _differentiated(eqn: JaxprEqn, xs: Sequence[Array], on: Sequence[bool],
                    wanted: Sequence[bool]) -> tuple[list[Array], Pull]:  # fmt: skip
    """The outputs of an equation, and its pullback from the wanted ones to the active inputs."""

    def run(*active: Array) -> tuple[list[Array], list[Array]]:
        rest = iter(active)
        ys = bind(eqn, [next(rest) if a else x for x, a in zip(xs, on, strict=True)])
        return gather(ys, wanted), gather(ys, [not w for w in wanted])

    moving, pull, still = vjp(run, *gather(xs, on), has_aux=True)
    a, b = iter(moving), iter(still)
    return [next(a) if w else next(b) for w in wanted], lambda cts: pull(list(cts))


def work(eqn: JaxprEqn) -> int:
    """How many equations an equation runs that are in its programs; of branches, the most."""
    inner = [_work(prog) for _, prog in programs(eqn)]
    return eqn.params.get("length", 1) * max(inner, default=0)


def _work(prog: Program) -> int:
    if "work" not in prog.cache:
        prog.cache["work"] = sum(max(1, work(eqn)) for eqn in prog.equations)
    return prog.cache["work"]


def _inside(eqn: JaxprEqn) -> int:
    return sum(_work(prog) for _, prog in programs(eqn))
