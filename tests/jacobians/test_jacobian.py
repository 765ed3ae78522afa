"""`jacobian`: JAX's values in every mode, for every kind of argument; the best mode is chosen."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests.reference import close
from xform.errors import BudgetInfeasible, WrongArgument, WrongDtype

pytestmark = pytest.mark.usefixtures("x64", "quick_compilation")
MODES = ("auto", "forward", "reverse")


def weights(*sizes: int) -> list[Any]:
    draw = np.random.default_rng(0)
    pairs = itertools.pairwise(sizes)
    return [draw.normal(size=pair) / np.sqrt(pair[0]) for pair in pairs]


def mlp(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w)
    return x


HOURGLASS = weights(5, 24, 3, 24, 6)
X = np.linspace(-1.0, 1.0, 5)


def two_ends(x: Any, y: Any) -> Any:
    """Two inputs of two dtypes, two outputs, and two narrow places."""
    narrow = jnp.tanh(x.astype(y.dtype) @ y.reshape(5, 2))
    wide = jnp.sin(jnp.outer(narrow, jnp.arange(1.0, 6.0)))
    scalar = jnp.sum(wide**2)
    return {"a": scalar * jnp.ones((2, 3)), "b": (jnp.exp(scalar), wide[0] * 0)}


def skips(x: Any) -> Any:
    """Paths around each narrow value except the last."""
    narrow = jnp.stack([x.sum(), x[0] * x[1]])
    return jnp.concatenate([jnp.outer(narrow, x).ravel(), x])


def loop(x: Any) -> Any:
    ws = jnp.stack([jnp.eye(5)] * 3) * 0.7
    narrow = lax.scan(lambda h, w: (jnp.sin(w @ h), None), x, ws)[0][:2]
    return jnp.cumsum(jnp.concatenate([narrow, narrow**2, jnp.exp(narrow)]))


@jax.custom_vjp
def custom(x: Any) -> Any:
    return x**2


custom.defvjp(lambda x: (x**2, x), lambda x, ct: (2 * x * ct,))

CASES: dict[str, tuple[Any, tuple[Any, ...], Any]] = {
    "hourglass": (lambda x: mlp(HOURGLASS, x), (X,), 0),
    "hourglass of batches": (lambda x: mlp(HOURGLASS, x), (np.stack([X, X**2]),), 0),
    "in weights": (mlp, (HOURGLASS, X), 0),
    "in weights and inputs": (mlp, (HOURGLASS, X), (0, 1)),
    "two ends": (two_ends, (X.astype(np.float32), np.arange(10.0)), (0, 1)),
    "second of two ends": (two_ends, (X, np.arange(10.0)), -1),
    "skips": (skips, (X,), 0),
    "loop": (loop, (X,), 0),
    "scalar input": (lambda x: jnp.sin(x) * jnp.arange(3.0), (0.3,), 0),
    "scalar output": (lambda x: jnp.sum(mlp(HOURGLASS, x)), (X,), 0),
    "scalars": (lambda x: x**3, (2.0,), 0),
    "identity": (lambda x: x, (X,), 0),
    "constant": (lambda x: jnp.ones(3), (X,), 0),
    "partly constant": (lambda x: (x.sum() * jnp.ones(2), jnp.ones(3), 1.0), (X,), 0),
    "unused argument": (lambda x, y: jnp.tanh(x.sum()) * jnp.ones(4), (X, X), (0, 1)),
    "empty input": (lambda x: jnp.ones(3) * x.sum(), (np.zeros((0, 2)),), 0),
    "empty output": (lambda x: x[:0], (X,), 0),
    "empty between": (lambda x: x[:0].sum() * jnp.ones(3), (X,), 0),
    "no outputs": (lambda x: (), (X,), 0),
    "stopped": (lambda x: lax.stop_gradient(x.sum()) * jnp.sin(x), (X,), 0),
    "stopped after a cut": (
        lambda x: (lambda n: n * lax.stop_gradient(n) * jnp.ones(4))(jnp.tanh(x.sum())),
        (X,),
        0,
    ),
    "argmax": (lambda x: jnp.where(jnp.argmax(x) == 4, jnp.exp(x[:2]), 0.0).sum() * x[:0].sum()
               + jnp.ones(3) * jnp.tanh(x.sum()), (X,), 0),
    "python number": (lambda x: jnp.sin(x * 2), (3.0,), 0),
    "jitted layers": (
        lambda x: jax.jit(mlp)(HOURGLASS[2:], jax.jit(mlp)(HOURGLASS[:2], x)), (X,), 0),
    "remat": (lambda x: jax.checkpoint(lambda x: mlp(HOURGLASS, x))(x), (X,), 0),
    "relu": (lambda x: jax.nn.relu(jax.nn.relu(x @ HOURGLASS[0]) @ HOURGLASS[1]) @ HOURGLASS[2],
             (X,), 0),
    "fft inside": (lambda x: jnp.real(jnp.fft.ifft(jnp.fft.fft(x)[:2] * 1j, 5)), (X,), 0),
    "complex scalar between": (
        lambda x: jnp.abs(jnp.sum(x * (1 + 2j)) ** 2) * jnp.ones(3), (X,), 0),
    "while": (lambda x: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.sin(s[1])),
                                       (0, x[:2]))[1].sum() * jnp.ones(3), (X,), 0),
    "contract two axes": (
        lambda x: jnp.einsum("ij,jik->k", x, np.ones((3, 2, 4))), (np.ones((2, 3)),), 0),
    "batched product": (
        lambda x: jnp.einsum("bij,bjk->bik", x, np.linspace(0, 1, 24).reshape(2, 3, 4)),
        (np.ones((2, 2, 3)),), 0),
    "product from the left": (lambda x: np.ones((2, 3)) @ x, (np.ones((3, 4)),), 0),
}  # fmt: skip


EAGER = ("hourglass", "two ends", "skips", "loop", "identity", "partly constant", "empty input")


@pytest.mark.parametrize("name", CASES)
def test_values_are_jaxs(name: str) -> None:
    f, args, argnums = CASES[name]
    ours = {mode: xform.jacobian(f, argnums, mode=mode) for mode in MODES}
    if not jax.tree.leaves(jax.eval_shape(f, *args)):  # JAX has only forward mode for this
        reference = jax.jacfwd
    else:
        reference = jax.jacfwd if name == "while" else jax.jacrev

    @jax.jit
    def all_of(*args):
        return reference(f, argnums)(*args), {mode: j(*args) for mode, j in ours.items()}

    want, got = all_of(*args)
    for mode in MODES:
        close(got[mode], want)
    if name in EAGER:
        got, want = ours["auto"](*args), reference(f, argnums)(*args)
        close(got, want)
        assert jax.tree.all(jax.tree.map(lambda a, b: a.weak_type == b.weak_type, got, want))


@pytest.mark.parametrize("name", ["hourglass", "two ends", "in weights and inputs", "loop"])
def test_chunks(name: str) -> None:
    f, args, argnums = CASES[name]
    ways = [(mode, chunk) for mode in MODES for chunk in (1, 2, 100)]

    @jax.jit
    def all_of(*args):
        return [xform.jacobian(f, argnums, mode=m, chunk=c)(*args) for m, c in ways]

    want = jax.jit(jax.jacrev(f, argnums))(*args)
    for got in all_of(*args):
        close(got, want)


def test_the_chain_is_taken_and_explained() -> None:
    f, args, _ = CASES["hourglass"]
    said = xform.jacobian.explain(f, *args)
    assert said.chosen == "mixed"
    assert said.flops["mixed"] < min(said.flops["forward"], said.flops["reverse"])
    assert " x " in said.order
    assert sum(step.flops for step in said.steps) == said.flops["mixed"]
    assert [v.elements for v in said.values if v.name == "dot_general"] == [24, 3, 24, 6]
    text = str(said)
    assert "jacobian of <lambda>" in text
    assert "test_jacobian.py" in text
    for name in ("forward", "reverse", "mixed"):
        assert name in text


def test_flops_of_a_linear_hourglass() -> None:
    ws = weights(10, 512, 8, 512, 10)

    def linear(x):
        for w in ws:
            x = x @ w
        return x

    said = xform.jacobian.explain(linear, jax.ShapeDtypeStruct((10,), jnp.float64))
    assert said.flops == {"forward": 266_240, "reverse": 266_240, "mixed": 165_440}


@pytest.mark.parametrize(("name", "mode"), [
    ("scalar output", "reverse"), ("scalar input", "forward"), ("identity", "reverse"),
])  # fmt: skip
def test_where_nothing_is_narrower_one_mode_is_taken(name: str, mode: str) -> None:
    f, args, argnums = CASES[name]
    assert xform.jacobian.explain(f, *args, argnums=argnums).chosen == mode


def test_functions_with_custom_vjp_use_reverse_mode_only() -> None:
    f = lambda x: custom(x[:1]) * jnp.ones(40)
    close(xform.jacobian(f)(X), jax.jacrev(f)(X))
    assert xform.jacobian.explain(f, X).flops["forward"] == float("inf")
    with pytest.raises(TypeError, match="custom_vjp"):
        xform.jacobian(f, mode="forward")(X)


def test_composed_with_other_transforms() -> None:
    f = lambda x: mlp(HOURGLASS, x)
    xs = np.stack([X, X[::-1], X**2])
    total = lambda j: lambda x: jnp.sum(jnp.sin(j(x)))

    @jax.jit
    def all_of(xs):
        ours, theirs = xform.jacobian(f), jax.jacobian(f)
        pairs = [
            (jax.vmap(ours)(xs), jax.vmap(theirs)(xs)),
            (lax.map(ours, xs), jax.vmap(theirs)(xs)),
        ]
        want = jax.grad(total(theirs))(xs[0])
        pairs += [(t.grad(total(ours))(xs[0]), want) for t in (xform, jax)]
        return [*pairs, (xform.jacobian(ours)(xs[0]), jax.jacobian(theirs)(xs[0]))]

    for got, want in all_of(xs):
        close(got, want)
    close(jax.vmap(xform.jacobian(f))(xs[:2]), jax.vmap(jax.jacobian(f))(xs[:2]))


def test_python_that_looks_at_values() -> None:
    f = lambda x: jnp.sin(x) if x[0] > 0 else jnp.cos(x)
    close(xform.jacobian(f)(X), jax.jacobian(f)(X))
    close(xform.jacobian(f, mode="forward")(X), jax.jacobian(f)(X))


def test_auxiliary_output_integers_complex_numbers_and_keywords() -> None:
    f = lambda x, *, s: (mlp(HOURGLASS, x) * s, {"x": x * 2, "n": 3, "name": "aux"})
    got, want = (t.jacobian(f, has_aux=True)(X, s=2.0) for t in (xform, jax))
    close(got[0], want[0])
    assert got[1].pop("name") == want[1].pop("name")
    close(got[1], want[1])
    g = lambda x, n: x * n
    got = xform.jacobian(g, (0, 1), allow_int=True)(X, np.arange(5))
    close(got[0], jax.jacobian(g)(X, np.arange(5)))
    assert (got[1].shape, got[1].dtype) == ((5, 5), jax.dtypes.float0)
    z = X + 1j * X[::-1]
    h = lambda z: jnp.exp(z @ HOURGLASS[0] @ HOURGLASS[1]) @ HOURGLASS[2] @ HOURGLASS[3]
    close(xform.jacobian(h, holomorphic=True)(z), jax.jacobian(h, holomorphic=True)(z))
    assert xform.jacobian.explain(h, z, holomorphic=True).chosen == "mixed"
    real = lambda z: jnp.real(z * jnp.conj(z))
    close(xform.jacobian(real)(z), jax.jacobian(real)(z))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_narrow_dtypes(dtype: Any) -> None:
    f = lambda x: mlp([w.astype(dtype) for w in HOURGLASS], x)
    with jax.numpy_dtype_promotion("strict"):
        got = xform.jacobian(f)(X.astype(dtype))
    assert got.dtype == dtype
    exact = jax.jacobian(lambda x: mlp(HOURGLASS, x))(X)
    assert np.abs(got.astype(np.float64) - exact).max() < 8 * float(jnp.finfo(dtype).eps)


def test_nan_stays() -> None:
    x = X.copy()
    x[2] = np.nan
    f = CASES["hourglass"][0]
    close(np.isnan(xform.jacobian(f)(x)), np.isnan(jax.jacobian(f)(x)))


def test_within_a_shard_map() -> None:
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    f = lambda x: mlp(HOURGLASS, x[0])
    xs = np.linspace(-1, 1, 40).reshape(8, 5)
    both = [jax.shard_map(lambda x, t=t: t.jacobian(f)(x)[None], mesh=mesh, in_specs=spec,
                          out_specs=spec) for t in (xform, jax)]  # fmt: skip
    close(jax.jit(both[0])(xs), jax.jit(both[1])(xs))


@pytest.mark.parametrize("check_vma", [True, False])
def test_across_the_devices_of_a_shard_map(check_vma: bool) -> None:
    """A sum over devices between two narrow values: products of the parts' Jacobians are wrong."""
    first, second = HOURGLASS[:2]

    def f(x: Any) -> Any:
        total = jax.lax.psum(jnp.tanh(x[0] @ first), "d")
        return jnp.tanh(jnp.sin(total) @ second) * (1.0 + jax.lax.axis_index("d"))

    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    xs = np.linspace(-1, 1, 8 * first.shape[0]).reshape(8, -1)
    spec = jax.sharding.PartitionSpec("d")
    run = lambda t: jax.shard_map(lambda x: t.jacobian(f)(x)[None], mesh=mesh, in_specs=spec,
                                  out_specs=spec, check_vma=check_vma)  # fmt: skip
    close(*jax.jit(lambda xs: (run(xform)(xs), run(jax)(xs)))(xs))


def test_a_long_chain() -> None:
    f = lambda x: mlp([np.eye(3) * 1.1] * 150, x)
    x = np.ones(3) * 0.1
    close(jax.jit(xform.jacobian(f))(x), jax.jacobian(f)(x))


def bytes_of(f: Any, *args: Any) -> int:
    return xform.memory_analysis(f, *args).total_bytes or 0


def test_a_budget_holds_as_compiled() -> None:
    f = lambda x: jnp.sum(jnp.sin(jnp.outer(x, jnp.arange(512.0))), 1)
    x = jax.ShapeDtypeStruct((64,), jnp.float64)
    most = bytes_of(xform.jacobian(f), x)
    for share in (0.5, 0.1):
        budget = int(most * share)
        ours = jax.jit(xform.jacobian(f, policy=xform.policies.budget(budget)))
        assert bytes_of(ours, x) <= budget
    close(ours(np.linspace(0, 1, 64)), jax.jacobian(f)(np.linspace(0, 1, 64)))
    said = xform.jacobian.explain(f, x, policy=xform.policies.budget(budget))
    assert said.chunk is not None
    with pytest.raises(BudgetInfeasible, match="lowest peak") as failed:
        xform.jacobian(f, policy=xform.policies.budget("10 kB"))(np.ones(64))
    assert failed.value.floor_bytes >= 64 * 64 * 8


def test_invalid_options_and_nonreal_inputs_or_outputs_raise() -> None:
    for wrong in ({"mode": "sideways"}, {"chunk": 0}, {"chunk": 1.5}, {"policy": 3}):
        with pytest.raises(WrongArgument):
            xform.jacobian(jnp.sin, **wrong)
    for inputs, options in (((np.arange(3),), {}), ((X + 1j,), {"mode": "forward"}),
                            ((X,), {"holomorphic": True})):  # fmt: skip
        with pytest.raises(WrongDtype):
            xform.jacobian(jnp.sin, **options)(*inputs)
    with pytest.raises(WrongDtype):
        xform.jacobian(lambda x: jnp.argmax(x))(X)


@pytest.mark.parametrize("chunk", [None, 2])
def test_strict_dtypes(chunk: int | None) -> None:
    with jax.numpy_dtype_promotion("strict"):
        got = xform.jacobian(jnp.sin, mode="forward", chunk=chunk)(X)
    close(got, jnp.diag(jnp.cos(X)))
