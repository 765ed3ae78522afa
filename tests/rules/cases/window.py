"""Cases of `xform.rules.window`."""

import numpy as np
from jax import lax

from xform._jax import jax_primitives
from xform.rules.unpool import unpool
from xform.testing import Case

RNG = np.random.default_rng(11)
X = RNG.permutation(np.linspace(-2.0, 2.2, 30)).reshape(5, 6)
Y = RNG.permutation(np.linspace(0.3, 1.9, 30)).reshape(5, 6)
START = np.array(1.5)
TIED = np.array([1.0, 3.0, 3.0, 2.0, 2.0, 0.0])

PLAIN = ((2, 3), (1, 1), ((0, 0), (0, 0)))
STRIDED = ((2, 3), (2, 2), ((1, 0), (2, 1)))
CROPPED = ((2, 2), (1, 2), ((-1, 1), (1, -2)))


def window(init, reducer, dimensions, strides, padding, base=None, dilation=None):
    def fun(x):
        start = np.asarray(init, x.dtype)
        return lax.reduce_window(x, start, reducer, dimensions, strides, padding, base, dilation)

    return fun


def summed(*args):
    return window(0, lax.add, *args)


def largest(*args):
    return window(-np.inf, lax.max, *args)


def smallest(*args):
    return window(np.inf, lax.min, *args)


def product(*args):
    """Reduce windows with a reducer that has no primitive of its own."""
    return window(1, lambda a, b: a * b, *args)


def started(*args):
    """Reduce each window with multiplication, starting from a differentiated value."""
    return lambda x, init: lax.reduce_window(x, init, lambda a, b: a * b, *args)


def sum_and_product(x, y):
    reducer = lambda a, b: (a[0] + b[0], a[1] * b[1])
    start = np.zeros((), x.dtype), np.ones((), y.dtype)
    return lax.reduce_window((x, y), start, reducer, *STRIDED)


def gather(t, x, dilation=(1, 1)):
    return jax_primitives.select_and_gather_add_p.bind(
        t, x, select_prim=lax.ge_p, window_dimensions=(2, 3),
        window_strides=(2, 2), padding=((1, 0), (2, 1)), base_dilation=(1, 1),
        window_dilation=dilation,
    )  # fmt: skip


def gather_dilated(t, x):
    return gather(t, x, (2, 1))


def scatter(t, x):
    return jax_primitives.select_and_scatter_add_p.bind(
        t, x, select_prim=lax.le_p, window_dimensions=(2, 3),
        window_strides=(1, 1), padding=((0, 0), (0, 0)),
    )  # fmt: skip


def unpooled(t, x):
    return unpool(
        t, x, select_prim=lax.le_p, window_dimensions=(2, 3),
        window_strides=(1, 1), padding=((0, 0), (0, 0)),
    )  # fmt: skip


def of_start(label, f, args):
    """Return a case of an initial value, which JAX cannot batch or reverse."""
    return Case("reduce_window", f, args, label=label, jax=False, vmap=False)


BASE, DILATION = (2, 1), (1, 2)

CASES = [
    Case("reduce_window_sum", summed(*PLAIN), (X,), complex=True),
    Case("reduce_window_sum", summed(*STRIDED), (X,), label="strides"),
    Case("reduce_window_sum", summed(*CROPPED), (X,), label="negative padding"),
    Case("reduce_window_sum", summed(*STRIDED, BASE, DILATION), (X,), label="dilations"),
    Case("reduce_window_sum", summed((9, 3), (1, 1), "VALID"), (X,), label="empty"),
    Case("reduce_window_max", largest(*PLAIN), (X,)),
    Case("reduce_window_max", largest(*STRIDED), (X,), label="strides"),
    Case("reduce_window_max", largest(*PLAIN, BASE), (X,), label="base dilation"),
    # At a tie the two sides of a difference disagree.
    Case("reduce_window_max", largest((3,), (1,), "VALID"), (TIED,), "ties", differences=False),
    Case("reduce_window_min", smallest(*STRIDED), (X,)),
    Case("reduce_window_min", smallest((3,), (1,), "VALID"), (TIED,), "ties", differences=False),
    Case("select_and_gather_add", gather, (X, Y)),
    Case("select_and_gather_add", gather_dilated, (X, Y), label="dilation", jax=False),
    Case("select_and_scatter_add", scatter, (X[:4, :4], Y)),
    Case("xform_unpool", unpooled, (X[:4, :4], Y)),
    # In reverse mode JAX has no rule for these.
    Case("reduce_window", product(*STRIDED), (Y,), jax=False),
    Case("reduce_window", product(*CROPPED, BASE, DILATION), (Y,), label="dilations", jax=False),
    Case("reduce_window", sum_and_product, (X, Y), label="two operands", jax=False),
    # Padding and holes are skipped: an initial value that is not an identity counts once.
    of_start("initial value", started(*STRIDED), (Y, START)),
    of_start("holes", started(*CROPPED, (2, 3), DILATION), (Y, START)),
    of_start("nothing but padding", started((2, 2), (1, 1), ((3, 0), (0, 2))), (Y[:2], START)),
    Case(
        "reduce_window_max",
        largest(*PLAIN, None, DILATION),
        (X,),
        label="window dilation",
        jax=False,
    ),
    Case(
        "reduce_window_min", smallest(*STRIDED, BASE, DILATION), (X,), label="dilations", jax=False
    ),
]
