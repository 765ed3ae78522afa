"""Functions with user rules: the arguments of their rules, and the values for absent cotangents."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive

import xform
from tests.reference import close
from xform.errors import NotDifferentiable, WrongCotangent

WAYS: dict[str, Callable[..., Any]] = {"alone": lambda f: f, "jitted": jax.jit}


def scaled() -> tuple[Any, Any]:
    """Return a product whose rule gives its scale cotangent 7, and a sum whose rule gives None."""

    @jax.custom_vjp
    def a(x, s):
        return x * s, s

    a.defvjp(lambda x, s: (a(x, s), s), lambda s, cts: (cts[0] * s, jnp.full_like(s, 7.0)))

    @jax.custom_vjp
    def b(y, s):
        return y + s

    b.defvjp(lambda y, s: (b(y, s), None), lambda _, ct: (None, None))
    return a, b


@pytest.mark.parametrize("way", WAYS)
def test_none_of_one_rule_asks_the_rule_before(way: str) -> None:
    a, b = scaled()
    between = {
        "nothing": lambda y, s: b(y, s),
        "a product": lambda y, s: b(jnp.sin(y) * 2, jnp.reshape(s, (1,))[0]),
        "what would be NaN": lambda y, s: b(jnp.exp(y + 1e5), s),
        "another use": lambda y, s: b(y, s) + 3 * y,
        "two in a row": lambda y, s: b(*a(b(y, s), s)),
    }
    for then in between.values():
        f = lambda x, s, then=then: then(*a(x, s))
        got = WAYS[way](xform.grad(f, (0, 1)))(1.0, 2.0)
        close(got, WAYS[way](jax.grad(f, (0, 1)))(1.0, 2.0), 1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_custom_vjp_behind_stop_gradient_adds_no_cotangent(way: str) -> None:
    a, _ = scaled()
    f = lambda x, s: jax.lax.stop_gradient(a(x, s)[0]) + x
    got = WAYS[way](xform.grad(f, (0, 1)))(1.0, 2.0)
    close(got, WAYS[way](jax.grad(f, (0, 1)))(1.0, 2.0))
    assert float(got[1]) == 0.0


@pytest.mark.parametrize("way", WAYS)
def test_a_residual_that_is_a_number_is_an_array(way: str) -> None:
    f = jax.custom_vjp(lambda x: 3 * x)
    f.defvjp(
        lambda x: (3 * x, (3.0, 2, np.float32(1.0), True)),
        lambda r, ct: (ct * r[0].astype(ct.dtype) * r[1].astype(ct.dtype) * r[2].astype(ct.dtype),),
    )
    assert float(WAYS[way](xform.grad(f))(1.0)) == 6.0


@pytest.mark.parametrize("way", WAYS)
def test_linearize_of_custom_vjp_raises_only_when_the_map_is_called(way: str) -> None:
    f = jax.custom_vjp(jnp.sin)
    f.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.cos(x),))
    y = WAYS[way](lambda x: xform.linearize(lambda x: 2 * f(x), x)[0])(0.5)
    np.testing.assert_allclose(y, 2 * np.sin(0.5), rtol=1e-6)
    dead = WAYS[way](lambda x: xform.linearize(lambda x: (f(x), 2 * x)[1], x)[1](1.0))(0.5)
    assert float(dead) == 2.0
    called = WAYS[way](lambda x: xform.linearize(f, x)[1](1.0))
    several = WAYS[way](lambda x: jax.vmap(xform.linearize(f, x)[1])(jnp.ones(3)))
    again = WAYS[way](lambda x: xform.jvp(xform.linearize(f, x)[1], (1.0,), (1.0,)))
    for map_ in (called, several, again):
        with pytest.raises(NotDifferentiable, match="forward-mode autodiff") as caught:
            map_(0.5)
        assert "test_custom.py" in caught.value.where


MAPS: dict[str, Callable[[Any], Any]] = {
    "a call": lambda f: f,
    "a scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, 2)[0],
    "a region": jax.checkpoint,
    "a jit": jax.jit,
    "a vmap": lambda f: lambda x: jnp.sum(jax.vmap(f)(jnp.stack([x, 2 * x]))),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("inside", MAPS)
def test_linear_transpose_of_linearized_custom_vjp_uses_its_rule(inside: str, way: str) -> None:
    """As in JAX. A second derivative needs a first one."""
    f = jax.custom_vjp(jnp.sin)
    f.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (3 * ct * jnp.cos(x),))
    g = MAPS[inside](f)

    def turned(t: Any, x: Any) -> Any:
        return t.linear_transpose(t.linearize(g, x)[1], x)(2.0)[0]

    got, wanted = WAYS[way](lambda x: turned(xform, x))(0.5), turned(jax, 0.5)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    xs = jnp.array([0.5, 1.0])
    several = jax.vmap(WAYS[way](lambda x: turned(xform, x)))(xs)
    np.testing.assert_allclose(several, [turned(jax, x) for x in xs], rtol=1e-6)
    with pytest.raises(NotDifferentiable, match="forward-mode autodiff"):
        xform.grad(WAYS[way](lambda x: xform.linearize(g, x)[1](1.0)))(0.5)


@pytest.mark.parametrize("way", WAYS)
def test_a_rule_in_a_loop_while_jax_checks_its_equations(way: str) -> None:
    f = jax.custom_jvp(lambda x: 3 * x)
    f.defjvp(lambda xs, dxs: (f(*xs), 2 * dxs[0]))
    loop = lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0]
    with jax.enable_checks(True):
        assert float(WAYS[way](xform.grad(loop))(3.0)) == 4.0


@pytest.mark.parametrize("way", WAYS)
def test_an_unused_output_that_examples_share_has_no_cotangent(way: str) -> None:
    """JAX 0.12 refuses a cotangent of an output that all examples of a batch share."""
    f = jax.custom_vjp(lambda x, y: (2.0, x * y))
    f.defvjp(lambda x, y: ((2.0, x * y), (x, y)),
             lambda kept, cts: (kept[1] * cts[1] + cts[0], kept[0] * cts[1]))  # fmt: skip
    loss = lambda x, ys: jnp.sum(jax.vmap(lambda y: f(x, y)[1])(ys))
    got = WAYS[way](xform.grad(loss, (0, 1)))(3.0, jnp.arange(3.0))
    close(got, jax.grad(loss, (0, 1))(3.0, jnp.arange(3.0)))


def test_a_rule_in_a_jitted_function_runs_once_for_each_call_in_it() -> None:
    f = jax.custom_jvp(lambda x, y: (x * y, y))
    seen: list[Any] = []

    def rule(primals, tangents):
        (x, y), (_, dy) = primals, tangents
        seen.append(dy)
        return (x * y, y), (dy if isinstance(dy, SymbolicZero) else x * dy, dy)

    f.defjvp(rule, symbolic_zeros=True)
    both = jax.jit(lambda x: (f(x, 2.0)[0] + f(x, x)[0], x))
    g = lambda x: both(x)[0]
    for way in (xform.grad(g), jax.jit(xform.grad(g)), lambda x: xform.jvp(g, (x,), (x,))):
        way(3.0)
    assert len(seen) == 2
    assert float(xform.grad(g)(3.0)) == float(jax.grad(g)(3.0)) == 3.0


def test_a_python_number_comes_back_as_one() -> None:
    y, dy = xform.jvp(lambda x: x, (3.0,), (1.0,))
    assert (type(y), float(dy)) == (float, 1.0)
    assert type(xform.value_and_grad(lambda x: x)(3.0)[0]) is float


def test_a_dtype_with_an_addition_of_its_own() -> None:
    """Flax's scales of 8-bit floats: if one is used twice, its cotangents combine by a maximum."""

    def once(x, scale, history):
        return fp8_ops.in_qdq(jnp.float32, jnp.float8_e4m3fn, x, scale, history)

    def twice(x, *scales):
        return jnp.sum(once(x, *scales) * once(3 * x, *scales))

    def looped(x, *scales):
        step = lambda c, _: (once(1.5 * c, *scales), None)
        return jnp.sum(jax.lax.scan(step, x, None, length=3)[0])

    x, scales = jnp.linspace(-2, 3, 8), (jnp.ones(1), jnp.zeros(4))
    for f in (twice, looped):
        meta = lambda x, *s, f=f: f(x, *[jax.lax.convert_element_type(v, fp8_ops.fm32) for v in s])
        got = jax.jit(xform.grad(meta, (0, 1, 2)))(x, *scales)
        close(got, jax.jit(jax.grad(meta, (0, 1, 2)))(x, *scales), 1e-6)
        assert float(got[2][0]) > 5


@pytest.mark.parametrize("f", [jax.lax.abs, jax.lax.sign, jax.lax.erf_inv, jax.nn.relu])
def test_a_python_number_may_be_the_point(f: Callable[..., Any]) -> None:
    close(xform.jvp(f, (0.6,), (1.0,)), jax.jvp(f, (0.6,), (1.0,)), 1e-6)
    close(xform.grad(f)(0.6), jax.grad(f)(0.6), 1e-6)


FLOATS = [jnp.float32, jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2]
# Possible results of a backward function for a float32, besides a cotangent of its type.
RETURNED: dict[str, Any] = {
    **{jnp.dtype(d).name: jnp.asarray(np.ones(2, d)) for d in FLOATS},
    "NumPy's in 64 bits": np.ones(2),
    "a list": [1.0, 1.0],
    "a truth value": np.ones(2, bool),
    "an integer": np.ones(2, np.int32),
    "a complex number": jnp.ones(2, jnp.complex64),
    "another shape": jnp.ones(3),
    "a scalar": jnp.ones(()),
    "a number": 1.0,
}


def returning(made: Any) -> Callable[..., Any]:
    """Return a function that doubles its argument, with a backward function that returns `made`."""
    f = jax.custom_vjp(lambda x: x * 2)
    f.defvjp(lambda x: (x * 2, None), lambda _, ct: (made,))
    return f


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", FLOATS[:3])
@pytest.mark.parametrize("name", RETURNED)
def test_a_backward_function_may_return_any_float(name: str, dtype: Any, way: str) -> None:
    """As in JAX. JAX also accepts everything else of the same shape; here that is an error."""
    x = jnp.ones(2, dtype)
    g = lambda t: WAYS[way](lambda: t.vjp(returning(RETURNED[name]), x)[1](x)[0])()
    if name in [jnp.dtype(d).name for d in FLOATS] or name.startswith("NumPy"):
        close(g(xform), g(jax))
    else:
        with pytest.raises((ValueError, TypeError)):
            g(xform)


def test_a_number_is_handed_on_as_one() -> None:
    """Outside of jit, a Python tangent or cotangent reaches a user's rules unchanged."""
    seen: list[type] = []

    @jax.custom_vjp
    def back(x):
        return x

    back.defvjp(lambda x: (x, None), lambda _, ct: (seen.append(type(ct)), (ct,))[1])

    @jax.custom_jvp
    def forth(x):
        return x

    forth.defjvp(lambda x, dx: (seen.append(type(dx[0])), (x[0], dx[0]))[1])
    for t in (jax, xform):
        seen.clear()
        given = (
            t.vjp(back, 2.0)[1](3.0)[0],
            t.vjp(lambda x: x, 2.0)[1](3.0)[0],
            *t.jvp(forth, (2.0,), (3.0,)),
            *t.jvp(lambda x: x, (2j,), (3j,)),
        )
        assert seen == [float, float]
        assert given == (3.0, 3.0, 2.0, 3.0, 2j, 3j)
        assert [type(x) for x in given] == [float] * 4 + [complex] * 2
        assert isinstance(t.vjp(lambda x: back(x) * 2.0, 2.0)[1](3.0)[0], jax.Array)
        assert isinstance(t.jvp(lambda x: x * 2.0, (2.0,), (3.0,))[1], jax.Array)


@pytest.mark.parametrize("way", WAYS)
def test_cotangent_dtype_mismatch_in_scan_while_and_cond_raises(way: str) -> None:
    f = jax.custom_vjp(lambda x: 2 * x)
    f.defvjp(lambda x: (2 * x, None), lambda _, ct: (2 * ct.astype(jnp.float32),))
    programs = [
        ("scan", lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0]),
        ("while", lambda x: jax.lax.while_loop(lambda c: c.sum() < 5, f, x)),
        ("cond", lambda x: jax.lax.cond(x.sum() > 0, f, jnp.sin, x)),
        ("cond", lambda x: jax.lax.cond(x.sum() > 0, lambda: x, lambda: f(x))),
        ("cond", lambda x: jax.lax.switch(x.sum().astype(int), [jnp.ones_like, jnp.sin, f], x)),
    ]
    for name, program in programs:
        loss = lambda x, p=program: p(x).astype(jnp.float32).sum()
        text = rf"(?s)pullback of {name}.*dtype float32 for .*bfloat16\[3\].*ct.astype\(bfloat16\)"
        with pytest.raises(WrongCotangent, match=text):
            WAYS[way](xform.grad(loss))(jnp.ones(3, jnp.bfloat16))


@pytest.mark.parametrize("way", WAYS)
def test_branches_may_return_the_same_other_dtype(way: str) -> None:
    f = jax.custom_vjp(lambda x: 2 * x)
    f.defvjp(lambda x: (2 * x, None), lambda _, ct: (2 * ct.astype(jnp.float32),))
    loss = lambda x: jax.lax.cond(x.sum() > 0, f, f, x).astype(jnp.float32).sum()
    for lib in (jax, xform):
        given = WAYS[way](lib.grad(loss))(jnp.ones(3, jnp.bfloat16))
        assert given.dtype == jnp.float32
        np.testing.assert_array_equal(given, 2.0)


@pytest.mark.parametrize("way", WAYS)
def test_other_operations_pass_on_a_cotangent_of_another_dtype(way: str) -> None:
    """As in JAX: moves of elements, products with a constant, and programs around the rule."""
    f = jax.custom_vjp(lambda x: 2 * x)
    f.defvjp(lambda x: (2 * x, None), lambda _, ct: ((2 * ct).astype(jnp.float16),))
    product = lambda x: x @ jnp.ones((2, 2))
    for g in [
        lambda x: f(x.reshape(6)),
        lambda x: f(x.sum(0)),
        lambda x: jax.jit(f)(x.reshape(6)),
        lambda x: jax.jit(f)(product(x)),
        lambda x: jax.checkpoint(f)(product(x)),
        lambda x: jax.lax.scan(lambda c, y: (c, f(y)), 0.0, product(x))[1],
    ]:
        loss = lambda x, g=g: jnp.sum(g(x).astype(jnp.float32))
        expected, given = (WAYS[way](lib.grad(loss))(jnp.ones((3, 2))) for lib in (jax, xform))
        assert given.dtype == expected.dtype
        np.testing.assert_array_equal(given, expected)


def test_a_rule_that_changes_the_dtype_itself_is_refused() -> None:
    halve_p = Primitive("halve")
    halve_p.def_impl(lambda x: x / 2)
    halve_p.def_abstract_eval(lambda x: x)
    xform.extend.linear(halve_p, lambda ct, x: (ct / 2).astype(jnp.float16))
    with pytest.raises(WrongCotangent, match=r"(?s)pullback of halve.*float16\[3\].*float32\[3\]"):
        xform.grad(lambda x: jnp.sum(halve_p.bind(x)))(jnp.ones(3))


def watched() -> tuple[Any, Any]:
    """A function that writes the sum of its cotangent to a reference, a way to log gradients."""

    @jax.custom_vjp
    def watch(x, log):
        return x

    def back(log, ct):
        log[:] = jnp.roll(log[:], 1).at[0].set(ct.sum())
        return ct, None

    watch.defvjp(lambda x, log: (x, log), back)
    return watch, jax.new_ref(jnp.zeros(4))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda lib, f: lib.grad(f),
        lambda lib, f: lib.grad(jax.jit(f)),
        lambda lib, f: jax.jit(lib.grad(f)),
        lambda lib, f: lambda x: lib.vjp(f, x)[1](1.0)[0],
    ],
)
def test_a_rule_writes_its_cotangent_to_a_reference(wrap: Callable[..., Any]) -> None:
    results = []
    for lib in (jax, xform):
        watch, log = watched()
        got = wrap(lib, lambda x, w=watch, r=log: w(jnp.sin(x), r).sum())(jnp.arange(3.0))
        results.append((got, log[...]))
    close(results[1], results[0])


# Transforms of a function whose jvp rule pushes through a `custom_vjp`.
REVERSE = {
    "grad": lambda lib, f: lib.grad(f),
    "vjp": lambda lib, f: lambda x: lib.vjp(f, x)[1](1.0),
    "transpose": lambda lib, f: lambda x: lib.linear_transpose(lib.linearize(f, x)[1], x)(1.0),
    "order 2": lambda lib, f: lib.grad(lib.grad(f)),
    "scan": lambda lib, f: lib.grad(lambda x: lax.scan(lambda c, _: (f(c), None), x, None, 3)[0]),
    "vmap": lambda lib, f: lambda x: jax.vmap(lib.grad(f))(x * jnp.arange(3.0)),
    "checkpoint": lambda lib, f: lib.grad(lib.checkpoint(f)),
    "jacrev": lambda lib, f: lib.jacrev(lambda x: f(x * jnp.arange(2.0))),
}


@pytest.mark.parametrize("way", REVERSE)
@pytest.mark.parametrize("inner", ["plain", "jitted"])
@pytest.mark.parametrize("pushed_by", ["own", "jax"])
def test_a_jvp_rule_may_push_through_a_custom_vjp(way: str, inner: str, pushed_by: str) -> None:
    """Nobody evaluates the tangents: reverse mode transposes them, which is the user's rule."""
    sine = jax.custom_vjp(jnp.sin)
    sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.cos(x) * 2,))
    g = jax.jit(sine) if inner == "jitted" else sine

    def rule_of(lib):
        f = jax.custom_jvp(lambda x: g(x))
        f.defjvp(lambda xs, dxs: (lib if pushed_by == "own" else jax).jvp(g, xs, dxs))
        return f

    results = [REVERSE[way](lib, rule_of(lib)) for lib in (xform, jax)]
    close(results[0](2.0), results[1](2.0))
    close(jax.jit(results[0])(2.0), results[1](2.0))
    with pytest.raises(NotDifferentiable if pushed_by == "own" else TypeError):
        xform.jvp(rule_of(xform), (2.0,), (1.0,))
