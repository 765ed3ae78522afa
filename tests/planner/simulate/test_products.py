"""Which operands of a product are copied, compared with the transposes that XLA compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xform.planner.simulate.products import (
    as_matrices,
    channels_last,
    is_16_bit,
    is_outer,
    operand_orders,
    shape,
)
from xform.program.ir import trace


def array(*sizes: int):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


PRODUCTS = {
    "matrices": ("ij,jk->ik", (array(8, 16), array(16, 32)), (False, False)),
    "the left one transposed": ("ji,jk->ik", (array(16, 8), array(16, 32)), (False, False)),
    "both": ("ji,kj->ik", (array(16, 8), array(32, 16)), (False, False)),
    "a batch": ("bij,bjk->bik", (array(4, 8, 16), array(4, 16, 32)), (False, False)),
    "a batch in the middle": ("ibj,bjk->bik", (array(8, 4, 16), array(4, 16, 32)), (True, False)),
    "a batch at the end": ("bij,jkb->bik", (array(4, 8, 16), array(16, 32, 4)), (False, True)),
    "two rows": ("hij,jk->hik", (array(4, 8, 16), array(16, 32)), (False, False)),
    "what is summed between rows": ("hji,jk->hik", (array(4, 16, 8), array(16, 32)), (True, False)),
    "two sums": ("ihj,hjk->ik", (array(8, 4, 16), array(4, 16, 32)), (False, False)),
    "axes of one": ("ibj,bjk->bik", (array(8, 1, 16), array(1, 16, 32)), (False, False)),
}


def dot(text: str, args):
    """Return the product in an einsum, without the transposes before and after it."""
    left, right = text.partition("->")[0].split(",")
    result = text.partition("->")[2]
    batch = [a for a in left if a in right and a in result]
    summed = [a for a in left if a in right and a not in result]
    numbers = ([left.index(a) for a in summed], [right.index(a) for a in summed]), (
        [left.index(a) for a in batch], [right.index(a) for a in batch])  # fmt: skip
    f = lambda a, b: lax.dot_general(a, b, numbers)
    return f, trace(lambda *xs: [f(*xs)], *args).equations[0]


def read_as_it_lies(eqn, i: int) -> bool:
    sizes = eqn.invars[i].aval.shape
    real = lambda axes: [a for a in axes if sizes[a] != 1]
    ways = operand_orders(eqn, i, tuple(range(len(sizes))))
    return any(real(way) == sorted(real(way)) for way in ways)


@pytest.mark.parametrize("name", PRODUCTS)
def test_copied_operands_of_products_match_xla(name: str) -> None:
    text, args, copied = PRODUCTS[name]
    f, eqn = dot(text, args)
    assert tuple(not read_as_it_lies(eqn, i) for i in range(2)) == copied
    stats = jax.jit(f).lower(*args).compile().memory_analysis()
    size = sum(4 * np.prod(a.shape) for a, on in zip(args, copied, strict=True) if on)
    assert abs(stats.temp_size_in_bytes - size) <= 256


@pytest.mark.parametrize("name", PRODUCTS)
def test_orders_are_permutations_and_the_matrices_multiply(name: str) -> None:
    text, args, _ = PRODUCTS[name]
    f, eqn = dot(text, args)
    xs = a, b = [np.random.default_rng(0).normal(size=x.shape).astype("float32") for x in args]
    lie = [tuple(range(x.ndim)) for x in (a, b)]
    ways = [operand_orders(eqn, i, lie[i])[0] for i in range(2)]
    assert [sorted(way) for way in ways] == [list(axes) for axes in lie]
    if not as_matrices(eqn):  # it is a product of matrices already
        a, b = (np.moveaxis(x, way, lies) for x, way, lies in zip((a, b), ways, lie, strict=True))
        np.testing.assert_allclose(a @ b, f(*xs), rtol=1e-4, atol=1e-5)
        return
    *batch, m, k, n = as_matrices(eqn)
    left = a.transpose(ways[0]).reshape(*batch, m, k)
    right = b.transpose(ways[1]).reshape(*batch, k, n)
    np.testing.assert_allclose((left @ right).reshape(f(a, b).shape), f(a, b), rtol=1e-4, atol=1e-5)


def test_products_that_sum_nothing_compile_to_elementwise_products() -> None:
    for text, args, yes in (("i,k->ik", (array(8), array(32)), True),
                            ("ij,jk->ik", (array(8, 1), array(1, 32)), True),
                            ("ij,jk->ik", (array(8, 2), array(2, 32)), False),
                            ("bi,bi->bi", (array(4, 8), array(4, 8)), True)):  # fmt: skip
        f, eqn = dot(text, args)
        assert is_outer(eqn) is yes
        text = jax.jit(f).lower(*args).compile().as_text()
        assert (" dot(" not in text) is yes


def test_shapes_and_dtypes_of_empty_scalar_and_16_bit_operands() -> None:
    _, eqn = dot("hij,jk->hik", (array(4, 8, 0), array(0, 32)))
    assert len(as_matrices(eqn)) == 3
    assert (shape(jax.ShapeDtypeStruct((), jnp.int32)), shape(None)) == ((), ())
    kinds = {d: is_16_bit(jax.ShapeDtypeStruct((2,), d)) for d in ("bfloat16", "float16", "int16")}
    assert kinds == {"bfloat16": True, "float16": True, "int16": False}


@pytest.mark.parametrize(("layout", "copies"), [
    (("NHWC", "HWIO", "NHWC"), 0), (("NCHW", "HWIO", "NHWC"), 1), (("NHWC", "OIHW", "NHWC"), 1),
    (("NHWC", "HWIO", "NCHW"), 1), (("NCHW", "OIHW", "NCHW"), 3),
])  # fmt: skip
def test_a_convolution_has_channels_last(layout, copies: int) -> None:
    sizes = {"N": 2, "H": 8, "W": 8, "C": 4, "I": 4, "O": 16}
    kernel = {"H": 3, "W": 3}
    x = array(*(sizes[a] for a in layout[0]))
    w = array(*((sizes | kernel)[a] for a in layout[1]))
    f = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=layout)
    eqn = trace(lambda *xs: [f(*xs)], x, w).equations[0]
    moved = [operand_orders(eqn, i, (0, 1, 2, 3))[0] != (0, 1, 2, 3) for i in range(2)]
    assert sum(moved) + (channels_last(eqn) != (0, 1, 2, 3)) == copies
    text = jax.jit(f).lower(x, w).compile().as_text()
    assert (text.count("transpose(") > 0) == (copies > 0)
