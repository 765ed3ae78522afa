"""Reports about networks and formulas without a loop, and about derivatives in a loss."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.unmodified.reports.report import KEY, Made, Report, dense, layers, normal


def _convolution(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqd,bkd->bqk", q, k) / jnp.sqrt(q.shape[-1])
    mask = jnp.tril(jnp.ones(scores.shape[1:], bool))
    return jax.nn.softmax(jnp.where(mask, scores, -1e9)) @ v


def unrolled_layers() -> Made:
    def loss(params: Any, x: Any) -> Any:
        for qkv, up, down in params:
            x = x + _attention(*jnp.split(x @ qkv, 3, -1))
            x = x + jax.nn.gelu(x @ up) @ down
        return jnp.mean(x**2)

    layer = lambda i: (normal(64, 192, seed=i), normal(64, 256, seed=i), normal(256, 64, seed=i))
    return loss, ([layer(i) for i in range(3)], normal(8, 128, 64))


def checkpointed_layers() -> Made:
    def loss(params: Any, x: Any) -> Any:
        network = jax.checkpoint(lambda p, x: dense(p, x, jax.nn.relu))
        return network(params, x).sum()

    return loss, (layers(*[128] * 9), normal(512, 128))


def checkpoint_for_each_layer() -> Made:
    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(w, x)
        return jnp.sum(x**2)

    return loss, (layers(*[128] * 9), normal(512, 128))


def large_vocabulary() -> Made:
    def loss(w: Any, x: Any, labels: Any) -> Any:
        logs = jax.nn.log_softmax(x @ w)
        return -jnp.mean(jnp.take_along_axis(logs, labels[:, None], 1))

    return loss, (normal(64, 4096), normal(256, 64), jax.random.randint(KEY, (256,), 0, 4096))


def tiled_vocabulary() -> Made:
    def loss(w: Any, x: Any, labels: Any) -> Any:
        def tile(total: Any, rows: Any) -> Any:
            x, labels = rows
            logs = jax.nn.log_softmax(x @ w)
            return total - jnp.sum(jnp.take_along_axis(logs, labels[:, None], 1)), None

        rows = x.reshape(8, 32, 64), labels.reshape(8, 32)
        return lax.scan(jax.checkpoint(tile), 0.0, rows)[0] / 256

    return loss, (normal(64, 4096), normal(256, 64), jax.random.randint(KEY, (256,), 0, 4096))


def one_hot_loss() -> Made:
    def loss(params: Any, x: Any, labels: Any) -> Any:
        logs = jax.nn.log_softmax(dense(params, x, jax.nn.relu))
        return -jnp.mean(jnp.sum(jax.nn.one_hot(labels, 10) * logs, -1))

    return loss, (layers(784, 256, 10), normal(512, 784), jax.random.randint(KEY, (512,), 0, 10))


def masked_loss() -> Made:
    def loss(logits: Any, labels: Any, where: Any) -> Any:
        label_logits = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - label_logits, where=where)

    masks = jax.random.bernoulli(KEY, 0.5, (1024,))
    return loss, (normal(1024, 512), jax.random.randint(KEY, (1024,), 0, 512), masks)


def messages() -> Made:
    def loss(w: Any, x: Any, senders: Any, receivers: Any) -> Any:
        for layer in w:
            sent = jax.nn.relu(jnp.concatenate([x[senders], x[receivers]], -1) @ layer)
            x = x + jax.ops.segment_sum(sent, receivers, 512)
        return jnp.mean(x**2)

    edges = jax.random.randint(KEY, (2, 4096), 0, 512)
    return loss, (normal(2, 64, 32), normal(512, 32), *edges)


def edge_attention() -> Made:
    def loss(w: Any, x: Any, senders: Any, receivers: Any) -> Any:
        h = x @ w[0]
        scores = jax.nn.leaky_relu((h @ w[1][0])[senders] + (h @ w[1][1])[receivers])
        scores = jnp.exp(scores - jax.ops.segment_max(scores, receivers, 512)[receivers])
        weights = scores / (jax.ops.segment_sum(scores, receivers, 512)[receivers] + 1e-9)
        return jnp.mean(jax.ops.segment_sum(weights[:, None] * h[senders], receivers, 512) ** 2)

    edges = jax.random.randint(KEY, (2, 8192), 0, 512)
    return loss, ((normal(64, 64), normal(2, 64)), normal(512, 64), *edges)


def couplings() -> Made:
    def loss(j: Any, states: Any) -> Any:
        sites = jnp.arange(24)
        one = lambda s: j[sites[:, None], sites[None], :, s[None]].sum(1)
        logs = jax.nn.log_softmax(jax.vmap(one)(states))
        return -jnp.mean(jnp.take_along_axis(logs, states[..., None], 2))

    return loss, (normal(24, 24, 21, 21), jax.random.randint(KEY, (16, 24), 0, 21))


def example_gradients() -> Made:
    def loss(w: Any, images: Any) -> Any:
        one = lambda w, x: jnp.sum(jnp.tanh(_convolution(x[None], w)) ** 2)
        grads = jax.vmap(jax.grad(one), (None, 0))(w, images)
        return jnp.mean(jnp.sqrt(jnp.sum(grads**2, (1, 2, 3, 4))))

    return loss, (normal(3, 3, 2, 8), normal(32, 16, 16, 2))


def sampled_convolutions() -> Made:
    def loss(params: Any, spins: Any) -> Any:
        one = lambda x: jax.nn.relu(_convolution(jax.nn.relu(_convolution(x, *w1)), *w2))
        w1, w2 = params[:1], params[1:]
        return -jnp.mean(jax.vmap(lambda x: jnp.sum(one(x[None])) ** 2)(spins)) / 1e4

    return loss, ((normal(3, 3, 1, 8), normal(3, 3, 8, 8)), normal(64, 16, 16, 1))


def patches() -> Made:
    def loss(w: Any, images: Any) -> Any:
        rows = jnp.arange(0, 48, 8)
        cut = lambda x, i, j: lax.dynamic_slice(x, (i, j), (16, 16))
        cuts = jax.vmap(lambda x: jax.vmap(lambda i: jax.vmap(lambda j: cut(x, i, j))(rows))(rows))
        return jnp.mean(jnp.tanh(cuts(images).reshape(-1, 256) @ w) ** 2)

    return loss, (normal(256, 128), normal(16, 64, 64))


def refinement() -> Made:
    def loss(kernels: Any, coarse: Any) -> Any:
        one = lambda i, w: w @ jnp.sin(lax.dynamic_slice_in_dim(coarse, i, 3, 1)).reshape(-1)
        return jnp.sum(jax.vmap(one)(jnp.arange(510), kernels) ** 2)

    return loss, (normal(510, 16, 24), normal(8, 512))


def energy_gradient() -> Made:
    def loss(params: Any, states: Any) -> Any:
        log_psi = lambda x: jnp.sum(jax.nn.log_sigmoid(dense(params, x)), -1)
        flips = states[:, None] * (1 - 2 * jnp.eye(32))
        return jnp.mean(jnp.exp(log_psi(flips) - log_psi(states)[:, None]))

    return loss, (layers(32, 32), jnp.sign(normal(256, 32)))


def jacobian_norm() -> Made:
    def loss(params: Any, x: Any) -> Any:
        jacobian = jax.vmap(jax.jacfwd(lambda x: dense(params, x)))(x)
        return jnp.mean(jacobian**2)

    return loss, (layers(16, 64, 16), normal(128, 16))


def covariances() -> Made:
    def loss(phi: Any) -> Any:
        def one(p: Any) -> Any:
            c = jnp.cos(p[:, None] - p[None])
            return jnp.einsum("ij,jk,kl,li->", c, c @ c, jnp.exp(c), c)

        return jnp.mean(lax.map(one, phi))

    return loss, (normal(64, 64),)


def likelihood_fit() -> Made:
    def loss(params: Any, shapes: Any, counts: Any) -> Any:
        up = jnp.exp(params[:, None, None] * shapes)
        expected = jnp.prod(jnp.where(params[:, None, None] > 0, up, 1 / up), 0)
        return jnp.sum(expected - counts * jnp.log(expected))

    return loss, (normal(20), 0.1 * normal(20, 128, 64), jnp.ones((128, 64)))


def power_flow() -> Made:
    def loss(v: Any, angle: Any, y: Any) -> Any:
        u = v * jnp.exp(1j * angle)
        return jnp.mean(jnp.abs(u * jnp.conj(u @ y)) ** 2)

    return loss, (1 + 0.1 * normal(256, 256), normal(256, 256), lax.complex(*normal(2, 256, 256)))


def normalizing_flow() -> Made:
    def loss(params: Any, x: Any) -> Any:
        total = 0.0
        for shift, scale in params:
            x, total = (x - shift) * jnp.exp(-scale), total + scale.sum()
            x = x + jnp.tanh(x) * 0.1
        return jnp.mean(-0.5 * jnp.sum(x**2, -1)) + total

    return loss, ([(normal(64), 0.1 * normal(64, seed=i)) for i in range(12)], normal(1024, 64))


def oscillator() -> Made:
    def loss(params: Any, ts: Any) -> Any:
        u = lambda t: dense(params, t[None])[0]
        du, ddu = jax.grad(u), jax.grad(jax.grad(u))
        return jnp.mean(jax.vmap(lambda t: ddu(t) + 4 * du(t) + 400 * u(t))(ts) ** 2)

    return loss, (layers(1, 32, 32, 1), jnp.linspace(0, 1, 512))


def poisson_equation() -> Made:
    def loss(params: Any, points: Any) -> Any:
        u = lambda p: dense(params, p)[0]
        laplacian = lambda p: jnp.trace(jax.hessian(u)(p)) + jnp.prod(jnp.sin(jnp.pi * p))
        return jnp.mean(jax.vmap(laplacian)(points) ** 2)

    return loss, (layers(2, 32, 32, 1), jax.random.uniform(KEY, (512, 2)))


def low_rank() -> Made:
    def loss(a: Any) -> Any:
        u, s, v = jnp.linalg.svd(a, full_matrices=False)
        return jnp.sum(((u[:, :8] * s[:8]) @ v[:8] - a) ** 2) + jnp.sum(jnp.log(s))

    return loss, (normal(192, 128),)


def distances() -> Made:
    def loss(positions: Any, shifts: Any) -> Any:
        def one(shift: Any) -> Any:
            d2 = jnp.sum((positions[:, None] - positions[None] + shift) ** 2, -1)
            safe = jnp.where(d2 > 0, d2, 1.0)
            return jnp.sum(jnp.where(d2 > 0, jnp.exp(-jnp.sqrt(safe)), 0.0))

        return jnp.sum(jax.vmap(one)(shifts))

    return loss, (normal(96, 3), jnp.zeros((27, 3)).at[1:].set(normal(26, 3)))


def softplus_layers() -> Made:
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jnp.logaddexp(dense(params, x, jax.nn.softplus), 0.0))

    return loss, (layers(*[128] * 5), normal(1024, 128))


def weights_alone() -> Made:
    @jax.custom_vjp
    def product(w: Any, x: Any) -> Any:
        return x @ w

    product.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, ct: (kept[1].T @ ct, ct @ kept[0].T))

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(product(w, x))
        return jnp.sum(x**2)

    return loss, (layers(*[128] * 5), normal(512, 128))


REPORTS = {
    "unrolled layers": Report("jax-ml/jax#14056", unrolled_layers),
    "checkpointed network": Report("jax-ml/jax#19822", checkpointed_layers),
    "checkpoint for each layer": Report("jax-ml/jax#12792", checkpoint_for_each_layer),
    "large vocabulary": Report("jax-ml/jax#35915", large_vocabulary),
    "tiled vocabulary": Report("AI-Hypercomputer/maxtext#2242", tiled_vocabulary),
    "one-hot labels": Report("google/flax#2051", one_hot_loss),
    "masked loss": Report("google-deepmind/optax#1335", masked_loss),
    "messages on a graph": Report("jax-ml/jax#9831", messages),
    "attention on a graph": Report("FluxML/GeometricFlux.jl#243", edge_attention),
    "couplings of sites": Report("jax-ml/jax#891", couplings),
    "gradients of examples": Report("jax-ml/jax#1606", example_gradients),
    "convolutions of samples": Report("jax-ml/jax#8632", sampled_convolutions),
    "overlapping patches": Report("jax-ml/jax#26263", patches),
    "refinement by slices": Report("jax-ml/jax#14808", refinement),
    "energy of spins": Report("netket/netket#711", energy_gradient),
    "Jacobian in a loss": Report("PlasmaControl/DESC#826", jacobian_norm),
    "covariances": Report("jax-ml/jax#1923", covariances),
    "likelihood fit": Report("jax-ml/jax#4924", likelihood_fit),
    "power flow": Report("pyro-ppl/numpyro#543", power_flow),
    "normalizing flow": Report("jax-ml/jax#5395", normalizing_flow),
    "oscillator": Report("jax-ml/jax#28110", oscillator),
    "Poisson's equation": Report("pytorch/functorch#328", poisson_equation),
    "singular values": Report("jax-ml/jax#2311", low_rank),
    "distances under shifts": Report("jax-ml/jax#4047", distances),
    "softplus layers": Report("jax-ml/jax#2107", softplus_layers),
    "custom product": Report("jax-ml/jax#17496", weights_alone),
}
