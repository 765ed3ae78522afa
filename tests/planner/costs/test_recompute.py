"""The cost of recomputing an equation, compared with what the compiler writes to memory."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from xform.planner.costs.recompute import Prices, fusible, price, recomputable
from xform.program.ir import trace

N = 128
X = jax.ShapeDtypeStruct((N, N), jnp.float32)
ONE = N * N * 4

FUSED = {
    "exp": jnp.exp,
    "select": lambda x: jnp.where(x > 0, x, 0.0),
    "transpose": jnp.transpose,
    "reverse": lambda x: x[::-1],
    "slice and pad": lambda x: jnp.pad(x[1:], ((0, 1), (0, 0))),
    "a call": jax.jit(lambda x: jnp.tanh(x) * 2),
    "to bfloat16": lambda x: x.astype(jnp.bfloat16),
}
WRITTEN = {
    "product": lambda x: x @ x,
    "sort": lambda x: jnp.sort(x, 0),
    "fft": lambda x: jnp.fft.fft(x).real,
    "loop": lambda x: lax.fori_loop(0, 3, lambda i, x: jnp.sin(x), x),
    "a call": jax.jit(lambda x: jnp.sin(x @ x)),
}


def equations(f, *args):
    return trace(lambda *xs: jax.tree.leaves(f(*xs)), *args).equations


@pytest.mark.parametrize("name", FUSED)
def test_fusible_results_need_no_temporary_memory(name: str) -> None:
    f = FUSED[name]
    assert all(map(fusible, equations(f, X)))
    compiled = jax.jit(lambda x: jnp.cos(f(x)) + 1).lower(X).compile()
    assert compiled.memory_analysis().temp_size_in_bytes == 0


@pytest.mark.parametrize("name", WRITTEN)
def test_nonfusible_results_are_written_to_memory(name: str) -> None:
    f = WRITTEN[name]
    assert not all(map(fusible, equations(f, X)))
    compiled = jax.jit(lambda x: jnp.cos(f(x)) + f(x).T).lower(X).compile()
    assert compiled.memory_analysis().temp_size_in_bytes >= ONE


def test_effectful_equations_are_neither_fusible_nor_recomputable() -> None:
    @jax.jit
    def f(x):
        jax.debug.print("{}", x[0, 0])
        return jnp.sin(x)

    for eqn in equations(f, X):
        assert not fusible(eqn)
        assert not recomputable(eqn)
        assert price(eqn, 0.0) == math.inf


def test_a_random_number_costs_fifty_integer_operations() -> None:
    draws = equations(lambda key: jax.random.bits(key, (8,)), jax.random.key(0))
    (eqn,) = (e for e in draws if e.primitive.name == "random_bits")
    assert price(eqn) == math.inf
    assert price(eqn, 1.0) == 32 * 50 * 8 + 8 * 4 / 1024
    (keyless,) = equations(lambda x: lax.rng_uniform(0.0, x, (8,)), 1.0)
    assert price(keyless, 0.0) == math.inf


def test_the_price_of_a_product_by_hand() -> None:
    (dot,) = equations(lambda x, y: x @ y, jnp.ones((3, 5)), jnp.ones((5, 7)))
    assert price(dot) == math.inf
    assert price(dot, 0.5) == 0.5 * 2 * 3 * 5 * 7 + 3 * 7 * 4 / 1024
    (empty,) = equations(lambda x, y: x @ y, jnp.ones((0, 5)), jnp.ones((5, 7)))
    assert price(empty, 0.5) == 0.0


def test_fusible_equations_cost_less_to_recompute_than_to_save() -> None:
    call = jax.jit(lambda x: jnp.sin(x) * 2)
    fused = equations(lambda x: jnp.sum(jnp.exp(x) + call(x).T, 0), jnp.ones((64, 64)))
    assert len(fused) == 5
    for eqn in fused:
        whole = sum(v.aval.size * 4 for v in (*eqn.invars, *eqn.outvars) if v.aval.shape)
        assert price(eqn) == price(eqn, 0.0) <= whole / 64


def test_a_slow_function_costs_a_quarter_of_saving_its_result() -> None:
    """On a CPU, recomputing four of them takes as long as saving a value, or longer."""
    slow = equations(lambda x: [jnp.exp(x), jax.jit(jnp.tanh)(x), 1 / x, x + 1, x @ x], X)
    without, priced = (Prices(slow).at(np.zeros(5), p) for p in (0.0, 0.25))
    np.testing.assert_array_equal(priced - without, [ONE / 4, ONE / 4, ONE / 4, 0, 0])
    for n, saved in ((1, 0), (3, 1)):
        chain = lambda w, x, n=n: jnp.sum(
            w * functools.reduce(lambda x, _: jnp.exp(1 / x), range(n), x)
        )
        table = xform.residuals(chain, X, X, argnums=0, policy=xform.policies.min_cut)
        assert [r.kind for r in table].count("kept") == saved


def test_all_prices_at_once_are_those_one_by_one() -> None:
    def f(x, key):
        y = jnp.sort(jnp.sin(x @ x), 0) + jax.random.normal(key, (6, 6))
        y = lax.scan(lambda c, _: (c @ c, jnp.sum(c)), y, None, length=2)[0]
        return jax.jit(lambda y: jnp.tanh(y @ y))(y), y[:0] @ y, jnp.sum(y.astype(jnp.int32))

    found = equations(f, jnp.ones((6, 6)), jax.random.key(0))
    prices = Prices(found)
    for flops in itertools.product((0.0, 1e-3, math.inf), repeat=2):
        each = np.resize(flops, len(found))
        want = [price(e, float(n)) for e, n in zip(found, each, strict=True)]
        np.testing.assert_array_equal(prices.at(each), want)
    assert Prices(()).at(np.zeros(0)).shape == (0,)


def test_a_statistic_of_a_row_is_saved() -> None:
    """It has 1/64 of the elements of its row, and recomputing it reads the whole row."""
    f = lambda x: jnp.sum(jnp.sin(x - jnp.mean(x * x, -1, keepdims=True)))
    for columns, saved in ((256, True), (8, False)):
        x = jax.ShapeDtypeStruct((16, columns), jnp.float32)
        table = xform.residuals(f, x, policy=xform.policies.min_cut)
        kept = [r.total_bytes for r in table if r.kind == "kept"]
        assert kept == ([16 * 4] if saved else [])
