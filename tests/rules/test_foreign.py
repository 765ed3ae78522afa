"""Rules that another library registered with JAX, in every form that JAX offers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import xform
from tests.reference import close
from xform.errors import MissingRule, NotDifferentiable
from xform.rules.foreign import foreign_primitives

pytestmark = pytest.mark.usefixtures("x64")


def primitive(name: str, f: Callable[..., Any], several: bool = False) -> Primitive:
    """Return a primitive that computes `f`, with everything except derivatives."""
    p = Primitive(name)
    p.multiple_results = several
    p.def_impl(f)
    p.def_abstract_eval(lambda *xs, **params: _types(f, xs, params))
    mlir.register_lowering(p, mlir.lower_fun(f, multiple_results=several))

    def batched(args: Any, axes: Any, **params: Any) -> Any:
        out = jax.vmap(lambda *xs: f(*xs, **params), in_axes=axes)(*args)
        return out, jax.tree.map(lambda _: 0, out)

    batching.primitive_batchers[p] = batched
    return p


def _types(f: Callable[..., Any], xs: Any, params: Any) -> Any:
    made = jax.make_jaxpr(lambda *a: f(*a, **params))(*xs).out_avals
    return made if isinstance(jax.eval_shape(lambda *a: f(*a, **params), *xs), list) else made[0]


twice_p = primitive("foreign_twice", lambda x: 2 * x)
ad.deflinear2(twice_p, lambda ct, x: [2 * ct])

thrice_p = primitive("foreign_thrice", lambda x, *, k: k * x)
ad.deflinear(thrice_p, lambda ct, *, k: [k * ct])

product_p = primitive("foreign_product", lambda x, y: x * y)
ad.defbilinear(
    product_p, lambda ct, x, y: product_p.bind(ct, y), lambda ct, x, y: product_p.bind(x, ct)
)

sine_p = primitive("sin", jnp.sin)  # another primitive with a name of JAX's
ad.defjvp(sine_p, lambda dx, x: dx * jnp.cos(x))

root_p = primitive("foreign_root", jnp.sqrt)
ad.defjvp2(root_p, lambda dx, y, x: dx / (2 * y))

first_p = primitive("foreign_first", lambda x, y: x * y)
ad.defjvp(first_p, lambda dx, x, y: dx * y, None)  # y is constant

step_p = primitive("foreign_step", lambda x: jnp.floor(x))
ad.primitive_jvps[step_p] = lambda xs, dxs: (step_p.bind(*xs), ad.Zero(jax.typeof(xs[0])))

split_p = primitive("foreign_split", lambda x, n: [jnp.sin(x), x * x, n + 1], several=True)


def _split_jvp(xs: Any, dxs: Any) -> Any:
    (x, n), (dx, _) = xs, dxs
    if isinstance(dx, ad.Zero):
        return split_p.bind(x, n), [ad.Zero(jax.typeof(x)), ad.Zero(jax.typeof(x)), dxs[1]]
    return split_p.bind(x, n), [dx * jnp.cos(x), 2 * x * dx, dxs[1]]


ad.primitive_jvps[split_p] = _split_jvp

FORMS: dict[str, Callable[[Any], Any]] = {
    "deflinear2": lambda x: twice_p.bind(x),
    "deflinear": lambda x: thrice_p.bind(x, k=3.0),
    "defbilinear": lambda x: product_p.bind(x, jnp.cos(x)),
    "both sides": lambda x: product_p.bind(x, x),
    "one side": lambda x: product_p.bind(x, jnp.full_like(x, 3.0)),
    "defjvp": lambda x: sine_p.bind(x),
    "defjvp2": lambda x: root_p.bind(x),
    "a constant side": lambda x: first_p.bind(x, x),
    "zero": lambda x: step_p.bind(x) * x,
    "several results": lambda x: sum(split_p.bind(x, jnp.int32(3))[:2]),
    "one result of several": lambda x: split_p.bind(x, jnp.int32(3))[1],
    "one after the other": lambda x: sine_p.bind(product_p.bind(twice_p.bind(x), root_p.bind(x))),
    "in a scan": lambda x: lax.scan(lambda c, _: (product_p.bind(c, x), c), x, None, 3)[1],
    "in a branch": lambda x: lax.cond(x.sum() > 0, twice_p.bind, sine_p.bind, x),
    "in a jit": lambda x: jax.jit(lambda x: product_p.bind(x, sine_p.bind(x)))(x),
    "in a region": lambda x: xform.checkpoint(lambda x: product_p.bind(x, sine_p.bind(x)))(x),
}  # fmt: skip
X = np.array([0.3, 1.2, 2.1])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("jitted", [False, True])
def test_derivatives_of_registered_primitives_match_jax(form: str, jitted: bool) -> None:
    f, how = FORMS[form], jax.jit if jitted else (lambda f: f)

    def every(lib: Any, x: jax.Array) -> Any:
        y, pull = lib.vjp(f, x)
        line = lib.linearize(f, x)[1]
        scalar = lambda x: jnp.sum(jnp.sin(f(x)))
        second = lib.grad(lambda x: jnp.vdot(lib.grad(scalar)(x), x))(x)
        mixed = lib.jvp(lib.grad(scalar), (x,), (x,))[1]
        return lib.jvp(f, (x,), (x,)), y, pull(jnp.ones_like(y)), line(x), second, mixed

    close(
        how(lambda x: every(xform, x))(jnp.asarray(X)), how(lambda x: every(jax, x))(jnp.asarray(X))
    )


def test_vmap_of_it() -> None:
    xs = jnp.stack([X, 2 * X])
    for form in ("defbilinear", "several results", "one after the other"):
        g = lambda lib: jax.vmap(lib.grad(lambda x: FORMS[form](x).sum()))  # noqa: B023
        np.testing.assert_allclose(g(xform)(xs), g(jax)(xs), rtol=1e-6)


def test_linear_transpose_of_registered_linear_primitives_matches_jax() -> None:
    f = lambda x: product_p.bind(jnp.full_like(x, 3.0), twice_p.bind(x))
    got = xform.linear_transpose(f, X)(jnp.ones(3))
    np.testing.assert_allclose(got[0], jax.linear_transpose(f, X)(jnp.ones(3))[0])


def test_a_rule_of_ours_comes_first() -> None:
    p = primitive("foreign_then_ours", lambda x: 5 * x)
    ad.deflinear2(p, lambda ct, x: [5 * ct])
    assert float(xform.grad(p.bind)(1.0)) == 5.0
    xform.extend.linear(p, lambda ct, x: 7 * ct)
    assert float(xform.grad(p.bind)(1.0)) == 7.0


def test_a_rule_that_comes_late_is_found() -> None:
    p = primitive("foreign_and_late", lambda x: 5 * x)
    with pytest.raises(MissingRule):
        xform.grad(p.bind)(1.0)
    ad.deflinear2(p, lambda ct, x: [5 * ct])
    assert float(xform.grad(p.bind)(1.0)) == 5.0


def test_grad_of_a_primitive_without_a_transpose_names_the_missing_rule() -> None:
    p = primitive("foreign_and_forward_only", lambda x: 5 * x)
    ad.primitive_jvps[p] = lambda xs, dxs: (p.bind(*xs), p.bind(*dxs))
    assert float(xform.jvp(p.bind, (1.0,), (1.0,))[1]) == 5.0
    with pytest.raises(NotDifferentiable, match="primitive_transposes"):
        xform.grad(p.bind)(1.0)


def test_jaxs_own_are_not_among_them() -> None:
    found = foreign_primitives()
    assert {twice_p, split_p, sine_p} <= set(found)
    assert not [p for p in found if p in xform.extend.RULES or p is lax.sin_p]


def test_a_rule_is_given_tuples_as_jax_gives_them() -> None:
    p = primitive("foreign_and_picky", lambda x, y: x * y)

    def rule(xs, dxs, **params):
        assert isinstance(xs, tuple)
        assert isinstance(dxs, tuple)
        return p.bind(*xs), xs[1] * dxs[0]

    ad.primitive_jvps[p] = rule
    assert float(xform.grad(lambda x: p.bind(x, 3.0))(1.0)) == 3.0


def test_linear_transpose_needs_only_the_transpose_rule() -> None:
    """The derivative's linear part is not used, because a library need not provide one."""
    p = primitive("foreign_and_linear", lambda x: 5 * x)
    ad.primitive_transposes[p] = lambda ct, x: [5 * ct]
    (got,) = xform.linear_transpose(p.bind, 1.0)(2.0)
    assert float(got) == 10.0
