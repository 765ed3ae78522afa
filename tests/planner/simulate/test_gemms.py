"""Products as a GPU runs them: which are merged, and which are split."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from xform.planner.simulate.flat import flatten
from xform.planner.simulate.gemms import merge_and_split
from xform.planner.simulate.profiles import CPU, GPU
from xform.planner.simulate.steps import FlatProgram
from xform.program.ir import trace


def of(f, *args, by=GPU) -> tuple[FlatProgram, FlatProgram]:
    flat = flatten(trace(lambda *xs: jax.tree.leaves(f(*xs)), *args), by)
    before = FlatProgram(flat.inputs, flat.steps, flat.outputs)
    return before, merge_and_split(flat, by)


def products(flat: FlatProgram) -> list[tuple[int, ...]]:
    return [s.results[0].shape for s in flat.steps if s.primitive.name == "dot_general"]


def ordered(flat: FlatProgram) -> bool:
    """Return whether each step follows the steps that make its operands, and readers are right."""
    place = {s: i for i, s in enumerate(flat.steps)}
    makers = all(place[c.maker] < place[s] for s in flat.steps for c in s.operands if c.maker)
    values = [*flat.inputs, *itertools.chain(*(s.results for s in flat.steps))]
    return makers and all(
        {*c.readers} == {s for s in flat.steps if c in s.operands} for c in values
    )


def square(n: int = 256):
    return jax.ShapeDtypeStruct((n, n), jnp.float32)


def test_products_that_share_an_operand_are_one_and_its_slices() -> None:
    before, after = of(lambda x, v, w: (x @ v, x @ w), *[square()] * 3)
    assert len(products(before)) == 2
    (product,) = products(after)
    assert product[-1] == 2 * 256 * 256
    assert [s.primitive.name for s in after.steps].count("slice") == 2
    assert [c.bytes for c in after.outputs] == [4 * 256**2] * 2
    assert ordered(after)


def test_one_that_waits_for_another_is_not_merged_with_it() -> None:
    _, after = of(lambda x, v: (x @ v) @ v, *[square()] * 2)
    assert len(products(after)) == 2
    chain = lambda x, v, w: (x @ v, x @ (x @ v), x @ w)
    _, after = of(chain, *[square()] * 3)
    # The second waits for the first; the third is merged with the first.
    assert len(products(after)) == 2
    assert ordered(after)


def test_large_ones_are_not_merged() -> None:
    _, after = of(lambda x, v, w: (x @ v, x @ w), *[square(4096)] * 3)
    assert len(products(after)) == 2


def test_few_rows_and_columns_that_sum_much_are_cut_and_added_up() -> None:
    a = jax.ShapeDtypeStruct((32, 2**17), jnp.float32)
    _, after = of(lambda a, b: a @ b.T, a, a)
    ((parts, *rest),) = products(after)
    assert parts > 1
    assert rest == [32, 32]
    product, total = after.steps[-2:]
    assert total.primitive.name == "reduce_sum"
    assert (total.operands, product.results[0].bytes) == (product.results, 4 * parts * 32 * 32)
    assert after.outputs[0].bytes == 4 * 32 * 32
    assert ordered(after)


@pytest.mark.parametrize(("rows", "columns", "summed", "parts"), [
    (8, 8, 2**17, 256), (8, 8, 2**19, 512), (8, 256, 2**18, 256), (32, 32, 2**17, 256),
    (8, 8, 64, 1),
])  # fmt: skip
def test_the_number_of_parts(rows: int, columns: int, summed: int, parts: int) -> None:
    """By XLA's formula: more parts compute faster, and take longer to write and to add up."""
    a, b = (jax.ShapeDtypeStruct((n, summed), jnp.float32) for n in (rows, columns))
    _, after = of(lambda a, b: a @ b.T, a, b)
    (product,) = products(after)
    assert product == ((parts, rows, columns) if parts > 1 else (rows, columns))


def test_a_product_that_fills_the_gpu_is_not_split() -> None:
    _, after = of(lambda a, b: a @ b, square(4096), square(4096))
    assert products(after) == [(4096, 4096)]


def test_empty_products_and_other_backends_are_left_alone() -> None:
    empty = jax.ShapeDtypeStruct((0, 16), jnp.float32)
    _, after = of(lambda a, b: (a @ b, a @ b.T), empty, square(16))
    assert len(products(after)) == 2
    flat = flatten(trace(lambda x, v, w: [x @ v, x @ w], *[square()] * 3), CPU)
    assert merge_and_split(flat, CPU) is flat
