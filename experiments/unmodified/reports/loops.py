"""Reports about loops: recurrent networks, solvers, filters, and arrays that a loop updates."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.unmodified.reports.report import KEY, Made, Report, dense, layers, normal


def sum_in_scan() -> Made:
    def loss(x: Any, ys: Any) -> Any:
        step = lambda total, y: (total + x * (y + jnp.ones((256, 256))), None)
        return lax.scan(step, jnp.zeros((256, 256)), ys)[0].mean()

    return loss, (jnp.float32(1), normal(10))


def written_rows() -> Made:
    def loss(xs: Any) -> Any:
        def step(state: Any, _: Any) -> Any:
            i, ys = state
            return (i + 1, lax.dynamic_update_index_in_dim(ys, xs[i] * i**0.5, i, 0)), None

        return lax.scan(step, (0, jnp.zeros_like(xs)), None, length=64)[0][1].sum()

    return loss, (normal(64, 64, 64),)


def copied_rows() -> Made:
    def loss(row: Any) -> Any:
        rows = jnp.concatenate([row[None], jnp.zeros((63, 64, 64))])
        step = lambda rows, i: (rows.at[i].set(jnp.sin(rows[i - 1])), None)
        return jnp.sum(lax.scan(step, rows, jnp.arange(1, 64))[0][-1])

    return loss, (normal(64, 64),)


def rows_if_valid() -> Made:
    def loss(w: Any, n: Any) -> Any:
        def step(rows: Any, i: Any) -> Any:
            new = rows.at[i].set(jnp.tanh(rows[i - 1] @ w))
            return jnp.where(i < n, new, rows), None

        return jnp.sum(lax.scan(step, jnp.ones((24, 64, 64)), jnp.arange(1, 24))[0] ** 2)

    return loss, (normal(64, 64), 20)


def gathered_in_loop() -> Made:
    def loss(xs: Any, order: Any) -> Any:
        def step(state: Any, i: Any) -> Any:
            return state.at[i].set(jnp.sin(xs[order[i]])), None

        return jnp.sum(lax.scan(step, jnp.zeros((64, 4096)), jnp.arange(64))[0] ** 2)

    return loss, (normal(64, 4096), jnp.arange(64)[::-1])


def training_inside() -> Made:
    def loss(params: Any, x: Any, y: Any) -> Any:
        inner = lambda p: jnp.mean((dense(p, x) - y) ** 2)
        step = lambda p, _: (jax.tree.map(lambda a, g: a - 0.1 * g, p, jax.grad(inner)(p)), None)
        return inner(lax.scan(step, params, None, length=8)[0])

    return loss, (layers(64, 128, 16), normal(256, 64), normal(256, 16))


def linear_loop() -> Made:
    def loss(x: Any, scale: Any) -> Any:
        return jnp.sum(lax.scan(lambda c, _: (c * scale, None), x, None, length=50)[0] ** 2)

    return loss, (normal(512, 512), normal(512, 512))


def named_residual() -> Made:
    def loss(w: Any, x: Any) -> Any:
        name = jax.ad_checkpoint.checkpoint_name
        policy = jax.checkpoint_policies.save_only_these_names("hidden")
        layer = lambda x, w: x + jax.nn.gelu(name(x @ w, "hidden"))
        step = jax.checkpoint(lambda x, w: (layer(x, w), None), policy=policy)
        return jnp.mean(lax.scan(step, x, w)[0] ** 2)

    return loss, (normal(8, 128, 128) / 4, normal(512, 128))


def bounded_loop() -> Made:
    def loss(w: Any, x: Any, n: Any) -> Any:
        def step(x: Any, i: Any) -> Any:
            return lax.cond(i < n, lambda x: jnp.tanh(x @ w), lambda x: x, x), None

        def block(x: Any, start: Any) -> Any:
            run = lambda x: lax.scan(step, x, start + jnp.arange(8))[0]
            return lax.cond(start < n, run, lambda x: x, x), None

        return jnp.sum(lax.scan(block, x, jnp.arange(0, 32, 8))[0] ** 2)

    return loss, (normal(64, 64), normal(256, 64), 20)


def euler_until() -> Made:
    def loss(params: Any, y: Any, stop: Any) -> Any:
        def step(state: Any, _: Any) -> Any:
            y, t = state
            move = lambda y: y + 0.1 * dense(params, y)
            return (lax.cond(t < stop, move, lambda y: y, y), t + 0.1), None

        return jnp.mean(lax.scan(step, (y, 0.0), None, length=40)[0][0] ** 2)

    return loss, (layers(32, 64, 32), normal(128, 32), 3.0)


def rollout() -> Made:
    def loss(controls: Any, a: Any, b: Any) -> Any:
        def step(i: Any, state: Any) -> Any:
            x, cost = state
            x = x @ a + controls[i] @ b
            return x, cost + jnp.mean(x**2)

        return lax.fori_loop(0, 64, step, (jnp.ones((64, 32)), 0.0))[1]

    return loss, (normal(64, 64, 8), normal(32, 32), normal(8, 32))


def orthogonal_vectors() -> Made:
    def loss(x: Any) -> Any:
        def step(i: Any, q: Any) -> Any:
            before = jnp.where(jnp.arange(16) < i, q, 0)
            v = q[:, :, i] - jnp.einsum("bij,bkj,bk->bi", before, before, q[:, :, i])
            return q.at[:, :, i].set(v / jnp.linalg.norm(v, axis=1, keepdims=True))

        return jnp.sum(lax.fori_loop(0, 16, step, x) ** 3)

    return loss, (normal(64, 16, 16) + jnp.eye(16),)


def sinkhorn() -> Made:
    def loss(x: Any, y: Any) -> Any:
        cost = jnp.sum((x[:, None] - y[None]) ** 2, -1)
        soft = lambda f, axis: -jax.nn.logsumexp(f - cost, axis=axis)
        step = lambda f, _: (soft(soft(f[:, None], 0)[None], 1), None)
        f = lax.scan(step, jnp.zeros(256), None, length=20)[0]
        return jnp.mean(f) + jnp.mean(soft(f[:, None], 0))

    return loss, (normal(256, 8), normal(256, 8, seed=1))


def smoothing() -> Made:
    def loss(s: Any, ys: Any) -> Any:
        def step(state: Any, y: Any) -> Any:
            level, s = state
            expected = jnp.clip((level + 2 * jnp.sqrt(level)) * s, 0)
            level = y / s + 0.5 * level
            return (level, y / level + 0.5 * s), expected

        return lax.scan(step, (jnp.ones_like(s), s), ys)[1].sum()

    return loss, (jnp.ones(4096), 1 + normal(80, 4096) ** 2)


def complex_recurrence() -> Made:
    def loss(decay: Any, x: Any) -> Any:
        rates = jnp.exp(lax.complex(-jnp.exp(decay), decay))
        merge = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
        rows = jnp.broadcast_to(rates, x.shape), lax.complex(x, -x)
        return jnp.mean(jnp.abs(lax.associative_scan(merge, rows)[1]) ** 2)

    return loss, (normal(64), normal(1024, 64))


def linear_recurrence() -> Made:
    def loss(w: Any, x: Any) -> Any:
        merge = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
        return jnp.sum(lax.associative_scan(merge, (jnp.broadcast_to(w, x.shape), x))[1] ** 2)

    return loss, (jax.nn.sigmoid(normal(64)), normal(1024, 64))


def sequential_recurrence() -> Made:
    def loss(w: Any, x: Any) -> Any:
        step = lambda h, x: (w * h + x, w * h + x)
        return jnp.sum(lax.scan(step, jnp.zeros(1024), x)[1] ** 2)

    return loss, (jax.nn.sigmoid(normal(1024)), normal(256, 1024))


def slice_updates() -> Made:
    def loss(x: Any) -> Any:
        def step(grid: Any, i: Any) -> Any:
            row = lax.dynamic_slice_in_dim(grid, i, 1, 1)
            return lax.dynamic_update_slice_in_dim(grid, jnp.sin(row) * 2, i + 1, 1), None

        return jnp.sum(lax.scan(step, x, jnp.arange(32))[0])

    return loss, (normal(64, 64, 64),)


def hidden_markov() -> Made:
    def loss(params: Any, words: Any) -> Any:
        moves, emissions = (jax.nn.log_softmax(p) for p in params)

        def step(logs: Any, word: Any) -> Any:
            logs = jax.nn.logsumexp(logs[:, :, None] + moves, axis=1)
            return logs + emissions[:, word].T, None

        return -jnp.mean(jax.nn.logsumexp(lax.scan(step, jnp.zeros((32, 16)), words)[0], -1))

    return loss, ((normal(16, 16), normal(16, 50)), jax.random.randint(KEY, (60, 32), 0, 50))


def markov_tree() -> Made:
    def loss(moves: Any, logs: Any) -> Any:
        steps = jax.nn.log_softmax(moves)[None] + logs[:, None]
        merge = lambda a, b: jax.nn.logsumexp(a[..., :, :, None] + b[..., None, :, :], axis=-2)
        return -jnp.mean(lax.associative_scan(merge, steps)[-1])

    return loss, (normal(8, 8), normal(128, 8))


def memory_cells() -> Made:
    def loss(w: Any, xs: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            h, c = state
            i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ w, 4, -1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((32, 64))
        return jnp.mean(lax.scan(step, (zeros, zeros), xs)[1] ** 2)

    return loss, (normal(128, 256), normal(64, 32, 64))


def scanned_dropout() -> Made:
    def loss(w: Any, x: Any, key: Any) -> Any:
        def step(x: Any, layer: Any) -> Any:
            w, key = layer
            x = jax.nn.relu(x @ w)
            return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0), None

        return jnp.mean(lax.scan(step, x, (w, jax.random.split(key, 8)))[0] ** 2)

    return loss, (normal(8, 128, 128), normal(512, 128), KEY)


def adaptive_steps() -> Made:
    def loss(params: Any, y: Any) -> Any:
        def step(state: Any) -> Any:
            y, t, h = state
            full = h * dense(params, y)
            half = h / 2 * (dense(params, y) + dense(params, y + full))
            error = jnp.mean((full - half) ** 2)
            good = error < 1e-3
            return jnp.where(good, y + half, y), jnp.where(good, t + h, t), h * (0.7 + 0.5 * good)

        run = lambda s: lax.scan(lambda s, _: (lax.cond(s[1] < 1, step, lambda s: s, s), None),
                                 s, None, length=24)[0]  # fmt: skip
        return jnp.mean(run((y, jnp.float32(0), jnp.float32(0.1)))[0] ** 2)

    return loss, (layers(32, 64, 32), normal(256, 32))


def quantum_state() -> Made:
    def loss(drive: Any, h0: Any, h1: Any) -> Any:
        def step(rho: Any, u: Any) -> Any:
            h = h0 + u * h1
            return rho - 0.01j * (h @ rho - rho @ h) - 1e-4 * (h @ h @ rho), None

        rho = lax.scan(step, jnp.eye(48, dtype=complex) / 48, drive)[0]
        return jnp.real(jnp.trace(rho @ h1))

    matrix = lambda seed: (lambda a: (a + a.T).astype(complex))(normal(48, 48, seed=seed))
    return loss, (normal(64), matrix(0), matrix(1))


def waves() -> Made:
    def loss(speed: Any) -> Any:
        def step(state: Any, t: Any) -> Any:
            e, h = state
            h = h + 0.5 * (jnp.roll(e, -1, 0) - e)
            e = e + speed * (h - jnp.roll(h, 1, 1))
            e = e.at[64, 64].add(jnp.sin(0.3 * t))
            return (e, h), e[32, 32]

        zeros = jnp.zeros((128, 128))
        return jnp.sum(lax.scan(step, (zeros, zeros), jnp.arange(60))[1] ** 2)

    return loss, (0.4 * jnp.ones((128, 128)),)


def spectral_integrals() -> Made:
    def loss(scale: Any, k: Any, times: Any) -> Any:
        step = lambda total, t: (total + jnp.sin(k * t * scale) * jnp.exp(-scale * t), None)
        return jnp.sum(lax.scan(step, jnp.zeros_like(k), times)[0] ** 2)

    return loss, (jnp.float32(0.7), normal(16384), jnp.linspace(0, 1, 100))


REPORTS = {
    "sum in a scan": Report("jax-ml/jax#3186", sum_in_scan),
    "rows written in a loop": Report("jax-ml/jax#15906", written_rows),
    "rows copied in a loop": Report("jax-ml/jax#10197", copied_rows),
    "rows written if valid": Report("jax-ml/jax#3106", rows_if_valid),
    "rows gathered in a loop": Report("jax-ml/jax#13002", gathered_in_loop),
    "training inside a loss": Report("jax-ml/jax#26618", training_inside),
    "linear loop": Report("jax-ml/jax#1664", linear_loop),
    "named residual": Report("jax-ml/jax#23869", named_residual),
    "bounded while loop": Report("jax-ml/jax#8239", bounded_loop),
    "Euler steps until a time": Report("jax-ml/jax#4473", euler_until),
    "rollout of controls": Report("jax-ml/jax#1954", rollout),
    "orthogonal vectors": Report("tensorflow/tensorflow#62828", orthogonal_vectors),
    "Sinkhorn iterations": Report("google-research/ott#7", sinkhorn),
    "exponential smoothing": Report("jax-ml/jax#772", smoothing),
    "complex recurrence": Report("jax-ml/jax#18221", complex_recurrence),
    "linear recurrence": Report("jax-ml/jax#19498", linear_recurrence),
    "sequential recurrence": Report("jax-ml/jax#14190", sequential_recurrence),
    "slice updates": Report("jax-ml/jax#17640", slice_updates),
    "hidden Markov model": Report("pyro-ppl/numpyro#1010", hidden_markov),
    "hidden Markov model, parallel": Report("probml/dynamax#212", markov_tree),
    "memory cells": Report("google/flax#2660", memory_cells),
    "scanned layers with dropout": Report("google/flax#4771", scanned_dropout),
    "adaptive steps": Report("patrick-kidger/diffrax#685", adaptive_steps),
    "quantum state": Report("dynamiqs/dynamiqs#352", quantum_state),
    "waves": Report("ymahlau/fdtdx#58", waves),
    "spectral integrals": Report("TonyZhou729/ABCMB#22", spectral_integrals),
}
