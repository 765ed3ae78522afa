"""A message has one clear line for the cause and one for the remedy: golden texts and sweeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from xform import errors, policies

X = np.array([0.3, -0.7, 1.1], np.float32)
KEY = jax.random.key(0)


def loss(x):
    return jnp.sum(jnp.sin(x) ** 2)


def message(call, kind: type[Exception] = errors.WrongArgument) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# Every public function that takes primals as one argument, and tangents.

PRIMALS = {
    "jvp": lambda xs: xform.jvp(loss, xs, (X,)),
    "hvp": lambda xs: xform.hvp(loss, xs, (X,)),
    "ggnvp": lambda xs: xform.curvature.ggnvp(jnp.sin, loss, xs, (X,)),
    "fisher_vp": lambda xs: xform.curvature.fisher_vp(jnp.sin, "normal", xs, (X,)),
    "hutchinson": lambda xs: xform.curvature.hutchinson(loss, xs, KEY),
    "hessian_spectrum": lambda xs: xform.curvature.hessian_spectrum(loss, xs, KEY),
    "newton_step": lambda xs: xform.curvature.newton_step(loss, xs),
    "natural_gradient_step": lambda xs: xform.curvature.natural_gradient_step(
        jnp.sin, loss, xs, distribution="normal"
    ),
    "filter_jvp": lambda xs: xform.equinox.filter_jvp(loss, xs, (X,)),
}
TANGENTS = {
    "jvp": lambda dxs: xform.jvp(loss, (X,), dxs),
    "hvp": lambda dxs: xform.hvp(loss, (X,), dxs),
    "ggnvp": lambda dxs: xform.curvature.ggnvp(jnp.sin, loss, (X,), dxs),
    "fisher_vp": lambda dxs: xform.curvature.fisher_vp(jnp.sin, "normal", (X,), dxs),
    "filter_jvp": lambda dxs: xform.equinox.filter_jvp(loss, (X,), dxs),
}


@pytest.mark.parametrize("given", [{"w": X}, X, jnp.asarray(X), 3.0, "x", None, iter((X,))],
                         ids=lambda x: type(x).__name__)  # fmt: skip
@pytest.mark.parametrize("name", ["primals", "tangents"])
def test_primals_must_be_a_tuple(name: str, given: object) -> None:
    for asked, call in (PRIMALS if name == "primals" else TANGENTS).items():
        if asked == "filter_jvp":
            pytest.importorskip("equinox")
        short = "x" if name == "primals" else "dx"
        assert message(lambda: call(given)) == (  # noqa: B023
            f"{asked} with {name} of type {type(given).__name__}\n"
            f"  problem: {name} must be a tuple or list with one entry for each argument of the "
            f"function\n  remedy:  for a function of one argument pass {name}=({short},)"
        )


@pytest.mark.parametrize(("key", "said"), [
    (3, "key=3"), (np.int32(3), "key=3"), (None, "a key of type NoneType"),
    ("key", "a key of type str"), (X, "a key of type ndarray"),
    (jax.random.split(KEY), "a key of type PRNGKeyArray"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["hutchinson", "hessian_spectrum"])
def test_a_random_key(name: str, key: object, said: str) -> None:
    number = 3 if said == "key=3" else 0
    assert message(lambda: getattr(xform.curvature, name)(loss, (X,), key)) == (
        f"{name} with {said}\n"
        "  problem: it is not a single JAX random key\n"
        f"  remedy:  pass jax.random.key({number})"
    )


def test_every_kind_of_random_key() -> None:
    for key in (KEY, jax.random.PRNGKey(0), jax.random.key(0, impl="rbg")):
        assert xform.curvature.hutchinson(loss, (X,), key, samples=2).trace.shape == ()


# Policies, and numbers of bytes.


@pytest.mark.parametrize(("amount", "n"), [
    (16e9, 16 * 10**9), ("1e9", 10**9), ("1.5E3 kB", 1_500_000), (np.float32(2.0), 2),
    (np.float64(1e12), 10**12), (np.int64(7), 7), ("1e-3 GB", 10**6),
])  # fmt: skip
def test_numbers_of_bytes(amount: object, n: int) -> None:
    assert policies.budget(amount).bytes == n
    assert policies.fit(reserve=amount).reserve == n
    assert policies.parse(f"budget:{amount}") == policies.budget(amount)


@pytest.mark.parametrize("amount", [
    True, False, np.bool_(True), None, "", "six", "1e999", "9" * 400, float("nan"), float("inf"),
    -1, -1.0, 1.5, "-1", 1j, [1], "1 e9", "e9", b"1",
], ids=repr)  # fmt: skip
def test_no_numbers_of_bytes(amount: object) -> None:
    calls = (policies.budget, policies.fit,
             lambda n: xform.memory_analysis(loss, X, capacity=n or "x"))  # fmt: skip
    for call in calls:
        assert "it is not a number of bytes" in message(lambda: call(amount))  # noqa: B023
    assert message(lambda: policies.budget(True)) == (
        "budget(True)\n"
        "  problem: it is not a number of bytes\n"
        "  remedy:  give a whole number of bytes, or a string such as '6 GiB' or '500 MB'"
    )


def test_a_batch_is_a_number() -> None:
    for batch in (True, 0, 1.5, "8"):
        assert f"batch_size={batch!r} is not a number of examples" in message(
            lambda: policies.budget(8, batch_size=batch)  # noqa: B023
        )


def test_nothing_to_compare() -> None:
    for given in ("policies", "targets"):
        for empty in ([], (), {}):
            options = {"policies": [None], "targets": [None]} | {given: empty}
            assert message(lambda: xform.compare(loss, X, **options)) == (  # noqa: B023
                f"compare of loss with {given}=[]\n"
                "  problem: there is nothing to compare\n"
                f"  remedy:  give at least one, such as {given}=[None]: None is the default"
            )


# A plan of another program.


def scanned(act, n):
    f = lambda w, x: lax.scan(lambda h, w: (act(h @ w), None), x, w)[0].sum()
    return f, (jnp.ones((2, n, n)), jnp.ones((4, n)))


def dotted(precision):
    f = lambda w, x: jnp.sum(jnp.sin(jnp.dot(x, w, precision=precision)))
    return f, (jnp.ones((3, 3)), jnp.ones((4, 3)))


@pytest.mark.parametrize(("then", "now", "argnums", "said"), [
    (scanned(jnp.tanh, 3), scanned(jnp.sin, 3), 0,
     "both have `float32[4,3] = scan`, with different bodies, options or arguments"),
    (scanned(jnp.tanh, 3), scanned(jnp.tanh, 5), 0,
     "the plan has `float32[4,3] = scan`, the program `float32[4,5] = scan`"),
    (scanned(jnp.tanh, 3), scanned(jnp.tanh, 3), 1,
     "both have `float32[4,3] = scan`, with different bodies, options or arguments"),
    (dotted("highest"), dotted("high"), 0, "dot_general with `"),
], ids=["body", "shape", "argnums", "option"])  # fmt: skip
def test_a_plan_of_another_program(then, now, argnums, said) -> None:
    f, args = then
    g, others = now
    made = xform.plan(f, *args, verify=False)
    gradient = jax.jit(xform.grad(g, argnums, policy=made))
    lines = message(lambda: gradient(*others), errors.OtherProgram).splitlines()
    start = "  problem: it was made for another program; the first difference is at equation 0: "
    assert lines[1].startswith(start)
    assert said in lines[1]
    assert len(lines[1]) < 330
    assert "xform_fork" not in lines[1]
