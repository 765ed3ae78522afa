"""Every primitive that xform has a rule for gives the same values in slices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.rules.test_rules import CASES
from xform.program.equation import read
from xform.program.ir import Program, environment, trace
from xform.slices.loop import run_slice
from xform.slices.opened import opened
from xform.slices.region import Region, find_region
from xform.slices.resize import CurrentSlice
from xform.testing import Case

pytestmark = pytest.mark.usefixtures("x64")


def regions(prog: Program) -> Iterator[Region]:
    """Yield the regions around every value of a program, along each axis."""
    seen = set[Any]()
    values = [*prog.inputs, *(y for e in prog.equations for y in e.outvars)]
    for v in values:
        for axis, size in enumerate(getattr(v.aval, "shape", ())):
            n = next((k for k in (2, 3, 5, 7) if size and size % k == 0), None)
            region = n and find_region(prog, v, axis, n)
            if region:
                key = tuple(region.members.items())
                if key not in seen:
                    seen.add(key)
                    yield region


def joined(region: Region, env: dict[Any, Any]) -> list[Any]:
    """Run a region slice by slice, outside of a loop, and join the slices of each output."""
    full = [env[v] for v in region.full]
    parts = []
    for i in range(region.n):
        at = CurrentSlice(jnp.int32(i), region.n)
        sliced = [at.cut(jnp.asarray(env[v]), axis) for v, axis in region.sliced]
        parts.append(run_slice(region, sliced, full, at))
    out = []
    for (y, slicing, axis), values in zip(region.outputs, zip(*parts, strict=True), strict=True):
        if axis is not None:
            out.append(lax.concatenate(values, axis))
        elif slicing.summed:
            (eqn,) = [e for e, _ in region.equations if y in e.outvars]
            start = read(env, eqn.invars[0]) if "scatter" in eqn.primitive.name else 0
            out.append(start + sum(value - start for value in values))
        else:
            out.append(values[0])
    return out


def everything(prog: Program, args: Any) -> dict[Any, Any]:
    """Return the values of all variables of a program."""
    env = environment(prog, args)
    for eqn in prog.equations:
        prim = eqn.primitive
        out = prim.bind(*[read(env, v) for v in eqn.invars], **prim.get_bind_params(eqn.params))
        env.update(zip(eqn.outvars, out if prim.multiple_results else [out], strict=True))
    return env


def check(case: Case) -> int:
    """Compare each region of a case with the same values without slices; return the number."""
    flat, tree = jax.tree.flatten(case.args)
    f = lambda *xs: jax.tree.leaves(case.fun(*jax.tree.unflatten(tree, xs)))
    prog = opened(trace(f, *flat))
    env = everything(prog, [jnp.asarray(x) for x in flat])
    count = 0
    for region in regions(prog):
        count += 1
        for (y, _, _), value in zip(region.outputs, joined(region, env), strict=True):
            want = env[y]
            assert value.shape == want.shape
            if jnp.issubdtype(want.dtype, np.number):
                np.testing.assert_allclose(
                    value, want, rtol=1e-9, atol=1e-9, err_msg=str(region.equations)
                )
            elif want.dtype == bool:
                assert (value == want).all(), region.equations
    return count


FIRST = {case.primitive: case.id for case in reversed(CASES)}  # the first of each primitive
PARAMS = [
    pytest.param(c, marks=[] if FIRST[c.primitive] == c.id else [pytest.mark.slow], id=c.id)
    for c in CASES
]


@pytest.mark.parametrize("case", PARAMS)
def test_primitive(case: Case) -> None:
    check(case)
