"""Cases of `xform.rules.contract`."""

import numpy as np
from jax import lax

from xform.testing import Case

RNG = np.random.default_rng(5)


def array(*shape):
    return RNG.normal(size=shape)


def dot(dims, **kwargs):
    return lambda a, b: lax.dot_general(a, b, dims, **kwargs)


def wide_product(a, b):
    """A product whose dtype is wider than its operands', as in mixed precision."""
    product = lax.dot_general(a, b, PLAIN, preferred_element_type=np.float64)
    return lax.convert_element_type(product, a.dtype)


def wide_operand(a, b):
    return lax.dot_general(lax.convert_element_type(a, np.float64), b, PLAIN)


def real_and_complex(a, b):
    y = lax.dot_general(a, lax.complex(b, b * b), PLAIN)
    return lax.real(y), lax.imag(y)


def integers(a, k):
    return lax.dot_general(a, k, PLAIN, preferred_element_type=a.dtype)


PLAIN = ((1,), (0,)), ((), ())
BATCH = ((3, 1), (0, 3)), ((2,), (1,))  # a[m, i, batch, j], b[j, batch, n, i]
ROWS = ((1,), (1,)), ((), ())
SIZES = np.array([2, 0, 3], np.int32)


def ragged(dims, rows, groups):
    numbers = lax.RaggedDotDimensionNumbers(dims, rows, groups)

    def fun(a, b):
        # JAX batches the sizes only together with the operands, so they depend on one. It cannot
        # batch a ragged product that has batch axes already.
        none = lax.convert_element_type(lax.ne(a[(0,) * a.ndim], a[(0,) * a.ndim]), np.int32)
        return lax.ragged_dot_general(a, b, lax.add(SIZES, none), numbers)

    return fun


def conv(strides, padding, **kwargs):
    return lambda x, w: lax.conv_general_dilated(x, w, strides, padding, **kwargs)


LAST = ("NHWC", "HWIO", "NHWC")

CASES = [
    Case("dot_general", dot(PLAIN), (array(2, 3), array(3, 4)), complex=True),
    Case("dot_general", dot(BATCH), (array(2, 3, 4, 5), array(5, 4, 2, 3)), "batch", complex=True),
    Case("dot_general", dot((((), ()), ((), ()))), (array(2), array(3)), "outer"),
    Case("dot_general", dot((((0,), (0,)), ((), ()))), (array(3), array(3)), "inner"),
    Case("dot_general", dot((((), ()), ((0,), (0,)))), (array(3), array(3, 2)), "batch only"),
    Case("dot_general", dot(PLAIN), (array(2, 0), array(0, 4)), "empty sum"),
    Case("dot_general", dot(PLAIN), (array(0, 3), array(3, 4)), "empty"),
    Case("dot_general", dot(PLAIN, precision="highest"), (array(2, 3), array(3, 4)), "precision"),
    Case("dot_general", lambda a: dot(PLAIN)(a, a), (array(3, 3),), "with itself"),
    Case("dot_general", wide_product, (array(2, 3), array(3, 4)), "preferred"),
    Case("dot_general", wide_operand, (array(2, 3), array(3, 4)), "mixed"),
    Case("dot_general", real_and_complex, (array(2, 3), array(3, 4)), "real and complex",
         bfloat16=False),
    Case("dot_general", integers, (array(2, 3), np.arange(12).reshape(3, 4)), "integers"),
    # JAX has no derivative of the derivative of a ragged product.
    Case("ragged_dot_general", ragged(ROWS, (0,), (0,)), (array(5, 4), array(3, 4, 2)),
         second=False),
    Case("ragged_dot_general", ragged(ROWS, (0,), (0,)), (array(5, 4), array(3, 4, 2)),
         "second order", jax=False),
    Case("ragged_dot_general", ragged((((0,), (0,)), ((), ())), (0,), ()),
         (array(5, 4), array(5, 2)), "summed rows", jax=False),
    Case("conv_general_dilated", conv((1, 1), "SAME"), (array(2, 3, 5, 6), array(4, 3, 3, 2)),
         complex=True),
    Case("conv_general_dilated", conv((2,), "VALID"), (array(2, 3, 8), array(4, 3, 3)), "stride"),
    Case("conv_general_dilated", conv((2, 1), ((2, 1), (0, 3)), lhs_dilation=(1, 3),
         rhs_dilation=(2, 1)), (array(1, 2, 6, 4), array(3, 2, 2, 3)), "dilations"),
    Case("conv_general_dilated", conv((2,), ((-1, 2),), lhs_dilation=(2,)),
         (array(1, 2, 7), array(3, 2, 3)), "negative padding"),
    Case("conv_general_dilated", conv((1,), ((2, -3),), rhs_dilation=(2,)),
         (array(1, 2, 9), array(3, 2, 3)), "negative padding after"),
    Case("conv_general_dilated", conv((2, 2), "SAME", feature_group_count=2,
         dimension_numbers=LAST), (array(2, 5, 5, 4), array(3, 3, 2, 6)), "feature groups"),
    Case("conv_general_dilated", conv((1,), "SAME", feature_group_count=3),
         (array(2, 3, 6), array(6, 1, 3)), "depthwise"),
    Case("conv_general_dilated", conv((2,), "SAME", batch_group_count=2),
         (array(4, 3, 7), array(6, 3, 3)), "batch groups"),
    Case("conv_general_dilated", conv((), (), ), (array(2, 3), array(4, 3)), "no space"),
    Case("conv_general_dilated", conv((1,), "VALID"), (array(2, 3, 2), array(4, 3, 3)), "empty"),
    Case("conv_general_dilated", conv((1,), "SAME"), (array(0, 3, 4), array(4, 3, 3)),
         "empty batch"),
    Case("conv_general_dilated", conv((1,), "SAME", precision="highest"),
         (array(2, 3, 4), array(4, 3, 3)), "precision"),
]  # fmt: skip
