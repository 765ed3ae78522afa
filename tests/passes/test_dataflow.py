"""The driver of analyses finds what depends on what, also through loops, branches and calls.

The truth is found by changing one argument at a time and comparing the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from tests.fuzz.generate import inputs, sample
from tests.fuzz.source import function
from xform.passes.dataflow import Forward, Lattice, operands_through
from xform.program.ir import Program, evaluate, trace
from xform.registry.table import flow_of

Found = frozenset[int]


class Sources(Forward[Found]):
    """The arguments that each value depends on."""

    follows_control = True

    def constant(self, v: Any) -> Found:
        return frozenset()

    def join(self, a: Found, b: Found) -> Found:
        return a | b

    def control(self, predicate: Found, x: Found) -> Found:
        return predicate | x

    def transfer(self, eqn: Any, operands: list[Found], through: list[Found] | None) -> list[Found]:
        return through or [frozenset[int]().union(*operands)] * len(eqn.outvars)


def sources(prog: Program) -> list[Found]:
    """Return for each output the arguments that it depends on, by the forward driver."""
    return Sources().run(prog, [frozenset((i,)) for i in range(len(prog.inputs))])


class Read(Lattice[Found]):
    def join(self, a: Found, b: Found) -> Found:
        return a | b


def readers(prog: Program, outputs: Sequence[Found]) -> list[Found]:
    """Return for each input the outputs that need it, by the backward driver."""
    known: dict[Any, Found] = {}
    add = lambda v, x: known.update({v: known.get(v, frozenset()) | x})
    for v, x in zip(prog.outputs, outputs, strict=True):
        if not isinstance(v, jax.extend.core.Literal):
            add(v, x)
    for eqn in reversed(prog.equations):
        results = [known.get(v, frozenset()) for v in eqn.outvars]
        every = frozenset[int]().union(*results)
        flow = flow_of(eqn)
        operands = [every] * len(eqn.invars)
        if flow is not None:
            operands = operands_through(
                flow, results, eqn.invars, Read(), readers, frozenset(), every
            )
        for v, x in zip(eqn.invars, operands, strict=True):
            if not isinstance(v, jax.extend.core.Literal):
                add(v, x)
    return [known.get(v, frozenset()) for v in prog.inputs]


def by_change(prog: Program, values: Sequence[Sequence[Any]], starts: int) -> list[Found]:
    """Return for each output the arguments whose change to another value changes it.

    `values` has the possible values of each argument. The change is tried from several `starts`.
    """
    run = jax.jit(lambda *xs: evaluate(prog, xs))
    found: list[set[int]] = [set() for _ in prog.outputs]
    random = np.random.default_rng(0)
    for _ in range(starts):
        start = [of[random.integers(len(of))] for of in values]
        before = run(*start)
        for i, of in enumerate(values):
            changed = [*start]
            changed[i] = of[random.integers(len(of))]
            for out, x, y in zip(found, before, run(*changed), strict=True):
                if not np.array_equal(x, y, equal_nan=True):
                    out.add(i)
    return list(map(frozenset, found))


def rotating(a, b, c, d, n):
    """A value passes from one carry to the next, one iteration at a time."""
    step = lambda s, x: ((s[0] + s[1], s[1] + s[2], s[2] + x, s[3]), s[0] * 2.0)
    return lax.scan(step, (a, b, c, d), jnp.stack([a, d, d, d, d]))


def stopped_by(a, b, c, d, n):
    """A condition that reads a constant, and a carry that no other carry reads."""
    more = lambda s: (s[0] < n) & (s[1] < 1.0)
    return lax.while_loop(more, lambda s: (s[0] + 1, s[1] + a, s[2] * 0.5), (0, b, c))


def chosen(a, b, c, d, n):
    return lax.switch(n, [lambda x, y: (x, y), lambda x, y: (y, 1.0)], a, b), c


def nested(a, b, c, d, n):
    @jax.custom_jvp
    def own(x, y):
        return x + 1.0, y

    own.defjvp(lambda xs, dxs: (own(*xs), dxs))
    swap = jax.checkpoint(lambda s: (s[1], own(*s)[0]))

    def step(s, x):
        s = lax.cond(x > 0.0, lambda: swap(s), lambda: s)
        return s, jax.jit(lambda t: (t * 2.0, d))(s[1])

    return lax.scan(step, (a, b), jnp.stack([c, -c, c]))


def on_devices(a, b, c, d, n):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec()
    f = lambda x, y: (lax.scan(lambda s, _: (s + y, s), x, length=2), 2.0 * y)
    return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)(a, b)


@pytest.mark.parametrize("f", [rotating, stopped_by, chosen, nested, on_devices])
def test_both_directions_find_exactly_what_depends(f) -> None:
    floats, ints = (1.5, -0.5, 2.5, 0.25, 0.75, -1.25), (0, 1, 3)
    prog = trace(lambda *xs: jax.tree.leaves(f(*xs)), 1.0, 1.0, 1.0, 1.0, 1)
    truth = by_change(prog, [floats, floats, floats, floats, ints], 30)
    assert sources(prog) == truth
    of_inputs = readers(prog, [frozenset((i,)) for i in range(len(truth))])
    assert [frozenset(i for i, out in enumerate(truth) if k in out) for k in range(5)] == of_inputs


@pytest.mark.parametrize("seed", [3, 11, 27])
@pytest.mark.usefixtures("x64")
def test_random_programs_depend_on_nothing_else(seed: int) -> None:
    s = sample(seed)
    f = function(s.source)
    values = [inputs(seed + i, s.types) for i in range(3)]
    prog = trace(lambda *xs: jax.tree.leaves(f(*xs)), *values[0])
    truth, found = by_change(prog, list(zip(*values, strict=True)), 3), sources(prog)
    assert any(truth)
    assert all(a <= b for a, b in zip(truth, found, strict=True))
    of_inputs = readers(prog, [frozenset((i,)) for i in range(len(truth))])
    for i, out in enumerate(truth):
        assert all(i in of_inputs[k] for k in out)
