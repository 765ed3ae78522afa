"""Functions with custom derivative rules run in slices, and keep their rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax.losses
import pytest
from jax import lax

import xform
from tests.slices.test_loop import largest, normal
from tests.slices.test_region import around_largest, f32, leaves, names
from xform.program.fingerprint import fingerprint
from xform.program.ir import evaluate, trace
from xform.slices.candidates import choices
from xform.slices.loop import run_in_slices
from xform.slices.opened import opened
from xform.slices.region import find_region
from xform.slices.rewrite import with_loop


def rule(f: Callable[..., Any], forward: Any, backward: Any, **options: Any) -> Any:
    """Return a function with a `custom_vjp` rule."""
    with_rule = jax.custom_vjp(f)
    with_rule.defvjp(forward, backward, **options)
    return with_rule


def close(got: Any, want: Any) -> None:
    check = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    jax.tree.map(check, tuple(got), tuple(want))


def labels(rows: int, words: int) -> Any:
    return jnp.asarray(np.random.default_rng(3).integers(0, words, rows), "int32")


def _cross_entropy(logits: Any, targets: Any, z_loss: Any) -> Any:
    log_z = jax.nn.logsumexp(logits, -1)
    return log_z - jnp.sum(targets * logits, -1) + z_loss * log_z**2, z_loss * log_z**2


def _cross_entropy_forward(logits: Any, targets: Any, z_loss: Any) -> Any:
    top = logits.max(-1, keepdims=True)
    exps = jnp.exp(logits - top)
    total = exps.sum(-1, keepdims=True)
    log_z = jnp.log(total) + top
    z = z_loss * jnp.squeeze(log_z, -1) ** 2
    loss = -jnp.sum(targets * (logits - log_z), -1) + z
    return (loss, z), (targets, z_loss, exps, total, logits - log_z, jnp.squeeze(log_z, -1))


def _cross_entropy_backward(residuals: Any, cts: Any) -> Any:
    targets, z_loss, exps, total, log_softmax, log_z = residuals
    scale = jnp.expand_dims(1 + 2 * z_loss * log_z, -1)
    d_logits = jnp.expand_dims(cts[0], -1) * (scale * exps / total - targets)
    return d_logits, -jnp.expand_dims(cts[0], -1) * log_softmax, jnp.array(0.0)


# The loss of T5X and MaxText, with its rule.
cross_entropy = rule(_cross_entropy, _cross_entropy_forward, _cross_entropy_backward)


def t5x_loss(w: Any, h: Any, y: Any) -> Any:
    loss, _ = cross_entropy(h @ w, jax.nn.one_hot(y, w.shape[1]), 1e-4)
    return loss.mean()


def _fused(w: Any, h: Any, y: Any) -> Any:
    logits = h @ w
    picked = jnp.take_along_axis(logits, y[:, None], 1)[:, 0]
    return (jax.nn.logsumexp(logits, -1) - picked).mean()


def _fused_backward(residuals: Any, ct: Any) -> Any:
    """Return three times the gradient of the weights, to tell the rule from the derivative."""
    w, h, y = residuals
    d = (jax.nn.softmax(h @ w) - jax.nn.one_hot(y, w.shape[1])) * ct / len(y)
    return 3 * (h.T @ d), d @ w.T, None


# A layer and its loss in one function, whose logits never leave it.
fused = rule(_fused, lambda *xs: (_fused(*xs), xs), _fused_backward)


def _attention(q: Any, k: Any, v: Any) -> Any:
    return _attention_forward(q, k, v)[0]


def _attention_forward(q: Any, k: Any, v: Any) -> Any:
    """Attention over chunks of keys with a running maximum, as in FlashAttention."""

    def step(carry: Any, kv: Any) -> Any:
        out, total, top = carry
        scores = jnp.einsum("bqd,bkd->bqk", q, kv[0])
        new_top = jnp.maximum(top, scores.max(-1))
        weights, old = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
        out = out * old[..., None] + jnp.einsum("bqk,bkd->bqd", weights, kv[1])
        return (out, total * old + weights.sum(-1), new_top), None

    zeros = jnp.zeros(q.shape[:2])
    (out, total, top), _ = lax.scan(step, (jnp.zeros_like(q), zeros, zeros - 1e9), _chunks(k, v))
    out, log_z = out / total[..., None], top + jnp.log(total)
    return out, (q, k, v, out, log_z)


def _attention_backward(residuals: Any, ct: Any) -> Any:
    q, k, v, out, log_z = residuals
    mean = (out * ct).sum(-1)

    def step(dq: Any, kv: Any) -> Any:
        weights = jnp.exp(jnp.einsum("bqd,bkd->bqk", q, kv[0]) - log_z[..., None])
        d = weights * (jnp.einsum("bqd,bkd->bqk", ct, kv[1]) - mean[..., None])
        dkv = jnp.einsum("bqk,bqd->bkd", d, q), jnp.einsum("bqk,bqd->bkd", weights, ct)
        return dq + jnp.einsum("bqk,bkd->bqd", d, kv[0]), dkv

    dq, (dk, dv) = lax.scan(step, jnp.zeros_like(q), _chunks(k, v))
    joined = lambda x: x.transpose(1, 0, 2, 3).reshape(k.shape)
    return dq, joined(dk), joined(dv)


def _chunks(*xs: Any) -> Any:
    return tuple(x.reshape(len(x), -1, 4, x.shape[-1]).transpose(1, 0, 2, 3) for x in xs)


flash_attention = rule(_attention, _attention_forward, _attention_backward)


def flash_loss(q: Any, k: Any, v: Any) -> Any:
    return jnp.sum(jnp.sin(flash_attention(jnp.tanh(q), k, v)))


LAYER = normal(4, 32), normal(16, 4, seed=1), labels(16, 32)
LOSSES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]] = {
    "T5X's cross-entropy": (t5x_loss, LAYER, (0, 1)),
    "a layer with its loss": (fused, LAYER, (0, 1)),
    "flash attention": (flash_loss, tuple(normal(8, 8, 4, seed=i) for i in range(3)), (0, 1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_by_the_users_rule(name: str) -> None:
    f, args, argnums = LOSSES[name]
    prog = opened(trace(lambda *xs: [f(*xs)], *args))
    region = choices(prog)[0].regions[0]
    assert "custom_vjp_call" in names(region)
    assert leaves(region) == [((), None)]
    new = with_loop(region, run_in_slices)
    g = lambda *xs: evaluate(new, xs)[0]
    close([jax.jit(g)(*args)], [f(*args)])
    want = jax.grad(f, argnums)(*args)
    for lib in (jax, xform):
        close(jax.jit(lib.grad(g, argnums))(*args), want)
        close(lib.grad(g, argnums)(*args), want)


@pytest.mark.parametrize("name", ["T5X's cross-entropy", "a layer with its loss"])
def test_a_budget_and_a_function_in_slices(name: str) -> None:
    f = LOSSES[name][0]
    args = normal(32, 2048), normal(512, 32, seed=1), labels(512, 2048)
    total = lambda f: xform.memory_analysis(f, *args).total_bytes or 0
    assert total(f) > 4 * 2**20
    small = xform.sliced(f, "1 MiB")
    assert 0 < total(small) <= 2**20
    close([small(*args)], [f(*args)])
    plan = xform.plan(f, *args, policy="slices:budget:2MiB")
    assert "value and gradient in one loop" in plan.sliced_regions[0]
    assert 0 < total(xform.grad(f, policy=plan)) <= 2 * 2**20
    close([jax.jit(xform.grad(f, policy=plan))(*args)], [jax.grad(f)(*args)])


def test_forward_mode_is_an_error_as_without_slices() -> None:
    _, g, xs = largest(t5x_loss, *LOSSES["T5X's cross-entropy"][1])
    tangents = [x if x.dtype == jnp.float32 else np.zeros(x.shape, jax.dtypes.float0) for x in xs]
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(g, xs, tangents)


def test_a_cotangent_that_each_slice_makes_alike_counts_once() -> None:
    """The rule says that the derivative of the scale is the cotangent, whatever the rows."""
    f = rule(lambda x, s: jnp.sum(jnp.sin(x) * s), lambda x, s: (jnp.sum(jnp.sin(x) * s), (x, s)),
             lambda saved, ct: (ct * saved[1] * jnp.cos(saved[0]), 5 * ct))  # fmt: skip
    loss = lambda x, s: f(x * 2, s)
    _, g, xs = largest(loss, normal(8, 4), jnp.float32(3))
    for lib in (jax, xform):
        close(lib.grad(lambda *xs: g(*xs)[0], (0, 1))(*xs), jax.grad(loss, (0, 1))(*xs))


def _scaled(backward: Any) -> Any:
    """Return `x @ w` with a backward function for `w`."""
    both = lambda x, w: (x @ w, (x, w))
    return rule(lambda x, w: x @ w, both, lambda s, ct: (ct @ s[1].T, backward(s[0].T @ ct)))


@pytest.mark.parametrize(
    ("backward", "sliced"),
    [
        (lambda dw: -dw.astype("bfloat16").astype("float32") / 4, True),
        (lambda dw: 2 * dw + dw, True),
        (lambda dw: dw / jnp.linalg.norm(dw), False),
        (lambda dw: jnp.clip(dw, -1, 1), False),
        (lambda dw: dw + 1, False),
        (lambda dw: dw * dw, False),
    ],
)
def test_a_cotangent_may_be_a_linear_function_of_a_sum(backward: Any, sliced: bool) -> None:
    matmul = _scaled(backward)
    f = lambda x, w: jnp.sum(jnp.tanh(matmul(x, w)))
    region = around_largest(f, f32(16, 4), f32(4, 32))
    assert ("custom_vjp_call" in names(region)) == sliced


def _printing(saved: Any, ct: Any) -> Any:
    jax.debug.print("{}", ct.sum())
    return (ct * jnp.cos(saved),)


def test_rules_that_are_not_sliced() -> None:
    forward = lambda x: (jnp.sin(x), x)
    backward = lambda saved, ct: (ct * jnp.cos(saved),)

    def symbolic(x: Any) -> Any:
        return jnp.sin(x.value), x.value

    def whole(f: Any) -> set[str]:
        return names(around_largest(lambda x: jnp.sum(jnp.exp(f(x))), f32(16, 4)))

    assert "custom_vjp_call" in whole(rule(jnp.sin, forward, backward))
    assert "custom_vjp_call" not in whole(rule(jnp.sin, symbolic, backward, symbolic_zeros=True))
    assert "custom_vjp_call" not in whole(rule(jnp.sin, forward, _printing))
    failing = rule(jnp.sin, forward, lambda saved, ct: ct / "x")
    assert "custom_vjp_call" not in whole(failing)
    sorting = rule(jnp.sin, lambda x: (jnp.sin(x), jnp.sort(x, 0)), backward)
    assert "custom_vjp_call" not in whole(sorting)


OPTAX: dict[str, Callable[..., Any]] = {
    "softmax": lambda x, y: optax.losses.softmax_cross_entropy_with_integer_labels(x, y),
    "one hot": lambda x, y: optax.losses.softmax_cross_entropy(x, jax.nn.one_hot(y, 32)),
    "sigmoid": lambda x, y: optax.losses.sigmoid_binary_cross_entropy(x, jax.nn.one_hot(y, 32)),
    "focal": lambda x, y: optax.losses.sigmoid_focal_loss(x, jax.nn.one_hot(y, 32)),
    "poly": lambda x, y: optax.losses.poly_loss_cross_entropy(x, jax.nn.one_hot(y, 32)),
    "smooth": lambda x, y: optax.losses.safe_softmax_cross_entropy(x, jax.nn.one_hot(y, 32)),
    "huber": lambda x, y: optax.losses.huber_loss(x, jax.nn.one_hot(y, 32)),
    "hinge": lambda x, y: optax.losses.hinge_loss(x, 2 * jax.nn.one_hot(y, 32) - 1),
    "cosine": lambda x, y: optax.losses.cosine_distance(x, jax.nn.one_hot(y, 32)),
    "log cosh": lambda x, y: optax.losses.log_cosh(x, jax.nn.one_hot(y, 32)),
}
ACTIVATIONS = (
    jax.nn.relu, jax.nn.relu6, jax.nn.silu, jax.nn.gelu, jax.nn.elu, jax.nn.selu, jax.nn.glu,
    jax.nn.softplus, jax.nn.softmax, jax.nn.log_softmax, jax.nn.standardize, jax.nn.mish,
    jax.nn.squareplus, jax.nn.log_sigmoid,
)  # fmt: skip


@pytest.mark.parametrize("name", OPTAX)
def test_losses_of_optax(name: str) -> None:
    check_all_rows(lambda x, w, y: OPTAX[name](x @ w, y).sum())


@pytest.mark.parametrize("f", ACTIVATIONS, ids=lambda f: f.__name__)
def test_activations_of_jax(f: Any) -> None:
    check_all_rows(lambda x, w, y: f(x @ w).sum())


def check_all_rows(f: Callable[..., Any]) -> None:
    """Check that a loss runs in slices of rows, as a whole."""
    args = normal(16, 4), normal(4, 32, seed=1), labels(16, 32)
    region, g, xs = largest(f, *args)
    assert leaves(region) == [((), None)]
    close(g(*xs), [f(*args)])


def test_equal_functions_in_slices_have_equal_fingerprints() -> None:
    """A plan on disk names the program that it is for by its fingerprint."""

    def made(f: Any) -> str:
        prog = opened(trace(lambda x, w: [f(x @ w) * 2], normal(16, 4), normal(4, 32)))
        region = find_region(prog, prog.equations[0].outvars[0], 0, 4)
        assert region is not None
        return fingerprint(with_loop(region, run_in_slices))

    for f in (jax.nn.relu, rule(jnp.sin, lambda x: (jnp.sin(x), x), lambda x, ct: (ct * x,))):
        assert made(f) == made(f)
    other = rule(jnp.sin, lambda x: (jnp.sin(x), x), lambda x, ct: (ct * x * 2,))
    assert made(f) != made(other)
