"""Objects of `jax.experimental.hijax` with their own derivatives, and JAX's newer regions."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import hijax

import xform
from xform._jax.operation_objects import HiPrim, NullAccum, ValAccum
from xform.errors import NotDifferentiable, UnsupportedParam, WrongCotangent, WrongTangent

NEWER = pytest.mark.skipif(not hasattr(hijax, "HiPrim"), reason="of JAX since 0.11")
X = jnp.array([0.5, -1.5, 2.0])


class Op(HiPrim):
    """`sin(x) * y` of two arrays and an ignored integer; subclasses define the rules."""

    def __init__(self, x: Any, y: Any, n: Any):
        self.in_avals = ((jax.typeof(x), {"y": jax.typeof(y)}), jax.typeof(n))
        self.out_aval = {"a": jax.typeof(x), "b": jax.typeof(x)}
        self.params: dict[str, Any] = {}
        super().__init__()

    def expand(self, xy: Any, n: Any) -> Any:
        x, y = xy[0], xy[1]["y"]
        return {"a": jnp.sin(x) * y, "b": jnp.exp(x) + 0 * n.astype(x.dtype)}


def partials(x: Any, y: Any) -> Any:
    """Return the derivatives of `a` by x and y, and of `b` by x."""
    return jnp.cos(x) * y, jnp.sin(x), jnp.exp(x)


def filled(t: Any, x: Any) -> Any:
    return jnp.zeros_like(x) if t is None or isinstance(t, hijax.Zero) else t


class Accumulates(Op):
    def vjp_fwd(self, on: Any, xy: Any, n: Any) -> Any:
        assert all(isinstance(flag, bool) for flag in jax.tree.leaves(on))
        return self(xy, n), (xy[0], xy[1]["y"])

    def vjp_bwd(self, held: Any, ct: Any, xy: Any, n: Any) -> None:
        x, y = held
        da, dy, db = partials(x, y)
        assert isinstance(n, NullAccum)
        for acc, terms in ((xy[0], ((ct["a"], da), (ct["b"], db))), (xy[1]["y"], ((ct["a"], dy),))):
            if isinstance(acc, ValAccum):
                for c, d in terms:
                    acc.accum(filled(c, x) * d)


class Returns(Accumulates):
    vjp_bwd = HiPrim.vjp_bwd

    def vjp_bwd_retval(self, held: Any, ct: Any) -> Any:
        x, y = held
        da, dy, db = partials(x, y)
        a, b = filled(ct["a"], x), filled(ct["b"], x)
        return (a * da + b * db, {"y": a * dy}), None


class Pushes(Op):
    def jvp(self, primals: Any, tangents: Any) -> Any:
        (x, rest), n = primals
        y, ((dx, drest), _) = rest["y"], tangents
        da, dy, db = partials(x, y)
        dx, dy_ = filled(dx, x), filled(drest["y"], x)
        return self((x, rest), n), {"a": dx * da + dy_ * dy, "b": dx * db}


class Linearizes(Op):
    def lin(self, on: Any, xy: Any, n: Any) -> Any:
        return self(xy, n), partials(xy[0], xy[1]["y"])

    def linearized(self, held: Any, dxy: Any, dn: Any) -> Any:
        da, dy, db = held
        dx, dy_ = filled(dxy[0], da), filled(dxy[1]["y"], da)
        return {"a": dx * da + dy_ * dy, "b": dx * db}


RULES = [Accumulates, Returns, Pushes, Linearizes]
if hasattr(hijax, "HiPrim"):

    class Structures(Accumulates):
        """Its residuals have two parts; the second has a structure of its own."""

        def vjp_fwd(self, on: Any, xy: Any, n: Any) -> Any:
            return self(xy, n), xy[0], True, {"y": xy[1]["y"]}

        def vjp_bwd(self, x: Any, structured: Any, ct: Any, *accs: Any) -> None:
            return super().vjp_bwd((x, structured["y"]), ct, *accs)

    class DerivesFromJvp(Pushes):
        vjp_fwd, vjp_bwd_retval = hijax.vjp_from_jvp
        lin, linearized = hijax.linearize_from_jvp

    class DerivesFromLin(Linearizes):
        vjp_fwd, vjp_bwd_retval = hijax.vjp_from_lin
        jvp = hijax.jvp_from_lin

    RULES += [Structures, DerivesFromJvp, DerivesFromLin]


def loss(kind: type[Op]) -> Any:
    def f(x: Any, y: Any) -> Any:
        n = jnp.arange(3)
        out = kind(x, y, n)((x, {"y": y}), n)
        return jnp.sum(out["a"] ** 2) + jnp.sum(out["b"])

    return f


def plain(x: Any, y: Any) -> Any:
    return jnp.sum((jnp.sin(x) * y) ** 2) + jnp.sum(jnp.exp(x))


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("compiled", [False, True])
def test_an_object_is_differentiated_by_its_own_rules(kind: type[Op], compiled: bool) -> None:
    f = loss(kind)
    wrap = jax.jit if compiled else lambda g: g
    for argnums in (0, 1, (0, 1)):
        got, want = wrap(xform.grad(f, argnums))(X, 2 * X), jax.grad(plain, argnums)(X, 2 * X)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)
    in_loop = lambda x: jax.lax.scan(lambda c, _: (c + f(x, c), None), x, None, length=2)[0].sum()
    same = lambda x: jax.lax.scan(lambda c, _: (c + plain(x, c), None), x, None, length=2)[0].sum()
    np.testing.assert_allclose(wrap(xform.grad(in_loop))(X), jax.grad(same)(X), rtol=1e-5)
    if kind in (Accumulates, Returns) or kind.__name__ == "Structures":
        with pytest.raises(NotDifferentiable, match="neither jvp nor lin"):
            wrap(lambda x: xform.jvp(f, (x, x), (x, x)))(X)
        return
    push = lambda g, jvp: jvp(g, (X, 2 * X), (X, X))
    got, want = wrap(lambda: push(f, xform.jvp))(), push(plain, jax.jvp)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    _, linear = xform.linearize(f, X, 2 * X)
    np.testing.assert_allclose(wrap(linear)(X, X), want[1], rtol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_unused_output_brings_no_cotangent(compiled: bool) -> None:
    class Root(Accumulates):
        def vjp_bwd(self, held: Any, ct: Any, xy: Any, n: Any) -> None:
            assert isinstance(ct["b"], hijax.Zero)
            xy[0].accum(ct["a"])

    n = jnp.arange(3)
    f = lambda x: Root(x, x, n)((x, {"y": X}), n)["a"].sum()
    wrap = jax.jit if compiled else lambda g: g
    np.testing.assert_allclose(wrap(xform.grad(f))(X), jnp.ones(3))


class Scale(HiPrim):
    """`3 * x`, which is linear and defines its transpose."""

    def __init__(self, x: Any):
        self.in_avals, self.out_aval, self.params = (jax.typeof(x),), jax.typeof(x), {}
        super().__init__()

    def expand(self, x: Any) -> Any:
        return 3 * x

    def jvp(self, primals: Any, tangents: Any) -> Any:
        return self(*primals), self(*tangents)

    def transpose(self, ct: Any, x: Any) -> None:
        x.accum(self(ct))


def test_a_linear_object_is_transposed() -> None:
    f = lambda x: Scale(x)(x)
    np.testing.assert_allclose(xform.linear_transpose(f, X)(X)[0], 3 * X)
    np.testing.assert_allclose(jax.jit(xform.grad(lambda x: f(f(x)).sum()))(X), 9 * jnp.ones(3))


def test_frexp_and_ldexp_derivatives_match_jax() -> None:
    f = lambda x: jnp.frexp(x)[0].sum() + jnp.ldexp(x, 3).sum()
    for wrap in (lambda g: g, jax.jit):
        np.testing.assert_allclose(wrap(xform.grad(f))(X), jax.grad(f)(X))
        _, push = xform.linearize(f, X)
        np.testing.assert_allclose(xform.linear_transpose(push, X)(1.0)[0], jax.grad(f)(X))


def test_vjp_bwd_returning_or_accumulating_wrong_cotangents_raises() -> None:
    class Confused(Accumulates):
        def vjp_bwd(self, held: Any, ct: Any, xy: Any, n: Any) -> Any:
            return ct["a"], None

    class Misshapen(Accumulates):
        def vjp_bwd(self, held: Any, ct: Any, xy: Any, n: Any) -> None:
            xy[0].accum(ct["a"][:2])

    for compiled in (lambda g: g, jax.jit):
        with pytest.raises(WrongCotangent, match=r"(?s)pullback of Confused.*returned a tuple"):
            compiled(xform.grad(loss(Confused)))(X, X)
        with pytest.raises(WrongCotangent, match=rf"(?s)pullback of Misshapen.*{X.dtype}\[2\]"):
            compiled(xform.grad(loss(Misshapen)))(X, X)


def test_an_object_without_rules_is_refused() -> None:
    for transform in (xform.grad(loss(Op)), jax.jit(xform.grad(loss(Op)))):
        with pytest.raises(NotDifferentiable, match=r"(?s)derivative of Op.*neither jvp nor lin"):
            transform(X, X)


# Types of a library's own.


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two arrays of one shape, as one value."""

    a: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class PairType(hijax.HiType):
    sizes: tuple[int, ...]

    def lo_ty(self) -> Any:
        return [hijax.ShapedArray(self.sizes, X.dtype)] * 2

    def lower_val(self, value: Any) -> Any:
        return [value.a, value.b]

    def raise_val(self, a: Any, b: Any) -> Any:
        return Pair(a, b)

    def to_tangent_aval(self) -> Any:
        return self

    def vspace_zero(self) -> Any:
        return Pair(*[jnp.zeros(self.sizes)] * 2)

    def vspace_add(self, x: Any, y: Any) -> Any:
        return pair(*(p + q for p, q in zip(parts(x), parts(y), strict=True)))

    def str_short(self, short_dtypes: bool = False, **_: Any) -> str:
        return f"Pair{list(self.sizes)}"


hijax.register_hitype(Pair, lambda p: PairType(np.shape(p.a)))


class MakePair(HiPrim):
    def __init__(self, x: Any):
        self.in_avals, self.out_aval, self.params = (x, x), PairType(x.shape), {}
        super().__init__()

    def expand(self, a: Any, b: Any) -> Any:
        return Pair(a, b)

    def jvp(self, primals: Any, tangents: Any) -> Any:
        return pair(*primals), pair(*map(filled, tangents, primals))

    def vjp_fwd(self, on: Any, a: Any, b: Any) -> Any:
        return pair(a, b), None

    def vjp_bwd_retval(self, _: Any, ct: Any) -> Any:
        return parts(ct)


class Parts(HiPrim):
    def __init__(self, ty: Any):
        self.in_avals, self.out_aval, self.params = (ty,), tuple(ty.lo_ty()), {}
        super().__init__()

    def expand(self, value: Any) -> Any:
        return value.a, value.b

    def jvp(self, primals: Any, tangents: Any) -> Any:
        return parts(*primals), parts(*tangents)

    def vjp_fwd(self, on: Any, value: Any) -> Any:
        return parts(value), None

    def vjp_bwd_retval(self, _: Any, ct: Any) -> Any:
        return (
            pair(*(filled(c, jnp.zeros(v.shape)) for c, v in zip(ct, self.out_aval, strict=True))),
        )


def pair(a: Any, b: Any) -> Any:
    return MakePair(jax.typeof(a))(a, b)


def parts(value: Any) -> Any:
    return Parts(jax.typeof(value))(value)


@pytest.mark.parametrize("compiled", [False, True])
def test_values_of_a_type_of_ones_own_have_derivatives(compiled: bool) -> None:
    wrap = jax.jit if compiled else lambda g: g

    def f(p: Any) -> Any:
        a, b = parts(p)
        return jnp.sum(jnp.sin(a) * b)

    def through(x: Any) -> Any:
        p = pair(x, 2 * x)
        return f(p) + parts(p)[0].sum()

    p, want = Pair(X, 2 * X), (jnp.cos(X) * 2 * X, jnp.sin(X))
    both = lambda value: np.testing.assert_allclose([value.a, value.b], want, rtol=1e-6)
    both(wrap(xform.grad(f))(p))
    both(wrap(xform.grad(jax.checkpoint(f)))(p))
    both(wrap(lambda p: xform.vjp(f, p)[1](1.0)[0])(p))
    moved = jnp.vdot(want[0], X) + jnp.vdot(want[1], 2 * X)
    np.testing.assert_allclose(wrap(lambda p: xform.jvp(f, (p,), (p,))[1])(p), moved, rtol=1e-6)
    np.testing.assert_allclose(wrap(lambda p: xform.linearize(f, p)[1](p))(p), moved, rtol=1e-6)
    np.testing.assert_allclose(wrap(xform.grad(through))(X), jax.grad(through)(X), rtol=1e-6)
    with pytest.raises(
        WrongCotangent, match=rf"{X.dtype}\[3\], the output it belongs to Pair\[3\]"
    ):
        xform.vjp(lambda x: pair(x, x), X)[1](X)
    with pytest.raises(WrongTangent, match=rf"{X.dtype}\[3\], but its primal Pair\[3\]"):
        xform.jvp(f, (p,), (X,))


class Opaque(PairType):
    """The same without tangents."""

    to_tangent_aval = hijax.HiType.to_tangent_aval


def test_a_derivative_that_would_end_in_an_object_is_refused() -> None:
    class Hide(MakePair):
        def __init__(self, x: Any):
            super().__init__(x)
            self.in_avals, self.out_aval = (x, x), Opaque(x.shape)
            HiPrim.__init__(self)

    class Show(Parts):
        pass

    def f(x: Any) -> Any:
        hidden = Hide(jax.typeof(x))(x, x)
        return Show(jax.typeof(hidden))(hidden)[0].sum()

    for wrap in (lambda g: g, jax.jit):
        with pytest.raises(NotDifferentiable, match=r"(?s)derivative of Hide.*Opaque.*no tangents"):
            wrap(xform.grad(f))(X)


# Under JAX's flags, regions and custom rules are such objects.

FLAGS = ("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3")


@contextlib.contextmanager
def flags_on() -> Iterator[None]:
    before = {flag: getattr(jax.config, flag) for flag in FLAGS if hasattr(jax.config, flag)}
    try:
        for flag in before:
            jax.config.update(flag, True)
        yield
    finally:
        for flag, value in before.items():
            jax.config.update(flag, value)


def layer(w: Any) -> Any:
    return jnp.sum(jnp.sin(checkpoint_name(jnp.tanh(w @ w), "inner") @ w))


def square() -> Any:
    """Return a new function with a custom_vjp rule: JAX reads its flags when it is made."""

    @jax.custom_vjp
    def f(x: Any, n: Any) -> Any:
        return x * x * n

    f.defvjp(lambda x, n: (f(x, n), (x, n)), lambda held, ct: (2 * ct * held[0] * held[1], None))
    return f


W = jnp.asarray(0.5 * np.eye(3) + 0.1)


@pytest.mark.parametrize("compiled", [False, True])
def test_regions_under_jax_remat3(compiled: bool) -> None:
    wrap = jax.jit if compiled else lambda g: g
    want = jax.grad(layer)(W)
    with flags_on():
        saves = jax.checkpoint_policies.save_only_these_names("inner")
        for region in (jax.checkpoint(layer), jax.checkpoint(layer, policy=saves)):
            np.testing.assert_allclose(wrap(xform.grad(region))(W), want, rtol=1e-6)
            np.testing.assert_allclose(wrap(jax.grad(xform.checkpoint(region)))(W), want, rtol=1e-6)
            _, moved = wrap(lambda r: xform.jvp(r, (W,), (W,)), static_argnums=0)(region) \
                if compiled else xform.jvp(region, (W,), (W,))  # fmt: skip
            np.testing.assert_allclose(moved, jnp.vdot(want, W), rtol=1e-5)
        twice = xform.grad(lambda w: jnp.sum(xform.grad(region)(w) ** 2))
        again = jax.grad(lambda w: jnp.sum(jax.grad(layer)(w) ** 2))
        np.testing.assert_allclose(wrap(twice)(W), again(W), rtol=1e-4)
        in_loop = lambda w: jax.lax.scan(lambda c, _: (c + jax.checkpoint(layer)(c * w), None), 1.0,
                                         None, length=3)[0]  # fmt: skip
        by_jax = jax.grad(lambda w: jax.lax.scan(lambda c, _: (c + layer(c * w), None), 1.0, None,
                                                 length=3)[0])  # fmt: skip
        np.testing.assert_allclose(wrap(xform.grad(in_loop))(W), by_jax(W), rtol=1e-4)


def test_policies_and_budgets_decide_in_regions_under_jax_remat3() -> None:
    saves = jax.checkpoint_policies.save_only_these_names("inner")
    kept = lambda **options: [
        row.operation
        for row in xform.residuals(jax.checkpoint(layer, policy=saves), W, **options)
        if row.kind == "kept"
    ]
    opened = {"policy": xform.policies.open_regions()}
    want = kept(), kept(**opened)
    with flags_on():
        assert (kept(), kept(**opened)) == want
        assert want[0] == ["tanh"]
        free = jax.checkpoint(lambda w: layer(layer(w) * w))
        plan = xform.plan(free, W, policy=xform.policies.budget("100 kB"))
        np.testing.assert_allclose(xform.grad(free, policy=plan)(W), jax.grad(free)(W), rtol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_custom_rules_under_jax_custom_vjp3(compiled: bool) -> None:
    wrap = jax.jit if compiled else lambda g: g
    with flags_on():
        f = square()
        g = lambda x: jnp.sum(f(x, jnp.arange(3.0)))
        want = 2 * X * jnp.arange(3.0)
        np.testing.assert_allclose(wrap(xform.grad(g))(X), want)
        np.testing.assert_allclose(wrap(xform.grad(jax.checkpoint(g)))(X), want)
        np.testing.assert_allclose(wrap(jax.vmap(xform.grad(g)))(X[None])[0], want)
        np.testing.assert_allclose(
            wrap(xform.grad(lambda x: xform.grad(g)(x).sum()))(X), 2 * jnp.arange(3.0)
        )
        with pytest.raises(NotDifferentiable, match="forward-mode"):
            wrap(lambda x: xform.jvp(g, (x,), (x,)))(X)
        _, push = xform.linearize(g, X)
        with pytest.raises(NotDifferentiable, match="forward-mode"):
            wrap(push)(X)
        np.testing.assert_allclose(xform.linear_transpose(push, X)(1.0)[0], want)
        if hasattr(hijax, "HiPrim"):
            closing = lambda x: square_of(x)
            square_of = lambda x: _closes_over(x)(jnp.ones(3)).sum()
            with pytest.raises(NotDifferentiable, match="closes over"):
                wrap(xform.grad(closing))(X)


def _closes_over(x: Any) -> Any:
    f = jax.custom_vjp(lambda y: x * y)
    f.defvjp(lambda y: (x * y, None), lambda _, ct: (ct,))
    return f


@pytest.mark.skipif(not hasattr(jax.config, "jax_custom_jvp3"), reason="of JAX since 0.12")
@pytest.mark.parametrize("compiled", [False, True])
def test_custom_rules_under_jax_custom_jvp3(compiled: bool) -> None:
    wrap = jax.jit if compiled else lambda g: g
    with flags_on():
        f = jax.custom_jvp(lambda x, y: jnp.sin(x) * y)
        f.defjvp(lambda p, t: (f(*p), jnp.cos(p[0]) * p[1] * t[0] + jnp.sin(p[0]) * t[1]))
        check = lambda g, like: np.testing.assert_allclose(wrap(g)(X), like(X), rtol=1e-6)
        one, same = lambda x: f(x, x).sum(), lambda x: jnp.sum(jnp.sin(x) * x)
        check(xform.grad(one), jax.grad(same))
        check(xform.hessian(one), jax.hessian(same))
        check(lambda x: xform.jvp(one, (x,), (x,))[1], lambda x: jax.jvp(same, (x,), (x,))[1])
        check(xform.grad(jax.checkpoint(one)), jax.grad(same))


@NEWER
def test_a_region_with_an_unknown_parameter_is_refused() -> None:
    with flags_on():
        (eqn,) = jax.make_jaxpr(jax.checkpoint(layer))(W).eqns
        prim = eqn.params["_prim"]
        prim.params["newer"] = 3
        with pytest.raises(UnsupportedParam, match=r"(?s)checkpoint region.*'newer'"):
            xform.grad(lambda w: prim(w)[0])(W)
