"""The common parts of all compilers' fusion: order, reads and views."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xform.planner.simulate.flat import flatten
from xform.planner.simulate.fusion import (
    is_pointwise,
    operands_not_elementwise,
    post_order,
    reads_not_elementwise,
)
from xform.planner.simulate.gain import GainFusion
from xform.planner.simulate.loop_fusion import LoopFusion
from xform.planner.simulate.profiles import CPU, GPU
from xform.planner.simulate.steps import FlatProgram, FlatStep
from xform.program.ir import trace
from xform.steering.barrier import barrier

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def flat_of(f, *args, by=CPU) -> FlatProgram:
    return flatten(trace(lambda *xs: jax.tree.leaves(f(*xs)), *args), by)


def recursive(step: FlatStep, done: dict[FlatStep, None]) -> dict[FlatStep, None]:
    """Walk in post order, by the definition."""
    if step not in done:
        for c in step.operands:
            if c.maker:
                recursive(c.maker, done)
        done[step] = None
    return done


@pytest.mark.parametrize("seed", range(4))
def test_operands_come_first_in_their_order(seed: int) -> None:
    random = np.random.default_rng(seed)

    def f(x):
        values = [x]
        for _ in range(20):
            a, b = (values[int(i)] for i in random.integers(0, len(values), 2))
            values.append(a @ b if random.integers(2) else jnp.sin(a) - b)
        return values[-3:]

    flat = flat_of(f, X)
    ends = [c.maker for c in flat.outputs if c.maker]
    expected: dict[FlatStep, None] = {}
    for end in ends:
        recursive(end, expected)
    assert [*post_order(ends, lambda s: s.operands)] == [*expected]


def test_a_deep_program_needs_no_recursion() -> None:
    def f(x):
        for _ in range(3_000):
            x = lax.sin(x)
        return x

    flat = flat_of(f, X)
    assert len([*post_order([flat.steps[-1]], lambda s: s.operands)]) == 3_000


# For one operation: the operands that its last step does not read element by element.
READ = {
    "a sum": (lambda x, y: x + y, []),
    "another type": (lambda x, y: x.astype(jnp.bfloat16), []),
    "another order": (lambda x, y: x.T, [0]),
    "a reduction": (lambda x, y: jnp.sum(x, 0), [0]),
    "a product": (lambda x, y: x @ y, [0, 1]),
    "an update": (lambda x, y: lax.dynamic_update_slice(x, y[:1], (3, 0)), [1]),
    "what waits": (lambda x, y: barrier([x], [y], "everywhere")[0], [1]),
}


@pytest.mark.parametrize("name", READ)
def test_operands_not_elementwise_by_kind_of_step(name: str) -> None:
    f, places = READ[name]
    last = flat_of(f, X, X).steps[-1]
    assert [*operands_not_elementwise(last, True)] == [last.operands[i] for i in places]
    assert is_pointwise(last) == (not places or name == "what waits")


def test_an_update_in_a_loop_of_others_reads_all_of_its_operands() -> None:
    f = lambda x, y: lax.dynamic_update_slice(x, y[:1], (3, 0))
    update = flat_of(f, X, X).steps[-1]
    assert [*operands_not_elementwise(update, False)] == update.operands


def test_inputs_behind_a_transpose_are_not_read_elementwise() -> None:
    steps = flat_of(lambda x, y: jnp.sin(x + 1).T * y, X, X).steps
    x, y = (next(c for s in steps for c in s.operands if not c.maker and s.primitive.name == name)
            for name in ("add", "mul"))  # fmt: skip
    lost = reads_not_elementwise(steps[::-1])
    assert x in lost
    assert y not in lost


@pytest.mark.parametrize(("fusion", "by"), [(LoopFusion, CPU), (GainFusion, GPU)])
def test_the_base_of_a_reshape_is_the_reshaped_value(fusion, by) -> None:
    flat = flat_of(lambda x, y: ((x @ y).reshape(32, 128).reshape(-1), x.reshape(-1)), X, X, by=by)
    base = fusion(flat, by).base_of
    product, given = flat.outputs
    assert base[product].maker.primitive.name == "dot_general"
    assert base[given] is flat.inputs[0]


def test_fusion_visits_every_step_and_groups_read_only_written_values() -> None:
    flat = flat_of(lambda x, y: (jnp.sin(x) @ y, jnp.sum(jnp.cos(x) * y, 0)), X, X)
    for fusion in (LoopFusion(flat, CPU), GainFusion(flat, GPU)):
        assert fusion.visit_index.keys() == {*flat.steps}
        written = {c for g in fusion.groups for c in g.root.results}
        assert {c for c in flat.outputs if c.maker} <= written
        assert all(c in written or not c.maker for g in fusion.groups for c in g.reads)
