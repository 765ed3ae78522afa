"""`remat` keeps gradients and saves memory."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxprs_in_params

import xform
from tests.reference import close, compilations, grads_agree
from tests.versions import saved_residuals

X = np.array([0.3, -0.7, 1.1])
LAYERS, WIDTH, BATCH = 8, 64, 512


def mlp(mark):
    """Return an unrolled MLP of wide layers, each marked."""

    def layer(w, h):
        return jax.nn.gelu(h @ w[0]) @ w[1] + h

    def loss(ws, x):
        for w in ws:
            x = checkpoint_name(mark(layer)(w, x), "layer")
        return jnp.mean(x**2)

    return loss


def mlp_types(dtype=np.float32):
    w = [jax.ShapeDtypeStruct(s, dtype) for s in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))]
    return [w] * LAYERS, jax.ShapeDtypeStruct((BATCH, WIDTH), dtype)


KEEP_ALL = xform.policies.save_everything


def temp_bytes(f, *types) -> int:
    return jax.jit(f).lower(*types).compile().memory_analysis().temp_size_in_bytes


@functools.cache
def plain_bytes() -> int:
    return temp_bytes(xform.grad(mlp(lambda f: f), policy=KEEP_ALL), *mlp_types())


MARKS = {
    "xform.remat": xform.remat,
    "jax.checkpoint": jax.checkpoint,
    "save_nothing": functools.partial(xform.remat, policy=xform.policies.save_nothing),
    "jax.checkpoint, prevent_cse by default, jax's policy": functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable
    ),
}


@pytest.mark.parametrize("name", MARKS)
def test_remat_saves_memory_of_unrolled_layers_on_cpu(name: str) -> None:
    assert temp_bytes(xform.grad(mlp(MARKS[name])), *mlp_types()) <= 0.3 * plain_bytes()


def test_remat_saves_memory_in_bfloat16_under_vmap_and_in_second_order() -> None:
    types = mlp_types(jnp.bfloat16)
    none = temp_bytes(xform.grad(mlp(lambda f: f), policy=KEEP_ALL), *types)
    assert temp_bytes(xform.grad(mlp(xform.remat)), *types) <= 0.5 * none
    ws, _ = mlp_types()
    wide = jax.ShapeDtypeStruct((2, BATCH // 2, WIDTH), np.float32)
    batched = jax.vmap(xform.grad(mlp(xform.remat)), in_axes=(None, 0))
    plain = jax.vmap(xform.grad(mlp(lambda f: f), policy=KEEP_ALL), in_axes=(None, 0))
    assert temp_bytes(batched, ws, wide) <= 0.5 * temp_bytes(plain, ws, wide)


def test_policy_of_the_whole_function_saves_memory() -> None:
    names = xform.policies.save_only_these_names("layer")
    f = mlp(lambda f: f)
    assert temp_bytes(xform.grad(f, policy=names), *mlp_types()) <= 0.3 * plain_bytes()
    kept = temp_bytes(xform.grad(f, policy=KEEP_ALL), *mlp_types())
    assert kept == plain_bytes()


def values(marked, dtype=np.float64):
    numbers = np.sin(np.arange(12.0)).astype(dtype)
    ws = [(numbers.reshape(3, 4) + i, numbers.reshape(4, 3) - i) for i in range(3)]
    x = np.cos(np.arange(6.0)).reshape(2, 3).astype(dtype)
    return mlp(marked), ws, x


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", MARKS)
def test_gradients_are_the_same(name: str) -> None:
    f, ws, x = values(MARKS[name])
    want = jax.grad(mlp(lambda f: f), (0, 1))(ws, x)
    g = xform.grad(f, (0, 1))
    close(g(ws, x), want)
    close(jax.jit(g)(ws, x), want)
    xs = np.stack([x, 2 * x])
    close(
        jax.jit(jax.vmap(g, (None, 0)))(ws, xs),
        jax.vmap(jax.grad(mlp(lambda f: f), (0, 1)), (None, 0))(ws, xs),
    )


@pytest.mark.usefixtures("x64")
def test_code_marked_by_xform_works_under_jax() -> None:
    f, ws, x = values(functools.partial(xform.remat, policy=xform.policies.save_dots))
    want = jax.grad(mlp(lambda f: f))(ws, x)
    for g in (jax.grad(f), jax.jit(jax.grad(f)), lambda ws, x: jax.vjp(f, ws, x)[1](1.0)[0]):
        close(g(ws, x), want)
    close(jax.jvp(f, (ws, x), (ws, x)), jax.jvp(mlp(lambda f: f), (ws, x), (ws, x)))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("outer", [xform, jax], ids=["xform", "jax"])
@pytest.mark.parametrize("inner", [xform, jax], ids=["xform", "jax"])
def test_second_order_through_remat(outer, inner) -> None:
    f, ws, x = values(xform.remat)
    plain = mlp(lambda f: f)
    second = lambda t, u, f: t.grad(lambda x: jnp.sum(u.grad(f, 1)(ws, x) ** 2))
    want = second(jax, jax, plain)(x)
    close(second(outer, inner, f)(x), want)
    close(jax.jit(second(outer, inner, f))(x), want)
    close(
        jax.vmap(second(outer, inner, f))(np.stack([x, x + 1])),
        jax.vmap(second(jax, jax, plain))(np.stack([x, x + 1])),
    )


@pytest.mark.usefixtures("x64")
def test_forward_over_reverse_through_remat() -> None:
    f, ws, x = values(xform.remat)
    want = jax.jvp(jax.grad(mlp(lambda f: f), 1), (ws, x), (ws, x))
    for way in (lambda g: g, jax.jit):
        close(way(lambda ws, x: xform.jvp(xform.grad(f, 1), (ws, x), (ws, x)))(ws, x), want)
        close(way(lambda ws, x: jax.jvp(xform.grad(f, 1), (ws, x), (ws, x)))(ws, x), want)
        close(way(lambda ws, x: xform.jvp(jax.grad(f, 1), (ws, x), (ws, x)))(ws, x), want)


def primitives(jaxpr) -> list[str]:
    """Return the names of all equations, including nested ones."""
    out = []
    for eqn in jaxpr.eqns:
        out.append(eqn.primitive.name)
        for inner in jaxprs_in_params(eqn.params):
            out += primitives(inner)
    return out


def recomputes(f, *args, name: str = "sin") -> int:
    return primitives(jax.make_jaxpr(f)(*args).jaxpr).count(name)


def test_prevent_cse_false_does_not_tie() -> None:
    f = lambda mark: lambda x: jnp.sum(mark(lambda x: jnp.sin(jnp.sin(x)))(x))
    g = lambda mark: jax.make_jaxpr(xform.grad(f(mark), policy=KEEP_ALL))(X).jaxpr
    assert "xform_barrier" in primitives(g(xform.remat))
    assert "xform_barrier" not in primitives(g(functools.partial(xform.remat, prevent_cse=False)))
    assert "xform_barrier" not in primitives(g(lambda f: f))


def test_scan_bodies_need_no_tie() -> None:
    def f(x):
        return jnp.sum(lax.scan(lambda c, _: (xform.remat(jnp.sin)(c), None), x, None, length=3)[0])

    assert "xform_barrier" not in primitives(jax.make_jaxpr(xform.grad(f))(X).jaxpr)


@pytest.mark.filterwarnings("ignore:the remat region at .* changes nothing")
def test_a_region_without_policy_saves_nothing() -> None:
    f = lambda x: jnp.sum(xform.remat(lambda x: jnp.sin(jnp.sin(jnp.sin(x))))(x))
    assert recomputes(xform.grad(f), X) == 3 + 2
    table = xform.residuals(f, jax.ShapeDtypeStruct((3,), np.float32))
    assert table.total_bytes == 0


def test_grad_without_remat_recomputes_only_fusible_operations() -> None:
    f = lambda x: jnp.sum(jnp.sin(jnp.sin(jnp.sin(x))))
    assert recomputes(xform.grad(f, policy=KEEP_ALL), X) == 3
    assert recomputes(xform.grad(f), X) == 3 + 2  # the fusible operations, by default


POLICIES = {
    "everything": (xform.policies.save_everything, jax.checkpoint_policies.everything_saveable),
    "nothing": (xform.policies.save_nothing, jax.checkpoint_policies.nothing_saveable),
    "dots": (xform.policies.save_dots, jax.checkpoint_policies.dots_saveable),
    "unbatched dots": (
        xform.policies.save_dots_with_no_batch_dims,
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    ),
    "names": (
        xform.policies.save_only_these_names("a"),
        jax.checkpoint_policies.save_only_these_names("a"),
    ),
    "other names": (
        xform.policies.save_any_names_but_these("a"),
        jax.checkpoint_policies.save_any_names_but_these("a"),
    ),
    "both": (
        xform.policies.save_from_both_policies(
            xform.policies.save_dots_with_no_batch_dims, xform.policies.save_only_these_names("b")
        ),
        jax.checkpoint_policies.save_from_both_policies(
            jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
            jax.checkpoint_policies.save_only_these_names("b"),
        ),
    ),
}


def block(w, x):
    a = checkpoint_name(jnp.tanh(x @ w), "a")
    s = jnp.einsum("bij,bjk->bik", a.reshape(2, 2, 3), jnp.sin(a).reshape(2, 3, 2))
    b = checkpoint_name(jnp.sin(s.reshape(2, 4)), "b")
    return jnp.sum(jnp.sin(b @ jnp.ones((4, 2)) * jnp.sum(w)))


W, B = np.sin(np.arange(18.0)).reshape(3, 6), np.cos(np.arange(6.0)).reshape(2, 3)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", POLICIES)
def test_jaxs_policies_give_the_saved_set_of_xforms(name: str) -> None:
    ours, jaxs = POLICIES[name]
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (W, B)]
    sets = []
    for policy in (ours, jaxs):
        whole = xform.residuals(block, *types, policy=policy)
        region = xform.residuals(xform.remat(block, policy=policy), *types)
        sets.append([[(r.kind, r.type, r.operation) for r in t] for t in (whole, region)])
    assert sets[0] == sets[1]
    grads_agree(block, W, B, argnums=(0, 1), policies=(ours, jaxs))
    grads_agree(xform.remat(block, policy=jaxs), W, B, argnums=(0, 1))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "name", ["nothing", "dots", "unbatched dots", "names", "other names", "both"]
)
def test_a_region_keeps_no_more_than_under_jax(name: str) -> None:
    ours, jaxs = POLICIES[name]
    kept = xform.residuals(xform.remat(block, policy=ours), W, B)
    residuals = saved_residuals(jax.checkpoint(block, policy=jaxs), W, B)
    theirs = sum(a.size * a.dtype.itemsize for a, why in residuals if "argument" not in why)
    assert kept.total_bytes <= theirs
    assert (kept.total_bytes == 0) == (theirs == 0)


def test_static_arguments_and_keywords() -> None:
    @functools.partial(xform.remat, static_argnums=(1,))
    def f(x, kind):
        return jnp.sum(jnp.sin(x) if kind == "sin" else x)

    g = xform.remat(lambda x, *, scale=1.0: jnp.sum(jnp.sin(x)) * scale)
    x = X.astype(np.float32)
    close(xform.grad(lambda x: f(x, "sin"))(x), jnp.cos(x), 1e-6)
    close(xform.grad(lambda x: g(x, scale=2.0))(x), 2 * jnp.cos(x), 1e-6)


def test_static_positions_are_checked_as_by_jax() -> None:
    f = lambda x, kind, *rest, **named: jnp.sin(x) if kind == "sin" else x
    calls = {
        "the last": (-1, lambda g: g(1.0, "sin")),
        "a tuple": ((1, -2), lambda g: g(1.0, "sin", 2.0)),
        "too large": (2, lambda g: g(1.0, "sin")),
        "too small": ((1, -3), lambda g: g(1.0, "sin")),
        "by keyword": (1, lambda g: g(1.0, kind="sin")),
        "only keywords": (0, lambda g: g(x=1.0, kind="sin")),
        "left out": ((1, 2), lambda g: g(1.0, "sin")),
    }
    for name, (at, call) in calls.items():
        results = []
        for mark in (jax.checkpoint, xform.checkpoint):
            try:
                results.append(jax.grad(lambda x: call(mark(f, static_argnums=at)) + x)(1.0))  # noqa: B023
            except ValueError as error:
                results.append(error)
        theirs, ours = results
        assert (ours == theirs) is not isinstance(theirs, Exception), name
        assert isinstance(ours, xform.errors.WrongArgument) is isinstance(theirs, ValueError), name
    assert str(ours) == (
        "checkpoint of <lambda> with static_argnums=2\n"
        "  problem: the call has 2 positional arguments\n"
        f"  where:   {__file__}:{f.__code__.co_firstlineno} (<lambda>)\n"
        "  remedy:  pass static arguments by position, or name them: static_argnames='train'"
    )


def test_remat_of_undifferentiated_inputs_recomputes_nothing() -> None:
    f = lambda x, y: jnp.sum(x) * jnp.sum(xform.remat(jnp.sin)(y))
    assert recomputes(xform.grad(f), X, X) == 1


def test_remat_with_integers_keys_nothing_and_trees() -> None:
    key = jax.random.key(1)

    @xform.remat
    def f(tree, key, n):
        mask = jax.random.bernoulli(key, 0.5, tree["x"].shape)
        return {"y": jnp.sin(tree["x"]) * mask * n, "n": n + 1, "key": key, "none": None}

    loss = lambda x: jnp.sum(f({"x": x, "none": None}, key, 3)["y"] ** 2)
    want = jax.grad(
        lambda x: jnp.sum((jnp.sin(x) * jax.random.bernoulli(key, 0.5, x.shape) * 3) ** 2)
    )
    x = X.astype(np.float32)
    close(xform.grad(loss)(x), want(x), 1e-5)
    close(jax.jit(xform.grad(loss))(x), want(x), 1e-5)
    close(jax.vmap(xform.grad(loss))(np.stack([x, x])), jax.vmap(want)(np.stack([x, x])), 1e-5)


def test_random_numbers_of_a_region_are_those_of_the_forward_pass() -> None:
    def f(x, key):
        layer = xform.remat(lambda x: x * jax.random.normal(key, x.shape))
        return jnp.sum(layer(layer(x)))

    x, key = X.astype(np.float32), jax.random.key(3)
    close(jax.jit(xform.grad(f))(x, key), jax.random.normal(key, x.shape) ** 2, 1e-5)


@pytest.mark.usefixtures("x64")
def test_closures_over_tracers_in_a_region() -> None:
    def outer(t, s):
        return jnp.sum(t.grad(lambda x: jnp.sum(jax.checkpoint(lambda x: jnp.sin(x * s))(x)))(X))

    close(
        xform.grad(functools.partial(outer, xform))(0.7),
        jax.grad(functools.partial(outer, jax))(0.7),
    )
    close(jax.vmap(functools.partial(outer, xform))(X), jax.vmap(functools.partial(outer, jax))(X))


def test_a_gradient_of_marked_code_is_traced_once() -> None:
    chex.clear_trace_counter()
    body = chex.assert_max_traces(lambda x: jnp.sin(x) * x, n=1)
    g = jax.jit(xform.grad(lambda x: jnp.sum(xform.remat(body)(x))))
    for x in (X, X + 1):
        g(x)


def test_offload_policies_differentiate_on_cpu() -> None:
    policy = xform.policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["b"],
        names_which_can_be_offloaded=["a"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    w, b = W.astype(np.float32), B.astype(np.float32)
    want = jax.grad(block)(w, b)
    close(jax.jit(xform.grad(block, policy=policy))(w, b), want, 1e-5)
    close(jax.jit(xform.grad(xform.remat(block, policy=policy)))(w, b), want, 1e-5)
    rows = xform.residuals(block, w, b, policy=policy)
    assert {(r.name, r.memory) for r in rows if r.name} == {("a", "pinned_host"), ("b", "device")}


def test_static_arguments_that_are_equal_or_not_hashable() -> None:
    region = xform.checkpoint(lambda x, how: x * how["n"], static_argnums=1)
    assert float(xform.grad(region)(2.0, {"n": 3.0})) == 3.0
    kind = xform.checkpoint(
        lambda x, n: x * (2.0 if isinstance(n, bool) else 3.0), static_argnums=1
    )
    assert [float(xform.grad(kind)(2.0, n)) for n in (True, 1, True)] == [2.0, 3.0, 2.0]


def test_a_function_with_static_arguments_is_traced_once() -> None:
    traces = []

    def f(x, n):
        traces.append(n)
        return x * n

    for _ in range(3):
        xform.grad(xform.checkpoint(f, static_argnums=1))(2.0, 3)
    assert traces == [3]


@pytest.mark.parametrize("remat", [jax.checkpoint, xform.checkpoint])
def test_a_loop_in_a_region_is_compiled_once(remat) -> None:
    step = lambda c, _: (jnp.sin(c) * c, None)
    f = remat(lambda x: jnp.sum(lax.scan(step, x, None, length=3)[0]))
    x = jnp.arange(3.0)
    for way in (lambda: xform.grad(f)(x), lambda: xform.jvp(f, (x,), (x,))):
        way()
        assert compilations(way) == 0
    close(xform.grad(f)(x), jax.grad(f)(x), 1e-5)
