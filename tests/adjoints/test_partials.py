"""`partials`: the gradient at named values, against JAX's gradient of functions changed by hand."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import xform
from tests.adjoints.programs import (
    PROGRAMS,
    TAPS,
    W,
    X,
    after_a_rule,
    branch,
    jitted,
    plain,
    recurrent,
    region,
    vmapped,
)
from tests.reference import close
from xform.errors import NotDifferentiable
from xform.interpret.cost import flops
from xform.program.ir import trace

pytestmark = pytest.mark.usefixtures("x64")


def by_hand(f: Any, shape: Any = None) -> Callable[[Any], Any]:
    """Return JAX's gradient by a perturbation that is added at the name."""

    def gradient(x: Any) -> Any:
        types: list[Any] = []
        jax.eval_shape(lambda x: f(lambda v, _: (types.append(v.aval), v)[1], x), x)
        aval = types[-1]
        # Within `vmap` a value has no batch axis. The perturbation has one, and is split along it.
        eps = jnp.zeros(aval.shape if shape is None else shape, aval.dtype)
        if shape is not None:
            split = lambda eps: jnp.sum(jax.vmap(lambda x, e: (jnp.sin(x) + e) ** 2 * x)(x, eps))
            return jax.grad(split)(eps)
        return jax.grad(lambda eps: f(lambda v, _: v + eps, x))(eps)

    return gradient


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_total(f: Any) -> None:
    want = by_hand(f, X.shape if f is vmapped else None)(X)
    ours = xform.adjoints.partials(functools.partial(f, xform.adjoints.name), "h")
    close(ours(X), want)
    close(jax.jit(ours)(X), want)


@pytest.mark.parametrize(
    "f", [plain, jitted, region, branch, after_a_rule], ids=lambda f: f.__name__
)
def test_under_vmap(f: Any) -> None:
    xs = np.stack([X, X[::-1], 2 * X])
    ours = jax.vmap(xform.adjoints.partials(functools.partial(f, checkpoint_name), "h"))
    want = np.stack([by_hand(f)(x) for x in xs])
    close(ours(xs), want)
    close(jax.jit(ours)(xs), want)


@pytest.mark.parametrize(
    "policy",
    ["auto", *(getattr(xform.policies, n) for n in ("save_nothing", "save_dots", "min_cut")),
     xform.policies.budget("1 MiB")],
    ids=str,
)  # fmt: skip
def test_policies(policy: Any) -> None:
    ours = jax.jit(
        xform.adjoints.partials(functools.partial(region, xform.adjoints.name), "h", policy=policy)
    )
    close(ours(X), by_hand(region)(X))


def test_a_loop_stacks_its_trips() -> None:
    ours = lambda x: xform.adjoints.partials(recurrent, {"a": "h", "b": "s"})(W, x, TAPS)
    want = jax.grad(recurrent, 2)(W, X, TAPS)
    close(ours(X), {"a": want[0], "b": want[1]})
    close(jax.jit(ours)(X), {"a": want[0], "b": want[1]})


def test_a_loop_in_a_loop_stacks_both() -> None:
    def f(tap: Any, x: Any) -> Any:
        inner = lambda h, e: (jnp.sin(tap(h * 1.1, "h", e)), None)
        outer = lambda h, es: (lax.scan(inner, h, es)[0] * x, None)
        return jnp.sum(lax.scan(jax.checkpoint(outer), x, np.zeros((2, 4, 3)))[0])

    def added(es: Any) -> Any:
        inner = lambda h, e: (jnp.sin(h * 1.1 + e), None)
        outer = lambda h, es: (lax.scan(inner, h, es)[0] * X, None)
        return jnp.sum(lax.scan(outer, X, es)[0])

    ours = xform.adjoints.partials(
        functools.partial(f, lambda v, n, _: xform.adjoints.name(v, n)), "h"
    )(X)
    close(ours, jax.grad(added)(jnp.zeros((2, 4, 3))))


def test_a_region_with_a_policy_in_a_loop() -> None:
    """If a region's policy saves a name in a loop, the gradient there is that of the loop."""

    def f(x: Any) -> Any:
        keeps = jax.checkpoint_policies.save_only_these_names("h")
        layer = lambda x, _: (jnp.cos(xform.adjoints.name(jnp.sin(x), "h") ** 2), None)
        return jnp.sum(lax.scan(jax.checkpoint(layer, policy=keeps), x, None, 3)[0])

    def added(es: Any) -> Any:
        return jnp.sum(lax.scan(lambda x, e: (jnp.cos((jnp.sin(x) + e) ** 2), None), X, es)[0])

    close(jax.jit(xform.adjoints.partials(f, "h"))(X), jax.grad(added)(jnp.zeros((3, 3))))


def test_a_body_with_a_rule_of_its_own() -> None:
    """Inside the body the gradient is the body's; paths that enter and leave it use the rule."""

    @jax.custom_vjp
    def odd(x: Any) -> Any:
        return xform.adjoints.name(x * 3.0, "inside") ** 2

    odd.defvjp(lambda x: (odd(x), None), lambda _, ct: (7.0 * ct,))

    @jax.custom_jvp
    def even(x: Any) -> Any:
        return xform.adjoints.name(jnp.sin(x), "deep") * x

    even.defjvp(lambda xs, dxs: (even(*xs), 5.0 * dxs[0]))

    def f(x: Any) -> Any:
        return jnp.sum(
            odd(xform.adjoints.name(x, "before")) * even(xform.adjoints.name(2 * x, "twice"))
        )

    got = xform.adjoints.partials(f, ["before", "inside", "twice", "deep"])(X)
    a, b = (3 * X) ** 2, np.sin(2 * X) * 2 * X
    close(got, [7 * b, 2 * (3 * X) * b, 5 * a, 2 * X * a])


def test_one_name_given_twice_is_a_list() -> None:
    def layers(x: Any) -> Any:
        for n in (3, 2):
            x = xform.adjoints.name(jnp.tanh(x[:n] * 2), "h")
        return jnp.sum(x**2)

    first, second = xform.adjoints.partials(layers, "h")(X)
    h = np.tanh(2 * X)
    out = np.tanh(2 * h[:2])
    close(second, 2 * out)
    close(first, np.append(2 * out * (1 - out**2) * 2, 0.0))


def test_a_call_made_twice_is_two_values() -> None:
    inner = jax.jit(lambda x: xform.adjoints.name(jnp.sin(x), "h"))
    got = xform.adjoints.partials(lambda x: jnp.sum(inner(x) * inner(2 * x)), "h")(X)
    close(got, [np.sin(2 * X), np.sin(X)])


def test_each_leaf_of_a_tree_has_the_name() -> None:
    def f(x: Any) -> Any:
        t = xform.adjoints.name({"a": x * 2, "b": x.sum()}, "t")
        return jnp.sum(t["a"]) * t["b"]

    close(xform.adjoints.partials(f, "t")(X), [np.full(3, X.sum()), np.asarray(2 * X.sum())])


def test_nonarray_arguments_are_constants_and_aux_is_returned() -> None:
    def f(x: Any, how: str, *, times: float = 1.0) -> Any:
        h = xform.adjoints.name(getattr(jnp, how)(x), "h")
        return times * jnp.sum(h**2), {"how": how, "h": h}

    g, aux = xform.adjoints.partials(f, "h", has_aux=True)(X, "sin", times=2.0)
    close(g, 4 * np.sin(X))
    assert aux["how"] == "sin"
    close(aux["h"], np.sin(X))
    close(xform.adjoints.partials(f, "h", has_aux=True, via=0)(X, "sin")[0], 2 * np.sin(X))


def test_arguments_may_be_anything() -> None:
    f = jax.jit(
        lambda x, n, how: jnp.sum(xform.adjoints.name(getattr(jnp, how)(x), "h") ** n),
        static_argnums=(1, 2),
    )
    close(xform.adjoints.partials(f, "h")(X, 3, "sin"), 3 * np.sin(X) ** 2)
    close(
        jax.jit(xform.adjoints.partials(f, "h"), static_argnums=(1, 2))(X, 3, "sin"),
        3 * np.sin(X) ** 2,
    )


def test_a_module_of_flax_that_writes_its_state() -> None:
    nnx = pytest.importorskip("flax.nnx")
    norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    parts = nnx.split(norm)

    def loss(state: Any, x: Any) -> Any:
        return jnp.sum(xform.adjoints.name(nnx.merge(parts[0], state)(x), "h") ** 2)

    x = np.stack([X, 2 * X, -X]).astype(np.float32)
    want = 2 * nnx.merge(*parts)(x)
    close(xform.adjoints.partials(loss, "h")(parts[1], x), want, 1e-5)
    close(jax.jit(xform.adjoints.partials(loss, "h"))(parts[1], x), want, 1e-5)


def test_where_the_function_differentiates_itself() -> None:
    """A saved value is read twice. A recomputed value counts as two, and one of them is dead."""
    inner = lambda x: jnp.sum(xform.adjoints.name(jnp.sin(x), "h") ** 3)
    want = 6 * np.sin(X) * np.cos(X)
    keeps = xform.policies.save_only_these_names("h")
    for grad in (jax.grad(inner), xform.grad(inner, policy=keeps)):
        close(xform.adjoints.partials(lambda x, grad=grad: jnp.sum(grad(x)), "h")(X), want)
    again = xform.grad(inner, policy=xform.policies.save_nothing)
    with pytest.raises(NotDifferentiable, match="no path"):
        xform.adjoints.partials(lambda x: jnp.sum(again(x)), "h")(X)


def test_second_derivatives() -> None:
    """The gradient at a name can be differentiated by xform's and by JAX's transforms."""
    f = functools.partial(plain, xform.adjoints.name)
    for transform in (xform, jax):
        got = transform.grad(lambda x: jnp.sum(xform.adjoints.partials(f, "h")(x)))(X)
        want = jax.grad(lambda x: jnp.sum(2 * jnp.sin(x) + jnp.exp(jnp.sin(x)) * x))(X)
        close(got, want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(dtype: str) -> None:
    x = jnp.asarray(X, dtype)
    got = xform.adjoints.partials(
        lambda x: jnp.sum(xform.adjoints.name(jnp.sin(x), "h") ** 2), "h"
    )(x)
    assert got.dtype == dtype
    np.testing.assert_allclose(got, 2 * jnp.sin(x), rtol=0.02)


@pytest.mark.parametrize("shape", [(0,), (0, 3), ()])
def test_empty_values_and_scalars(shape: tuple[int, ...]) -> None:
    x = jnp.zeros(shape) + 0.5
    close(
        xform.adjoints.partials(lambda x: jnp.sum(xform.adjoints.name(2 * x, "h") ** 2), "h")(x),
        4 * x,
    )


def test_numbers_of_python_and_numpy() -> None:
    f = lambda x: xform.adjoints.name(x * 2, "h") ** 2
    assert float(xform.adjoints.partials(f, "h")(1.5)) == 6.0
    assert float(xform.adjoints.partials(f, "h")(np.float32(1.5))) == 6.0


def test_values_are_the_functions_own_bit_for_bit() -> None:
    """`partials` adds nothing to the value: signed zeros and infinities stay the same."""
    x = jnp.array([-0.0, jnp.inf, 2.0])
    f = lambda x: (jnp.sum(xform.adjoints.name(x, "h")), 1 / xform.adjoints.name(x, "k"))
    _, aux = xform.adjoints.partials(f, "h", has_aux=True)(x)
    assert float(aux[0]) == -np.inf


def test_flops_equal_those_of_the_gradient_after_the_named_value() -> None:
    def layer(h: Any, w: Any) -> Any:
        return jnp.tanh(h @ w)

    def rest(h: Any, ws: Any) -> Any:
        return jnp.sum(lax.scan(lambda h, w: (layer(h, w), None), h, ws)[0])

    x, ws = jnp.ones((8, 16)), jnp.ones((5, 16, 16))
    ours = xform.adjoints.partials(
        lambda x, ws: rest(xform.adjoints.name(jnp.sin(x), "h"), ws), "h"
    )
    hand = lambda x, ws: xform.grad(rest)(jnp.sin(x), ws)
    count = lambda f: flops(trace(lambda *xs: [jax.jit(f)(*xs)], x, ws))
    assert count(ours) == count(hand)
    close(ours(x, ws), hand(x, ws))


def test_inside_shard_map() -> None:
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    ours = jax.shard_map(
        xform.adjoints.partials(functools.partial(plain, xform.adjoints.name), "h"),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
    )
    x = np.linspace(-1, 1, 8)
    close(jax.jit(ours)(x), by_hand(plain)(x))
