"""Fusion by gain: which operations are fused into all readers, and which are written."""

import jax
import jax.numpy as jnp
import pytest

from tests.calls import counted
from xform.planner.simulate.flat import flatten
from xform.planner.simulate.gain import GainFusion
from xform.planner.simulate.profiles import GPU
from xform.program.ir import trace

X = jax.ShapeDtypeStruct((512, 512), jnp.float32)


def of(f, *args) -> GainFusion:
    return GainFusion(flatten(trace(lambda *xs: jax.tree.leaves(f(*xs)), *args), GPU), GPU)


def written(f, *args) -> list[str]:
    fusion = of(f, *args)
    return sorted(
        g.root.primitive.name for g in fusion.groups if g.root.results[0] not in fusion.base_of
    )


# The values that each program writes, by the rules in XLA's `priority_fusion.cc`.
WRITTEN = {
    "a chain": (lambda x: jnp.exp(jnp.sin(x) * 2 + x), ["exp"]),
    "one with two readers": (lambda x: (jnp.sin(x) + 1, jnp.sin(x) * 2), ["add", "mul"]),
    "a product's operand": (lambda x: jnp.sin(x) @ x, ["dot_general", "sin"]),
    "one that a product reads too": (lambda x: (jnp.sin(x) @ x, jnp.sin(x) + 1),
                                     ["add", "dot_general", "sin"]),
    "one that is returned": (lambda x: (jnp.sin(x), jnp.sin(x) + 1), ["add", "sin"]),
    "a sum": (lambda x: jnp.sin(x) - jnp.sum(jnp.sin(x), 1)[:, None], ["reduce_sum", "sub"]),
    "a sum of few": (lambda x: jnp.sum(x.reshape(-1, 2), 1) * 2, ["mul"]),
    "a view": (lambda x: jnp.sin(x.reshape(-1)) + 1, ["add"]),
    "nothing": (lambda x: x, []),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_written_steps_by_kind_of_program(name: str) -> None:
    f, expected = WRITTEN[name]
    assert written(f, X) == expected


def test_fusion_groups_read_only_written_values_or_inputs() -> None:
    fusion = of(lambda x: (jnp.sin(x) @ x + jnp.exp(x), jnp.sum(jnp.cos(x), 1)), X)
    roots = {c for g in fusion.groups for c in g.root.results}
    assert all(c in roots or c.maker is None for g in fusion.groups for c in g.reads)


def test_an_operand_in_another_order_is_not_replaced() -> None:
    (last,) = of(lambda x: jnp.sin(x).T + 1, X).groups
    assert last.replaceable() == set()
    (last,) = of(lambda x: jnp.sin(x) + 1, X).groups
    assert len(last.replaceable()) == 1


def test_a_sum_of_many_arrays_with_several_readers_is_written() -> None:
    def f(*xs):
        total = sum(xs[1:], xs[0])
        return [jnp.roll(total, k, 0) @ xs[0] for k in range(4)]

    few, many = (written(f, *[X] * n) for n in (1, 12))
    assert many.count("add") == few.count("add") + 1


def test_a_long_chain_takes_near_linear_work() -> None:
    def work(n: int) -> int:
        def f(x):
            for _ in range(n):
                x = jnp.sin(x)
            return x

        done, fusion = counted(lambda: of(f, X))
        assert len(fusion.groups) == 1
        return done

    assert work(400) < 8 * work(100)
