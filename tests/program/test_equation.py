"""The context of an operation: its derivative runs where 64-bit dtypes are as they were."""

import collections
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from xform._jax import jaxpr_and_consts, jaxprs_of
from xform.testing import Case

FAMILIES = sorted(path.stem for path in Path("tests/rules").glob("cases/[a-z]*.py"))
CASES = [c for f in FAMILIES for c in importlib.import_module(f"tests.rules.cases.{f}").CASES]
# One primitive for each kind of rule, and those whose rules make constants or call `lax`.
QUICK = {"sin", "integer_pow", "tanh", "erf", "reduce_max", "reduce_prod", "cumsum", "sort",
         "gather", "scatter", "scatter_mul", "dot_general", "conv_general_dilated", "cholesky",
         "triangular_solve", "fft", "reduce_window_max", "select_n", "pow", "pad"}  # fmt: skip
WIDER = {"float32": "float64", "complex64": "complex128"}


def wide(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return `f`, which runs in 64 bits, as a function of 32-bit arrays."""

    def cast(x: Any, dtypes: dict[str, str]) -> Any:
        dtype = dtypes.get(str(jax.typeof(x).dtype))
        return lax.convert_element_type(x, dtype) if dtype else x

    def region(*args: Any) -> Any:
        with jax.enable_x64(True):
            ys = f(*[cast(x, WIDER) for x in args])
            return jax.tree.map(lambda y: cast(y, {v: k for k, v in WIDER.items()}), ys)

    return region


def narrow(x: Any) -> Any:
    """Return an argument of a case in 32 bits."""
    dtype = {v: k for k, v in WIDER.items()}.get(str(np.asarray(x).dtype))
    return np.asarray(x, dtype) if dtype else x


def pulled(f: Callable[..., Any], *args: Any) -> Any:
    """Return the pullback of `f` at ones."""
    y, pull = xform.vjp(f, *args)
    is_float = lambda y: jnp.issubdtype(y.dtype, np.inexact)
    one = lambda y: jnp.ones_like(y) if is_float(y) else np.zeros(y.shape, jax.dtypes.float0)
    return pull(jax.tree.map(one, y))


DERIVATIVES: dict[str, Callable[..., Any]] = {
    "pull": pulled,
    "push": lambda f, *args: xform.jvp(f, args, args),
    "linearize": lambda f, *args: xform.linearize(f, *args)[1](*args),
}


def check_same_program(f: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Check that the derivatives of `f` are the same programs with and without 64 bits outside."""
    floats = [i for i, x in enumerate(args) if jnp.issubdtype(jax.typeof(x).dtype, np.inexact)]

    def of_floats(*xs: Any) -> Any:
        given = dict(zip(floats, xs, strict=True))
        return f(*[given.get(i, x) for i, x in enumerate(args)])

    for derivative in DERIVATIVES.values():
        program = lambda *xs, d=derivative: d(of_floats, *xs)
        texts = []
        for outside in (False, True):
            with jax.enable_x64(outside):
                texts.append(str(jax.make_jaxpr(program)(*[args[i] for i in floats])))
        narrow_text, wide_text = (re.sub(r"0x[0-9a-f]+", "", text) for text in texts)
        assert narrow_text == wide_text


slow = pytest.mark.slow
by_case = [pytest.param(c, id=c.id, marks=[] if c.id in QUICK else slow) for c in CASES]


@pytest.mark.parametrize("case", by_case)
def test_a_rule_runs_in_64_bits_if_its_operation_did(case: Case) -> None:
    check_same_program(wide(case.fun), tuple(map(narrow, case.args)))


@jax.custom_vjp
def doubled(x: Any) -> Any:
    return 2 * x


doubled.defvjp(lambda x: (2 * x, ()), lambda _, ct: (2 * ct,))
inner = wide(lambda x: jnp.sin(x) * 0.3 + x**2)
STRUCTURES: dict[str, Callable[[Any], Any]] = {
    "scan": lambda x: lax.scan(lambda c, a: (inner(c), c * a), x, x)[1],
    "scan of wide values": wide(lambda x: lax.scan(lambda c, a: (jnp.sin(c * a), c), x, x)[1]),
    "cond": lambda x: lax.cond(x[0] > 0, inner, lambda x: x, x),
    "while": lambda x: lax.while_loop(lambda c: c[1] < 3, lambda c: (inner(c[0]), c[1] + 1),
                                      (x, np.int32(0)))[0],
    "jit": lambda x: jax.jit(wide(jax.jit(jnp.tanh)))(x) * inner(x),
    "remat": xform.checkpoint(lambda x: inner(jnp.sin(x))),
    "remat in the region": wide(jax.checkpoint(lambda x: jnp.sin(jnp.cos(x)))),
    "vmap": jax.vmap(inner),
    "custom_vjp": wide(doubled),
    "constants": wide(lambda x: x * np.arange(3.0) + jnp.arange(3.0) * 2.5),
    "several regions": lambda x: inner(inner(x) * x) + wide(jnp.tanh)(x),
}  # fmt: skip


@pytest.mark.parametrize("name", STRUCTURES)
def test_regions_of_64_bits_in_loops_branches_and_calls(name: str) -> None:
    f, x = STRUCTURES[name], np.array([0.5, 1.0, 2.0], np.float32)
    if name == "custom_vjp":  # it has no forward mode
        text = [str(jax.make_jaxpr(lambda x: pulled(f, x))(x))]
        with jax.enable_x64(True):
            text.append(str(jax.make_jaxpr(lambda x: pulled(f, x))(x)))
        assert text[0] == text[1]
    else:
        check_same_program(f, (x,))


@pytest.mark.parametrize("t", ["jvp", "vjp", "linearize", "jacfwd", "jacrev", "hessian"])
def test_outside_jit_the_numbers_are_those_of_64_bits(t: str) -> None:
    """The region is a difference of large numbers, so 32 bits would lose all digits."""
    close = wide(lambda x: (x**3 + 1e9) - 1e9)
    f = lambda x: jnp.sum(close(jnp.sin(x)) * x)
    x = np.array([0.5, 1.0], np.float32)
    run = {
        "jvp": lambda m: m.jvp(f, (x,), (x,)),
        "vjp": lambda m: m.vjp(f, x)[1](np.float32(1)),
        "linearize": lambda m: m.linearize(f, x)[1](x),
    }.get(t, lambda m: getattr(m, t)(f)(x))
    got = run(xform)
    with jax.enable_x64(True):
        want = run(jax)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_64_bit_value_may_leave_its_region() -> None:
    """Operations outside the region then read and return 64-bit values, as in JAX."""
    with jax.enable_x64(True):
        x = jnp.array([0.5, 2.0])
    f = lambda x: lax.reduce_sum(lax.integer_pow(x, 3) * lax.tanh(x), (0,))
    got = [xform.grad(f)(x), jax.jit(xform.grad(f))(x), xform.jvp(f, (x,), (x,))[1]]
    with jax.enable_x64(True):
        want = [jax.grad(f)(x), jax.grad(f)(x), jax.jvp(f, (x,), (x,))[1]]
    for a, b in zip(got, want, strict=True):
        assert a.dtype == np.float64
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-14)


def precisions(f: Callable[..., Any], *args: Any) -> collections.Counter[str]:
    """Return how many products of a program have which precision."""
    found: collections.Counter[str] = collections.Counter()

    def visit(jaxpr: Any) -> None:
        for eqn in jaxpr_and_consts(jaxpr)[0].eqns:
            if "precision" in eqn.params:
                found[f"{eqn.primitive} {eqn.params['precision']}"] += 1
            for inside in jaxprs_of(eqn):
                visit(inside)

    visit(jax.make_jaxpr(f)(*args))
    return found


W = np.array([[0.3, 0.1], [-0.5, 0.4]], np.float32)
layer = lambda x: jnp.tanh(W @ x)
PRODUCTS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda x: layer(layer(x)),
    "convolution": lambda x: jnp.convolve(layer(x), x),
    "scan": lambda x: lax.scan(lambda c, _: (layer(c), None), x, length=2)[0],
    "jit": lambda x: jax.jit(layer)(layer(x)),
    "remat": jax.checkpoint(lambda x: layer(layer(x))),
    "with a precision": lambda x: layer(jnp.matmul(W, x, precision="high")),
}


@pytest.mark.parametrize("around", ["the pullback", "the function", "both"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_have_the_precision_that_is_set_at_the_pullback(name: str, around: str) -> None:
    def pull(m: Any) -> Callable[..., Any]:
        def run(x: Any) -> Any:
            with jax.default_matmul_precision(None if around == "the pullback" else "highest"):
                y, pull = m.vjp(PRODUCTS[name], x)
            with jax.default_matmul_precision(None if around == "the function" else "highest"):
                return pull(y)

        return run

    x = np.ones(2, np.float32)
    assert precisions(pull(xform), x) == precisions(pull(jax), x)
