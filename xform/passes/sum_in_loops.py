"""Add the results that a loop stacks to an array inside the loop.

The gradients of a stack of layers are stacked by the backward loop over the layers. A loop over
slices of a batch then adds the stack to its sum of gradients. With this pass each iteration of the
backward loop adds the gradients of its own layer, in place.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax

from xform._jax import JaxprEqn, Var, scan_counts, scan_p
from xform.passes.base import Pass
from xform.passes.builder import Builder
from xform.program.equation import context, scan_like
from xform.program.ir import Atom, Program, evaluate, program, trace
from xform.program.source import name_stack, source
from xform.registry.table import traits

Readers = Mapping[Any, Sequence[JaxprEqn]]


@dataclasses.dataclass(frozen=True)
class SumInLoops(Pass):
    """Add the stacked results of a `lax.scan` to an array inside the loop, not after it.

    It changes a loop if one of its stacked results is only read by one sum with another array of
    the same shape, and nothing else reads that array. Then the loop carries the array, and each
    iteration adds its own part in place. So the stack takes no memory beside the array. Each
    element is the same sum of two numbers as before.

    >>> import jax, jax.numpy as jnp
    >>> from xform import passes
    >>> def f(total, xs):
    ...     step = lambda carry, x: (carry, jnp.sin(x))
    ...     return total + jax.lax.scan(step, 0.0, xs)[1]
    >>> jaxpr = jax.make_jaxpr(passes.SumInLoops()(f))(jnp.ones((4, 3)), jnp.ones((4, 3)))
    >>> [e.primitive.name for e in jaxpr.eqns]
    ['iota', 'scan']
    """

    name: ClassVar[str] = "sum-in-loops"

    def rewrite(self, prog: Program) -> Program:
        sums = _sums(prog)
        build, done = Builder(prog), set[JaxprEqn]()
        for eqn in prog.equations:
            found = sums.get(eqn, [])
            body = _with_sums(eqn, found) if found else None
            if body is not None:
                arrays = build.atoms([s.array for s in found])
                results = build.splice(body, [*build.atoms(eqn.invars), *arrays])
                build.alias(eqn.outvars, results)
                build.alias([s.result for s in found], [results[s.position] for s in found])
                done.update(e for s in found for e in s.equations)
            elif eqn not in done:
                build.add(build.renamed(eqn))
        return build.program()


@dataclasses.dataclass(frozen=True)
class _StackedSum:
    """A sum of a stacked result of a loop and an array.

    Attributes:
      position: the position of the result among the outputs of the loop.
      array: the array.
      equations: the equations that convert the result and add it.
    """

    position: int
    array: Var
    equations: tuple[JaxprEqn, ...]

    @property
    def result(self) -> Var:
        """The sum."""
        return self.equations[-1].outvars[0]


def _sums(prog: Program) -> dict[JaxprEqn, list[_StackedSum]]:
    """Return the sums of stacked results of each loop, with arrays that are known before it."""
    readers: dict[Any, list[JaxprEqn]] = collections.defaultdict(list)
    for eqn in prog.equations:
        for v in filter(lambda v: isinstance(v, Var), eqn.invars):
            readers[v].append(eqn)
    outputs = {v for v in prog.outputs if isinstance(v, Var)}
    known: set[Var] = {*prog.inputs, *(v for v, _ in prog.consts)}
    found: dict[JaxprEqn, list[_StackedSum]] = {}
    for eqn in prog.equations:
        if eqn.primitive is scan_p and eqn.params["length"]:
            sums = [s for s in _sums_of_loop(eqn, readers, outputs) if s.array in known]
            found |= {eqn: sums} if sums else {}
        known.update(eqn.outvars)
    return found


def _sums_of_loop(eqn: JaxprEqn, readers: Readers, outputs: set[Var]) -> Iterator[_StackedSum]:
    """Yield the sums of stacked results of a loop and arrays that nothing else reads."""

    def only_reader(v: Atom) -> JaxprEqn | None:
        eqns = readers.get(v, ())
        return eqns[0] if len(eqns) == 1 and v not in outputs else None

    _, n_carry = scan_counts(eqn.params)
    for position, v in enumerate(eqn.outvars[n_carry:], n_carry):
        equations, reader = list[JaxprEqn](), only_reader(v)
        while reader is not None and _is_conversion(reader):
            equations.append(reader)
            reader = only_reader(reader.outvars[0])
        if reader is None or not traits(reader.primitive).sums_operands:
            continue
        stack = equations[-1].outvars[0] if equations else v
        (array,) = [x for x in reader.invars if x is not stack]
        if not isinstance(array, Var) or array.aval != reader.outvars[0].aval:
            continue
        if only_reader(array) is reader and not _first_axis_is_sharded(array):
            yield _StackedSum(position, array, (*equations, reader))


def _is_conversion(eqn: JaxprEqn) -> bool:
    return traits(eqn.primitive).converts and len(eqn.invars) == 1


def _first_axis_is_sharded(v: Var) -> bool:
    """Return whether the first axis of a value is sharded over axes of a mesh that types show."""
    spec = getattr(getattr(v.aval, "sharding", None), "spec", ())
    return bool(spec) and spec[0] is not None


def _with_sums(eqn: JaxprEqn, sums: Sequence[_StackedSum]) -> Program | None:
    """Return a loop that adds some of its results to arrays.

    Its inputs are those of the loop, and then the arrays. Its outputs are those of the loop, with
    the sums in place of the results that are added. None if the outputs would have other types.
    """
    n_consts, n_carry = scan_counts(eqn.params)
    body, n_inputs = program(eqn.params["jaxpr"]), len(eqn.invars)
    added = {s.position: s for s in sums}

    def run(*inputs: Any) -> list[Any]:
        consts, start = inputs[:n_consts], inputs[n_consts : n_consts + n_carry]
        scanned, arrays = inputs[n_consts + n_carry : n_inputs], inputs[n_inputs:]

        def step(carry: Any, x: Any) -> Any:
            (i, parts), (states, totals) = x, carry
            ys = evaluate(body, [*consts, *states, *parts])
            terms = [_converted(ys[p], s.equations) for p, s in added.items()]
            totals = [_add_at(total, i, term) for total, term in zip(totals, terms, strict=True)]
            return (ys[:n_carry], totals), [y for p, y in enumerate(ys)
                                            if p >= n_carry and p not in added]  # fmt: skip

        with source(eqn, name_stack()), context(eqn):
            numbers = jnp.arange(eqn.params["length"], dtype=jnp.int32)
            carry = list(start), list(arrays)
            (states, totals), ys = scan_like(eqn.params, step, carry, (numbers, scanned))
        stacked, of_position = iter(ys), dict(zip(added, totals, strict=True))
        return [*states, *(of_position[p] if p in added else next(stacked)
                           for p in range(n_carry, len(eqn.outvars)))]  # fmt: skip

    prog = trace(run, *[v.aval for v in eqn.invars], *[s.array.aval for s in sums])
    wanted = [added[p].result if p in added else v for p, v in enumerate(eqn.outvars)]
    return prog if prog.out_avals == [v.aval for v in wanted] else None


def _converted(x: Any, equations: Sequence[JaxprEqn]) -> Any:
    """Return a part of a stacked result after the conversions before its sum."""
    for eqn in equations[:-1]:
        x = lax.convert_element_type(x, eqn.params["new_dtype"])
    return x


def _add_at(total: Any, i: Any, term: Any) -> Any:
    """Add a term to one part of an array, in place."""
    part = lax.dynamic_index_in_dim(total, i, 0, keepdims=False, allow_negative_indices=False)
    return lax.dynamic_update_index_in_dim(total, part + term, i, 0, allow_negative_indices=False)
