"""The simulation has as many kernels as XLA:CPU, each with the same bytes."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.calls import counted
from tests.kernels import kernels
from xform.planner.simulate.flat import flatten
from xform.planner.simulate.fusion import FusionGroup
from xform.planner.simulate.loop_fusion import LoopFusion
from xform.planner.simulate.profiles import CPU, GPU
from xform.planner.simulate.steps import FlatStep
from xform.program.ir import trace

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)
# Smaller values are ignored: scalars, and values that depend on them.
SMALL = 1024


def of(f, *args, by=CPU) -> LoopFusion:
    return LoopFusion(flatten(trace(lambda *xs: jax.tree.leaves(f(*xs)), *args), by), by)


def written(fusion: LoopFusion) -> list[int]:
    values = [g.root.results[0] for g in fusion.groups]
    return sorted(c.bytes for c in values if c not in fusion.base_of and c.bytes >= SMALL)


def square(x):
    return x @ x.T


WRITTEN = {
    "a chain": lambda x: jnp.exp(jnp.sin(x) * 2 + x),
    "a cheap one with two readers": lambda x: (square(x + 1), jnp.sin(x + 1)),
    "a dear one with two readers": lambda x: (square(jnp.exp(x)), jnp.sin(jnp.exp(x))),
    "a dear one that is repeated": lambda x: jnp.exp(x)[None] * jnp.arange(4.0)[:, None, None],
    "a cheap one that is": lambda x: (x + 1)[None] * jnp.arange(4.0)[:, None, None],
    "a cheap one that is an output": lambda x: (x + 1, (x + 1) * x),
    "a reduction along rows": lambda x: x - jnp.sum(x * x, 1, keepdims=True),
    "a transpose of elements": lambda x: jnp.sin(x).T * 2,
    "a slice and a padding": lambda x: jnp.pad(jnp.cos(x)[1:], ((0, 1), (0, 0))) * 2,
    "two joined": lambda x: jnp.concatenate([jnp.sin(x), x + 1]) * 2,
    "nine joined": lambda x: jnp.concatenate([x + float(i) for i in range(9)]) * 2,
    "rows that are looked up": lambda x: jnp.sin(x)[jnp.arange(64) % 7] * 2,
    "a view": lambda x: jnp.sin(x.reshape(32, 128)) + 1,
    "a view of what is written": lambda x: square(x).reshape(32, 128) + 1,
    "an update in place": lambda x: lax.dynamic_update_slice(jnp.sin(x), x[:1] * 2, (3, 0)),
    "a sort": lambda x: jnp.sort(jnp.sin(x), 0) * 2,
    "a select": lambda x: jnp.where(x > 0, jnp.sin(x), x) * 2,
    "nothing": lambda x: x,
}


@pytest.mark.parametrize("name", WRITTEN)
def test_written_bytes_equal_those_of_xla_cpu_kernels(name: str) -> None:
    f = WRITTEN[name]
    theirs = sorted(k.bytes for k in kernels(f, X) if k.bytes >= SMALL)
    assert written(of(f, X)) == theirs


def test_narrow_numbers_and_none_at_all() -> None:
    f = lambda x: jnp.sin(x) * 2 + x
    assert written(of(f, jax.ShapeDtypeStruct((64, 64), jnp.bfloat16))) == [64 * 64 * 2]
    for shape in ((0, 64), ()):
        fusion = of(f, jax.ShapeDtypeStruct(shape, jnp.float32))
        assert len(fusion.groups) <= 1
    assert of(lambda: ()).groups == []


def steps_of(group: FusionGroup) -> set[FlatStep]:
    """Return the steps between the values that a group reads and its result."""
    found, todo = {group.root}, [group.root]
    while todo:
        made = {c.maker for c in todo.pop().operands if c.maker and c not in group.reads}
        todo += made - found
        found |= made
    return found


@pytest.mark.parametrize("f", WRITTEN.values(), ids=WRITTEN)
def test_groups_hold_each_step_and_read_only_written_values(f) -> None:
    flat = flatten(trace(lambda x: jax.tree.leaves(f(x)), X), CPU)
    fusion = LoopFusion(flat, CPU)
    assert {s for g in fusion.groups for s in steps_of(g)} == set(flat.steps)
    roots = {c for g in fusion.groups for c in g.root.results}
    for group in fusion.groups:
        assert set(group.reads) <= roots | set(flat.inputs)
    made = {c for c in flat.outputs if c.maker}
    assert made <= roots


def test_only_same_size_elementwise_operands_are_replaceable() -> None:
    def replaced(f) -> int:
        (*_, last) = of(f, X).groups
        return len(last.replaceable())

    assert replaced(lambda x: jnp.sin(x) * 2) == 1
    assert replaced(lambda x: jnp.sin(x) + x.T) == 0
    assert replaced(lambda x: x[::-1] * 2) == 0
    assert replaced(lambda x: x.astype(jnp.bfloat16)) == 0
    assert replaced(lambda x: square(x)) == 0


def test_a_long_chain_of_which_all_is_returned_takes_linear_work() -> None:
    def work(n: int) -> int:
        def chain(x):
            for _ in range(n):
                x = lax.sin(x)
                yield x

        done, fusion = counted(lambda: of(lambda x: list(chain(x)), X))
        assert {len(g.reads) for g in fusion.groups} == {1}
        assert len(written(fusion)) == n
        return done

    work(10)
    assert work(2_000) < 6 * work(400)


def test_one_loop_that_reads_ever_more_takes_linear_work() -> None:
    def work(n: int) -> int:
        def f(*xs):
            y = xs[0]
            for x in xs[1:]:
                y = (y + x) * 2
            return y

        done, fusion = counted(lambda: of(f, *[X] * n))
        (group,) = fusion.groups
        assert len(group.reads) == len(group.replaceable()) == n
        return done

    work(10)
    assert work(900) < 5 * work(225)


def test_a_group_maps_each_input_to_its_reading_steps_in_order() -> None:
    def f(x, y):
        more = x + 1
        return jnp.exp(more * y.T) - more * y, square(more)

    flat = flatten(trace(lambda *xs: jax.tree.leaves(f(*xs)), X, X), CPU)
    by_result = {g.root.results[0]: g for g in LoopFusion(flat, CPU).groups}
    group = by_result[flat.outputs[0]]
    a, b = flat.inputs
    assert list(group.reads) == [a, b]
    # Two steps of the loop take in the sum, which is in it once; `y` is read in two orders.
    assert [[s.primitive.name for s in group.reads[c]] for c in (a, b)] == [
        ["add"],
        ["transpose", "mul"],
    ]
    assert group.not_elementwise == {b}
    assert group.replaceable() == {a}


def test_arctan_before_a_sum_is_written_on_cpu_and_fused_on_gpu() -> None:
    f = lambda x: jnp.sum(jnp.arctan(x), 1)  # no version of the library has it
    assert (written(of(f, X)), written(of(f, X, by=GPU))) == ([X.size * 4], [])
