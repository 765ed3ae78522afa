"""Each fact about XLA:CPU: the simulation against the compiler's own assignment."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import xform
from xform.planner.simulate.liveness import simulate
from xform.planner.simulate.profiles import CPU, GPU, TPU, backend_profile
from xform.program.ir import trace
from xform.steering.barrier import barrier

N = 256
SQUARE = jax.ShapeDtypeStruct((N, N), jnp.float32)
CUBE = jax.ShapeDtypeStruct((8, 64, 64), jnp.float32)
ORDER = jax.ShapeDtypeStruct((N,), jnp.int32)
INDEX = jax.ShapeDtypeStruct((), jnp.int32)
NARROW = jax.ShapeDtypeStruct((N, N), jnp.bfloat16)
IMAGES = jax.ShapeDtypeStruct((8, 16, 16, 64), jnp.float32)
KERNEL = jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.float32)
LOOP = 132
# A default of JAX 0.10 that `tests/conftest.py` changes to compile faster. Gathers and scatters
# depend on it.
DEFAULTS = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else None


def half(x):
    """A value that a product reads, so that it is written."""
    return x @ x


def conv(x, w):
    axes = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=axes)


def pooled(x):
    """The maxima of overlapping windows of images."""
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def chain(x, k=3):
    for _ in range(k):
        x = jnp.tanh(x @ x)
    return x


def scan(f, x, length=9):
    return lax.scan(lambda x, _: (f(x), None), x, None, length=length)[0]


def padded(x):
    return jnp.pad(x[:, : N // 2] * 2, ((0, 0), (0, N // 2)))


def joined(x):
    return jnp.concatenate([x[: N // 2], x[N // 2 :] * 2])


def while_active(f, x, n):
    """A loop whose conditional either updates the state or returns it unchanged."""
    body = lambda i, x: lax.cond(i < n, f, lambda x: x, x)
    return jnp.sum(lax.fori_loop(0, 9, body, half(x)) ** 2)


def columns(x, order):
    """Columns of an array in another order."""
    return x.at[:, order].get(mode="promise_in_bounds")


def sum_of_columns(x, first):
    return lax.fori_loop(0, x.shape[0], lambda i, total: total + x[:, i], first)


def waiting(x):
    """A value with several readers that wait for a product."""
    y = half(x)
    (z,) = barrier([x], [y])
    h, g = jnp.tanh(z), jnp.tanh(z * 2)
    return half(h + g * 2) + half(g - h) + half(jnp.tanh(y))


def waiting_between_products(x):
    y = half(x)
    (z,) = barrier([x], [y])
    h = jnp.tanh(z)
    return half(h) + half(jnp.tanh(h + 1)) @ half(jnp.tanh(y)) + half(half(y))


FACTS = {
    "an output's buffer serves others in the order of what is fused": (waiting, SQUARE),
    "though it serves fewer then": (waiting_between_products, SQUARE),
    "a dear operation with two readers is written once":
        (lambda x: half(jnp.tanh(x)) + jnp.tanh(x), SQUARE),
    "a cheap one is made again by each": (lambda x: half(x + 1) @ (half(x + 1) * (x + 1)), SQUARE),
    "a sine is cheap": (lambda x: half(jnp.sin(x)) @ half(jnp.sin(x) + 1), SQUARE),
    "what reads two values is not made twice":
        (lambda x, y: half(half(x) + y) @ (half(x) + y), SQUARE, SQUARE),
    "but where all its readers take it in":
        (lambda x, y: half(jnp.exp(half(x) + half(y))) + half(x), SQUARE, SQUARE),
    "scalars are repeated after what is done to them":
        (lambda x: half(x * (jnp.float32(2) / x.size)) @ half(x), SQUARE),
    "a reduction takes in the product before it":
        (lambda x: jnp.sum(half(x) * half(x + 1)), SQUARE),
    "and what is done to its result": (lambda x: half(jax.nn.softmax(half(x))), SQUARE),
    "a small one does not": (lambda x: half(half(x) - jnp.sum(x[:1, :8] * 2)), SQUARE),
    "a transposed operand of a product is not copied":
        (lambda x: half(x).T @ half(x + 1).T, SQUARE),
    "axes that are not in order are":
        (lambda x: jnp.einsum("bij,ikb->bkj", chain(x), chain(x).transpose(1, 2, 0)), CUBE),
    "nor one of which one axis is summed": (lambda x: jnp.einsum("bij,bkj->bik", x @ x, x), CUBE),
    "several are": (lambda x: jnp.einsum("bij,bkj->ik", x @ x, x @ x + 1), CUBE),
    "a product that sums nothing is one of elements":
        (lambda x: half(jnp.einsum("i,j->ij", x[0], x[1])), SQUARE),
    "a square of a transposed value": (lambda x: half(half(x).T ** 2) @ half(x), SQUARE),
    "a convolution has channels last, and its result is copied where they are not":
        (jax.grad(lambda w, x: jnp.sum(jnp.tanh(conv(jnp.tanh(x), w)))), KERNEL, IMAGES),
    "an elementwise result takes the place of an operand": (lambda x: chain(x, 5), SQUARE),
    "not where the operand is transposed": (lambda x: half(half(x) + half(x + 1).T), SQUARE),
    "steps run as soon as they can":
        (lambda x: half(half(half(x))) @ half(x + 1) @ half(x + 2) @ half(x + 3), SQUARE),
    "values live in the memory of outputs that come later":
        (lambda x: (chain(x, 4), half(chain(x, 4))), SQUARE),
    "small values do as well, and of some that are free the smallest is taken":
        (lambda x: (jnp.sum(half(x)[:8, :8]), half(x)[:64] * 2, half(half(x))[:128]), SQUARE),
    "what is padded is written for several loops":
        (lambda x: half(jnp.tanh(padded(x) + half(x))) + half(padded(x) * half(x + 1)), SQUARE),
    "and is a part of one": (lambda x: half(jnp.tanh(padded(x) + half(x))), SQUARE),
    "and of loops of nothing else": (lambda x: half(padded(x) * 2) @ half(padded(x) + 1), SQUARE),
    "two that are joined are too":
        (lambda x: half(jnp.tanh(joined(x) + half(x))) + half(joined(x) * half(x + 1)), SQUARE),
    "a carried value is replaced where it is read for the last time":
        (lambda x: scan(lambda x: jnp.sin(x) * 2, half(x)), SQUARE),
    "and is not while it is read": (lambda x: scan(lambda x: half(x) + x, half(x)), SQUARE),
    "a loop's result takes the place of what it starts from":
        (lambda x: half(scan(lambda x: jnp.sin(x) * 2, half(x))), SQUARE),
    "a slice of what is scanned is part of its readers":
        (lambda x: lax.scan(lambda c, w: (c * w, None), half(x), jnp.stack([x] * 6))[0],
         SQUARE),
    "or is copied for a product":
        (lambda x: lax.scan(lambda c, w: (c @ w, None), x, jnp.stack([half(x)] * 6))[0], SQUARE),
    "what is stacked is written where it stays":
        (lambda x: jnp.sum(lax.scan(lambda c, _: (half(c), jnp.sin(c)), x, None, length=6)[1]),
         SQUARE),
    "stacks are there from the start":
        (lambda x: lax.scan(lambda c, _: (half(c), c), chain(x, 4), None, length=4)[1] * 2, SQUARE),
    "products of narrow numbers are run with wide ones":
        (lambda x: jax.nn.relu(half(x)) + half(half(x)), NARROW),
    "the way back from pooled maxima is what it is lowered to":
        (xform.grad(lambda x: jnp.sum(pooled(x) ** 2)), IMAGES),
    "a conditional updates an operand that its other branch returns":
        (lambda x, n: while_active(lambda x: jnp.sin(x) * 2, x, n), SQUARE, INDEX),
    "and needs a second array for a product":
        (lambda x, n: while_active(half, x, n), SQUARE, INDEX),
    "a scatter updates its operand":
        (lambda x, i: half(scan(lambda x: x.at[i[:2], i[:2]].add(1), half(x))), SQUARE, ORDER),
    "gathered columns are transposed by the operation that reads them":
        (lambda x, i: half(columns(half(x), i)), SQUARE, ORDER),
    "a loop reads a copy of them":
        (lambda x, i: sum_of_columns(columns(x, i), jnp.zeros(N, x.dtype)) * 2, SQUARE, ORDER),
    "which other operations do not read":
        (lambda x, i, n: sum_of_columns(columns(x, i), columns(x, i)[:, n]) * 2,
         SQUARE, ORDER, INDEX),
    "a while loop":
        (lambda x: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, half(s[1])),
                                  (0, half(x)))[1], SQUARE),
}  # fmt: skip


@pytest.mark.parametrize("fact", FACTS)
def test_a_fact_holds(fact: str) -> None:
    f, *args = FACTS[fact]
    equations = jax.make_jaxpr(f)(*args).pretty_print()
    options = DEFAULTS if "gather[" in equations or "scatter" in equations else None
    stats = jax.jit(f, compiler_options=options).lower(*args).compile().memory_analysis()
    seen = simulate(trace(lambda *xs: jax.tree.leaves(f(*xs)), *args), "cpu")
    assert seen.argument_bytes == stats.argument_size_in_bytes
    assert seen.output_bytes == stats.output_size_in_bytes
    # The compiler adds a counter, a condition and a table of the state to a loop, and such a table
    # to a conditional.
    more = LOOP if any(x in equations for x in ("while[", "scan[", "xform_unpool[")) else 0
    more += LOOP if "cond[" in equations else 0
    assert abs(stats.temp_size_in_bytes - seen.temp_bytes) <= more


def test_profiles_are_found_by_backend() -> None:
    assert [backend_profile(p.name) for p in (CPU, GPU, TPU)] == [CPU, GPU, TPU]
