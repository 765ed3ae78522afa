"""Cases of `xform.rules.sparse`."""

import functools

import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse
from jax.experimental.sparse import BCOO, BCSR, COO, CSR

from xform.testing import Case

RNG = np.random.default_rng(23)
# The last place of each is padding; one place occurs twice.
AT = jnp.array([[0, 1], [2, 0], [2, 3], [0, 1], [1, 2], [3, 4]], np.int32)
SHAPE = (3, 4)
BATCHED = jnp.asarray(np.stack([AT, np.flip(AT, 0)]))
# A negative index counts from the end: (-1, 3) is the place of (2, -1).
ENDS = jnp.array([[0, -3], [-1, 0], [-1, 3], [2, -1], [-1, 3], [-4, 1]], np.int32)
ONCE = jnp.asarray(np.asarray(AT)[[0, 4, 1, 2]])
COLUMNS, STARTS = jnp.array([1, 3, 2, 0], np.int32), jnp.array([0, 2, 2, 4], np.int32)
SQUARE = jnp.array([0, 1, 1, 0, 2], np.int32), jnp.array([0, 2, 3, 5], np.int32)
HOLES = np.array([[0.0, 1.5, 0.0, -2.0], [0.7, 0.0, 0.0, 0.0], [0.0, 0.0, 1.1, 0.4]])


def array(*shape):
    return RNG.normal(size=shape)


def bcoo(data, at=AT, shape=SHAPE):
    return BCOO((data, at), shape=shape)


ONES = bcoo(np.ones(6))


def bcsr(data):
    return BCSR((data, COLUMNS, STARTS), shape=SHAPE)


def dot(axes, batch=((), ()), make=bcoo, **kwargs):
    numbers = axes, batch

    def fun(data, x):
        return sparse.bcoo_dot_general(make(data, **kwargs), x, dimension_numbers=numbers)

    return fun


def compressed(data, x):
    return sparse.bcsr_dot_general(bcsr(data), x, dimension_numbers=(((1,), (0,)), ((), ())))


def sampled(numbers, at):
    return lambda a, b: sparse.bcoo_dot_general_sampled(a, b, at, dimension_numbers=numbers)


def coo(data):
    return COO((data, AT[:5, 0], AT[:5, 1]), shape=SHAPE)


def csr(data):
    return CSR((data, COLUMNS, STARTS), shape=SHAPE)


def solve(data, b):
    off = jnp.array([4.0, 1.0, 4.0, 1.0, 4.0], data.dtype)
    return sparse.linalg.spsolve(data * data.dtype.type(0.1) + off, *SQUARE, b)


stacked = functools.partial(bcoo, at=BATCHED, shape=(2, *SHAPE))
shared = functools.partial(bcoo, at=BATCHED[:1], shape=(2, *SHAPE))
case = functools.partial(Case, bfloat16=False)
alone = functools.partial(case, vmap=False)  # JAX cannot batch these
plain = ((1,), (0,)), ((), ())
two = ((2,), (1,)), ((0,), (0,))
# These also return indices, which have no derivative.
fromdense = functools.partial(sparse.bcoo_fromdense, nse=6)

from_end = functools.partial(bcoo, at=ENDS)

CASES = [
    *(
        case(name, fun, args, "from the end", **options)
        for name, fun, args, options in [
            ("bcoo_todense", lambda x: from_end(x).todense(), (array(6),), {}),
            ("bcoo_extract",
             lambda x: sparse.bcoo_extract(from_end(np.ones(6)), x, assume_unique=False).data,
             (array(*SHAPE),), {"jax": False, "vmap": False}),
            ("bcoo_sum_duplicates", lambda x: from_end(x).sum_duplicates(nse=5).data, (array(6),),
             {"jax": False}),
            ("bcoo_dot_general", dot(((1,), (0,)), make=from_end), (array(6), array(4, 2)), {}),
            ("bcoo_dot_general_sampled", sampled(plain, ENDS), (array(3, 2), array(2, 4)), {}),
            ("bcsr_todense",
             lambda x: BCSR((x, COLUMNS - 4, STARTS), shape=SHAPE).todense(), (array(4),), {}),
            ("coo_todense",
             lambda x: COO((x, ENDS[:5, 0], ENDS[:5, 1]), shape=SHAPE).todense(), (array(5),),
             {"vmap": False}),
            ("csr_matvec", lambda x, v: CSR((x, COLUMNS - 4, STARTS), shape=SHAPE) @ v,
             (array(4), array(4)), {"vmap": False, "jax": False}),
        ]
    ),
    case("bcoo_todense", lambda x: bcoo(x).todense(), (array(6),), complex=True),
    case("bcoo_todense", lambda x: stacked(x).todense(), (array(2, 6),), "batch"),
    case("bcoo_todense", lambda x: shared(x).todense(), (array(1, 6),), "shared batch",
         jax=False),
    case("bcoo_todense", lambda x: bcoo(x, shape=(*SHAPE, 2)).todense(), (array(6, 2),), "dense"),
    case("bcoo_extract", lambda x: sparse.bcoo_extract(ONES, x, assume_unique=True).data,
         (array(*SHAPE),)),
    case("bcoo_extract", lambda x: sparse.bcoo_extract(ONES, x, assume_unique=False).data,
         (array(*SHAPE),), "duplicates", jax=False, vmap=False),
    case("bcoo_fromdense", lambda x: fromdense(x).data, (HOLES,), differences=False),
    case("bcoo_transpose", lambda x: bcoo(x, shape=(*SHAPE, 2, 3)).transpose((1, 0, 3, 2)).data,
         (array(6, 2, 3),)),
    case("bcoo_sort_indices", lambda x: bcoo(x).sort_indices().data, (array(6),), jax=False),
    case("bcoo_sort_indices", lambda x: stacked(x).sort_indices().data, (array(2, 6, 1)[..., 0],),
         "batch", jax=False),
    case("bcoo_sum_duplicates", lambda x: bcoo(x).sum_duplicates(nse=6).data, (array(6),),
         jax=False),
    case("bcoo_sum_duplicates", lambda x: stacked(x).sum_duplicates(nse=5).data, (array(2, 6),),
         "batch", jax=False),
    case("bcoo_dot_general", dot(((1,), (0,))), (array(6), array(4, 2)), complex=True),
    case("bcoo_dot_general", dot(((0,), (1,))), (array(6), array(2, 3)), "columns"),
    case("bcoo_dot_general", dot(((0, 1), (1, 0))), (array(6), array(4, 3, 2)), "both"),
    case("bcoo_dot_general", dot(*two, stacked), (array(2, 6), array(2, 4, 3)), "batch"),
    case("bcoo_dot_general_sampled", sampled(plain, ONCE), (array(3, 2), array(2, 4)),
         complex=True),
    case("bcoo_dot_general_sampled", sampled(two, BATCHED), (array(2, 3, 2), array(2, 2, 4)),
         "batch"),
    case("bcoo_dot_general_sampled", sampled(plain, ONCE[:3, :1]), (array(3, 2), array(2, 4)),
         "rows"),
    case("bcoo_dot_general_sampled", sampled(two, BATCHED[:, ::2, :1]),
         (array(2, 3, 2), array(2, 2, 4)), "batch of rows"),
    case("todense", lambda x: sparse.todense(bcoo(x)), (array(6),), jax=False),
    case("todense", lambda x: sparse.todense(x), (array(6),), "of a dense array"),
    case("bcsr_todense", lambda x: bcsr(x).todense(), (array(4),)),
    case("bcsr_extract", lambda x: sparse.bcsr_extract(COLUMNS, STARTS, x), (array(*SHAPE),)),
    case("bcsr_fromdense", lambda x: sparse.bcsr_fromdense(x, nse=5).data, (HOLES,),
         differences=False),
    case("bcsr_dot_general", compressed, (array(4), array(4, 2))),
    alone("coo_todense", lambda x: coo(x).todense(), (array(5),)),
    alone("coo_fromdense", lambda x: sparse.coo_fromdense(x, nse=5).data, (HOLES,),
         differences=False),
    # JAX's derivative by the data forgets the transposition of the matrix, also in reverse mode.
    alone("coo_matvec", lambda x, v: coo(x) @ v, (array(5), array(4)), complex=True, jax=False),
    alone("coo_matmat", lambda x, v: coo(x).T @ v, (array(5), array(3, 2)), "transposed",
         jax=False),
    alone("csr_todense", lambda x: csr(x).todense(), (array(4),)),
    alone("csr_fromdense", lambda x: sparse.csr_fromdense(x, nse=5).data, (HOLES,),
         differences=False),
    alone("csr_matvec", lambda x, v: csr(x).T @ v, (array(4), array(3)), "transposed",
         jax=False),
    alone("csr_matmat", lambda x, v: csr(x) @ v, (array(4), array(4, 2)), complex=True,
         jax=False),
    alone("spsolve", solve, (array(5), array(3)), second=False),
]  # fmt: skip
