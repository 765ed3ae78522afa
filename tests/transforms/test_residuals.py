"""The object that `vjp` returns has the attributes of JAX's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests.reference import close
from xform.errors import NotDifferentiable, WrongArgument

X, W = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), np.eye(4, dtype=np.float32) + 0.5
NEWEST = hasattr(jax.vjp(jnp.sin, 1.0)[1], "out_nzs")
NEEDED, UNNEEDED = "needed", "NotNeeded"


def layer(x, w):
    return 2.0 * jnp.sin(0.5 * x @ w)


PROGRAMS = {
    "a product": (lambda x, w: x @ w, (X, W)),
    "a layer": (layer, (X, W)),
    "linear": (lambda x, w: x + w[:3], (X, W)),
    "only one": (lambda x, w: jnp.sum(w) * 3.0, (X, W)),
    "integers": (lambda x, i: x[i], (X, np.int32(1))),
    "dict": (lambda d: d["b"] @ d["a"], ({"a": W, "b": X},)),
    "a list and None": (lambda pair, _: pair[0] @ pair[1], ([X, W], None)),
    "branch": (lambda x, w: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x @ w), (X, W)),
    "scan": (lambda x, w: lax.scan(lambda h, _: (jnp.sin(h @ w), None), x, length=3)[0], (X, W)),
    "several outputs": (lambda x, w: {"y": x @ w, "c": 1.0, "w": w}, (X, W)),
    "jit": (jax.jit(layer), (X, W)),
    "remat": (jax.checkpoint(layer), (X, W)),
    "custom": (lambda x, w: jax.nn.relu(x @ w), (X, W)),
}


def marks(pull):
    """Return for each argument whether the pullback holds it."""
    kinds = jax.tree.leaves(pull.args_res, is_leaf=lambda x: type(x).__name__ == UNNEEDED)
    return [type(x).__name__ if type(x).__name__ == UNNEEDED else NEEDED for x in kinds]


def ones(y):
    return jax.tree.map(lambda y: jnp.ones_like(y), y)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("jitted", [False, True])
def test_the_attributes_are_jaxs(name: str, jitted: bool) -> None:
    f, args = PROGRAMS[name]
    args = jax.tree.map(jnp.asarray, args)
    way = jax.jit if jitted else lambda f: f
    (y, theirs), (_, mine) = (way(functools.partial(t.vjp, f))(*args) for t in (jax, xform))
    want = theirs(ones(y))
    assert (mine.in_tree, mine.out_tree) == (theirs.in_tree, theirs.out_tree)
    if NEWEST:
        assert mine.out_nzs == theirs.out_nzs
        assert jax.tree.structure(mine.args_res) == jax.tree.structure(theirs.args_res) or jitted
    if not jitted and name not in ("jit", "remat", "scan", "branch"):  # no plan decides
        assert marks(mine) == marks(theirs)
    for held, x in zip(jax.tree.leaves(mine.args_res), jax.tree.leaves(args), strict=False):
        assert jitted or any(held is x for x in jax.tree.leaves(args))
    structured = jax.tree.leaves(getattr(theirs, "structured_residuals", []))
    assert jax.tree.leaves(mine.structured_residuals) == structured
    n = len(jax.tree.leaves(mine.args_res)) + len(jax.tree.leaves(mine.opaque_residuals))
    assert len(jax.tree.leaves(mine)) == n
    # Everything that it reads can be taken out and restored, can cross jit, and can be batched.
    held, opaque = mine.args_res, mine.opaque_residuals
    mine.args_res, mine.opaque_residuals = [None] * len(args), []
    assert not jax.tree.leaves(mine)
    mine.args_res, mine.opaque_residuals = held, opaque
    close(mine(ones(y)), want, 1e-6)
    mine.args_res = list(args)  # every argument, including those that are not read
    close(jax.jit(lambda pull, ct: pull(ct))(mine, ones(y)), want, 1e-6)
    close(jax.tree.map(lambda x: x * 1, mine)(ones(y)), want, 1e-6)


def test_removed_or_wrong_args_res_make_the_pullback_raise() -> None:
    x, w = jnp.asarray(X), jnp.asarray(W)
    for way in (lambda f: f, jax.jit):
        y, pull = way(functools.partial(xform.vjp, lambda x, w: x @ w))(x, w)
        pull.args_res[1] = None
        assert len(jax.tree.leaves(pull)) == 1
        with pytest.raises(WrongArgument, match=r"holds 1 values.*2 arguments"):
            pull(y)
        pull.args_res[1] = x
        with pytest.raises(WrongArgument, match=r"float32\[3,4\] for args\[1\]"):
            pull(y)
        pull.args_res[1] = w
        close(pull(y), jax.vjp(lambda x, w: x @ w, x, w)[1](y), 1e-6)


def test_values_of_other_arguments_are_taken() -> None:
    """As in JAX, the derivative is at the point that was restored."""
    for t in (jax, xform):
        _, pull = t.vjp(lambda x, w: x * w, jnp.float32(2), jnp.float32(3))
        pull.args_res = [jnp.float32(5), jnp.float32(7)]
        close(pull(jnp.float32(1)), (jnp.float32(7), jnp.float32(5)))


@pytest.mark.parametrize("jitted", [False, True])
def test_an_argument_that_may_not_be_saved_is_restored(jitted: bool) -> None:
    x, w = jnp.asarray(X), jnp.asarray(W)
    make = lambda x, w: xform.vjp(layer, x, w, saveable_args=(True, False))
    y, pull = (jax.jit(make) if jitted else make)(x, w)
    assert type(pull.args_res[1]).__name__.endswith("NotSaveable")
    assert all(leaf is not w for leaf in jax.tree.leaves(pull))
    with pytest.raises(WrongArgument, match=r"(?s)not-saveable.*args\[1\]"):
        pull(y)
    with pytest.raises(WrongArgument, match="not-saveable"):
        jax.jit(lambda pull, ct: pull(ct))(pull, y)
    pull.args_res[1] = w
    close(pull(y), jax.vjp(layer, x, w)[1](y), 1e-6)
    _, pull = xform.vjp(jnp.sin, x, saveable_args=False)
    assert marks(pull) == [UNNEEDED]
    d = {"a": w, "b": x}
    _, pull = xform.vjp(lambda d: d["b"] @ d["a"], d, saveable_args=((False, True),))
    with pytest.raises(WrongArgument, match=r"args\[0\]\['a'\]"):
        pull(y)
    pull.args_res = [d]
    close(pull(y), jax.vjp(lambda d: d["b"] @ d["a"], d)[1](y), 1e-6)


BAD_TREES = [
    ((True,), "number of children"),
    ((True, (True, True)), "leaf"),
    ((1, True), "of bools"),
]


@pytest.mark.parametrize("option", ["saveable_args", "in_nzs"])
@pytest.mark.parametrize(("tree", "match"), BAD_TREES)
def test_a_tree_of_bools_is_checked(option: str, tree, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        xform.vjp(layer, X, W, **{option: tree})
    if NEWEST:
        with pytest.raises(ValueError, match=match):
            jax.vjp(layer, X, W, **{option: tree})
    with pytest.raises(WrongArgument, match=r"keys \['a', 'c'\]"):
        xform.vjp(lambda d: d["a"], {"a": X, "b": W}, **{option: ({"a": True, "c": True},)})


@pytest.mark.parametrize("jitted", [False, True])
def test_inputs_that_have_no_tangent(jitted: bool) -> None:
    f = lambda x, w: {"both": x @ w, "second": jnp.sin(w), "none": None, "n": 3}
    way = jax.jit if jitted else lambda f: f
    y, pull = way(lambda x, w: xform.vjp(f, x, w, in_nzs=(True, False)))(X, W)
    assert pull.out_nzs == {"both": True, "second": False, "none": None, "n": False}
    ct = {**ones(y), "n": np.zeros((), jax.dtypes.float0)}
    dx, dw = pull(ct)
    close(dx, jax.vjp(f, X, W)[1](ct)[0], 1e-6)
    close(dw, np.zeros_like(W))
    _, push = way(lambda x, w: xform.linearize(f, x, w, in_nzs=(True, False)))(X, W)
    assert push.out_nzs == pull.out_nzs
    close(push(X, W)["both"], X @ W, 1e-6)
    close(push(X, W)["second"], np.zeros_like(W))
    if NEWEST:
        theirs = jax.vjp(f, X, W, in_nzs=(True, False))[1]
        assert theirs.out_nzs == pull.out_nzs
        close((dx, dw), theirs(ct), 1e-6)


@pytest.mark.parametrize("jitted", [False, True])
def test_cotangents_go_where_they_are_wished(jitted: bool) -> None:
    f = lambda x, w, b: x @ w + b
    args = jnp.asarray(X), jnp.asarray(W), jnp.ones(4)
    want = jax.vjp(f, *args)[1](jnp.ones((3, 4)))

    def wishes(kinds):
        return [
            jax.new_ref(jnp.ones_like(x)) if k == "Ref" else getattr(jax.ad, k)()
            for k, x in zip(kinds, args, strict=True)
        ]

    def pulled(t, kinds):
        def run(*args):
            refs = wishes(kinds)
            out = t.vjp(f, *args)[1].with_refs(*refs)(jnp.ones((3, 4)))
            return out, [r[...] if k == "Ref" else () for r, k in zip(refs, kinds, strict=True)]

        return (jax.jit(run) if jitted else run)(*args)

    mixed = "GradValue", "DontWant", "Ref"
    for kinds in (mixed, mixed[::-1], ("Ref",) * 3, ("GradValue",) * 3):
        mine, theirs = (pulled(t, kinds) for t in (xform, jax))
        assert jax.tree.structure(mine) == jax.tree.structure(theirs)
        close(jax.tree.leaves(mine), jax.tree.leaves(theirs), 1e-6)
    ref = jax.new_ref(jnp.zeros_like(args[1]))
    pull = xform.vjp(f, *args)[1].with_refs(jax.ad.DontWant(), ref, jax.ad.DontWant())
    run = jax.jit(lambda pull, ct: pull(ct)) if jitted else (lambda pull, ct: pull(ct))
    run(pull, jnp.ones((3, 4)))
    run(pull, jnp.ones((3, 4)))
    close(ref[...], 2 * want[1], 1e-6)


def test_wishes_that_do_not_fit() -> None:
    _, pull = xform.vjp(lambda x, w: x @ w, X, W)
    ref = jax.new_ref(jnp.zeros(3))
    for wishes in ((ref,), (ref, None)):
        with pytest.raises(ValueError, match=r"tree structures differ.*NoneType"):
            pull.with_refs(*wishes)
    for bad in (ref, jax.new_ref(jnp.zeros((3, 4), jnp.int32))):
        with pytest.raises(ValueError, match=r"args\[0\].*requires a ref of type"):
            pull.with_refs(bad, jax.ad.DontWant())


def test_a_reference_as_argument_has_no_gradient_of_its_own() -> None:
    _, pull = xform.vjp(lambda r, x: r[...] * x, jax.new_ref(2.0), 3.0)
    with pytest.raises(NotDifferentiable, match=r"(?s)args\[0\] is a Ref.*with_refs"):
        pull(1.0)
    with pytest.raises(NotDifferentiable, match="can't be returned as a value"):
        pull.with_refs(jax.new_ref(0.0), jax.ad.GradValue())
    out = pull.with_refs(jax.ad.DontWant(), jax.ad.GradValue())(1.0)
    assert out[0] == jax.ad.DidntWant()
    assert float(out[1]) == 2.0


def test_a_policy_decides_which_arguments_are_held() -> None:
    for policy, held in ((xform.policies.save_nothing, 2), (xform.policies.save_everything, 1)):
        y, pull = xform.vjp(layer, jnp.asarray(X), jnp.asarray(W), policy=policy)
        assert len(jax.tree.leaves(pull.args_res)) == held
        close(pull(y), jax.vjp(layer, X, W)[1](y), 1e-6)


def logging(key: str):
    """Return x**2, whose backward pass logs where JAX's rules can."""
    f = jax.custom_vjp(lambda x: x**2)
    f.defvjp_with_logs(
        lambda x: (f(x), x), lambda x, ct: ((2 * x * ct,), {key: {"x": x, "ct": ct}})
    )
    return f


LOGGING = {
    "one": lambda x: logging("a")(x) * 3,
    "two": lambda x: logging("b")(logging("a")(x)),
    "jit": lambda x: jax.jit(logging("a"))(x) * 3,
    "jit in jit": lambda x: jax.jit(lambda x: jax.jit(logging("a"))(x) * 2)(x) * 3,
    "none": jnp.sin,
}
HAS_LOGS = hasattr(jax.custom_vjp, "defvjp_with_logs")


@pytest.mark.parametrize("name", LOGGING)
def test_logs_are_jaxs(name: str) -> None:
    if not HAS_LOGS:
        assert xform.vjp(jnp.sin, 2.0)[1].with_logs(1.0)[1] == {}
        return
    x, ct = jnp.float32(2), jnp.float32(1)
    theirs, mine = (t.vjp(LOGGING[name], x)[1] for t in (jax, xform))
    for of in (lambda p: p.with_logs, lambda p: p.with_logs.with_refs(jax.ad.GradValue())):
        want, have = of(theirs)(ct), of(mine)(ct)
        assert jax.tree.structure(have) == jax.tree.structure(want)
        close(jax.tree.leaves(have), jax.tree.leaves(want), 1e-6)
    close(mine(ct), theirs(ct), 1e-6)
    again = jax.tree.map(lambda x: x, mine.with_logs)
    if "jit" in name:  # taking the pullback apart stages the body of the jit
        with pytest.raises(NotDifferentiable, match="flattened before its call"):
            again(ct)
        return
    close(jax.tree.leaves(again(ct)), jax.tree.leaves(theirs.with_logs(ct)), 1e-6)


def test_logs_that_are_lost_are_an_error() -> None:
    if not HAS_LOGS:
        assert not hasattr(jax.vjp(jnp.sin, 1.0)[1], "with_logs")
        return
    f = logging("a")
    scanned = lambda x: lax.scan(lambda h, _: (f(h), None), x, length=2)[0]
    for g in (scanned, jax.checkpoint(f), jax.jit(scanned)):
        pull = xform.vjp(g, jnp.float32(2))[1]
        close(pull(jnp.float32(1)), jax.vjp(g, jnp.float32(2))[1](jnp.float32(1)), 1e-6)
        with pytest.raises(NotDifferentiable, match=r"'a' is logged inside"):
            pull.with_logs(jnp.float32(1))
    with pytest.raises(NotDifferentiable, match="planned"):
        jax.jit(lambda x: xform.vjp(f, x)[1].with_logs(x))(jnp.float32(2))
    for t in (jax, xform):
        with pytest.raises(ValueError, match="Duplicate backward-pass log key 'a'"):
            t.vjp(lambda x: f(f(x)), jnp.float32(2))[1](jnp.float32(1))
