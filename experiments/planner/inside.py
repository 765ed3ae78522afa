"""Budgets inside `jit`: kept by the compiler's word, and none refused that can be kept."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import xform
from experiments.report import write_table
from xform.errors import BudgetInfeasible
from xform.memory import compilation
from xform.planner import measure
from xform.planner.planning import current_planner, use_planner
from xform.policies import (
    budget,
    save_dots,
    save_dots_with_no_batch_dims,
    save_everything,
    save_nothing,
)

HERE = Path(__file__).parent
HEAD = ["program", "default KiB", "floor KiB", "least of stock KiB", "budgets", "kept", "refused",
        "bytes fall", "work rises", "compiled, at most", "before a refusal",
        "seconds a budget, at most"]  # fmt: skip
KIB = 2**10
POINTS = 6
STOCK = save_everything, save_dots, save_dots_with_no_batch_dims, save_nothing
Program = tuple[Callable[..., Any], tuple[Any, ...]]

f32 = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, "bfloat16")


def selective_scan(ws: Any, x: Any) -> Any:
    """State-space layers: gates and inputs of each step, combined along time."""
    for w in ws:
        step = jax.nn.softplus(x @ w["step"])
        decay = jnp.exp(step[..., None] * -jnp.exp(w["decay"]))
        put = (step * x)[..., None] * (x @ w["put"])[..., None, :]
        merge = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
        state = lax.associative_scan(merge, (decay, put), axis=1)[1]
        x = x + jnp.sum(state * (x @ w["get"])[..., None, :], -1)
    return jnp.mean(x**2)


def scans(ws: Any, x: Any) -> Any:
    """Associative scans of a cheap operation."""
    for w in ws:
        x = lax.associative_scan(lambda a, b: jnp.tanh(a * b) + jnp.exp(-a * a), x @ w, axis=0)
    return jnp.sum(x**2)


def graph(ws: Any, x: Any, senders: Any, receivers: Any) -> Any:
    """Attention over the edges of a graph."""
    n = x.shape[0]
    for w, a in ws:
        h = x @ w
        score = jax.nn.leaky_relu((h[senders] + h[receivers]) @ a)
        score = jnp.exp(score - jax.ops.segment_max(score, receivers, n)[receivers])
        whole = jax.ops.segment_sum(score, receivers, n)[receivers]
        message = h[senders] * (score / whole)[:, None]
        x = jax.nn.elu(jax.ops.segment_sum(message, receivers, n))
    return jnp.mean(x**2)


def messages(ws: Any, x: Any, senders: Any, receivers: Any) -> Any:
    """Sums of messages over the edges of a graph."""
    for w in ws:
        sent = jax.nn.silu(jnp.concatenate([x[senders], x[receivers]], -1) @ w)
        x = x + jax.ops.segment_sum(sent, receivers, x.shape[0])
    return jnp.mean(x**2)


def lattice(ws: Any, x: Any) -> Any:
    """A field on a lattice, with its neighbours."""
    for w in ws:
        near = sum(jnp.roll(x, k, axis) for k in (1, -1) for axis in (0, 1))
        x = jnp.tanh(x @ w) * jnp.cos(near)
    return jnp.mean(x**2)


def action(x: Any) -> Any:
    """The action of a lattice of angles, after some steps of a flow."""
    for _ in range(12):
        force = sum(jnp.sin(jnp.roll(x, k, a) - x) for k in (1, -1) for a in (0, 1))
        x = x + 0.1 * force * jnp.exp(-(x**2))
    return jnp.sum(jnp.cos(x - jnp.roll(x, 1, 0)))


def adversarial(ws: Any, x: Any) -> Any:
    """The loss at the worst point of a step along its own gradient."""
    net = lambda ws, x: jnp.mean(layers(ws, x) ** 2)
    worse = x + 0.1 * jnp.sign(xform.grad(net, argnums=1)(ws, x))
    return net(ws, worse)


def penalty(ws: Any, x: Any) -> Any:
    """The norm of a gradient."""
    score = lambda x: jnp.sum(layers(ws, x) ** 2)
    return jnp.mean((jnp.sqrt(jnp.sum(xform.grad(score)(x) ** 2, -1) + 1e-6) - 1) ** 2)


def layers(ws: Any, x: Any) -> Any:
    """Dense layers with tanh."""
    for w in ws:
        x = jnp.tanh(x @ w)
    return x


def implicit(w: Any, a: Any, y: Any) -> Any:
    """A least-squares problem whose solution has a rule of its own."""
    matrix = a.T @ a + jnp.diag(jnp.exp(w))
    solve = lambda f, b: jax.scipy.sparse.linalg.cg(f, b, maxiter=20)[0]
    x = lax.custom_linear_solve(lambda v: matrix @ v, a.T @ y, solve, symmetric=True)
    return jnp.sum(jnp.tanh(a @ x - y) ** 2)


def physics(ws: Any, xs: Any) -> Any:
    """A loss of a third derivative."""
    first, second, last = ws

    def u(x: Any) -> Any:
        return jnp.tanh(jnp.tanh(x * first) @ second) @ last

    third = jax.vmap(xform.grad(xform.grad(xform.grad(u))))
    return jnp.mean((third(xs) - jnp.sin(xs)) ** 2)


def experts(ws: Any, x: Any) -> Any:
    """Each token goes through a weighted mixture of experts."""
    for gate, up, down in ws:
        share = jax.nn.softmax(x @ gate)
        hidden = jax.nn.gelu(jnp.einsum("td,edf->etf", x, up))
        x = x + jnp.einsum("te,etf,efd->td", share, hidden, down)
    return jnp.mean(x**2)


def chunked(ws: Any, x: Any) -> Any:
    """Attention that goes over the keys in chunks."""
    for w in ws:
        q, k, v = jnp.split(x @ w, 3, -1)

        def chunk(carry: Any, kv: Any, q: Any = q) -> Any:
            top, total, out = carry
            score = q @ kv[0].T / 8
            new = jnp.maximum(top, score.max(-1))
            scale, part = jnp.exp(top - new), jnp.exp(score - new[:, None])
            carry = new, total * scale + part.sum(-1), out * scale[:, None] + part @ kv[1]
            return carry, None

        n = x.shape[0]
        start = jnp.full(n, -1e9), jnp.zeros(n), jnp.zeros_like(x)
        parts = k.reshape(8, n // 8, -1), v.reshape(8, n // 8, -1)
        (_, total, out), _ = lax.scan(chunk, start, parts)
        x = x + out / total[:, None]
    return jnp.mean(x**2)


def vocabulary(ws: Any, x: Any, head: Any, labels: Any) -> Any:
    """A language model's loss in bfloat16, with large logits."""
    for w in ws:
        x = x + jax.nn.gelu(x @ w)
    logits = (x @ head).astype(jnp.float32)
    rows = jnp.arange(labels.shape[0])
    return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[rows, labels])


def prenorm(ws: Any, x: Any) -> Any:
    """Pre-norm layers with attention."""

    def norm(x: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)

    for qkv, out, up, down in ws:
        q, k, v = jnp.split(norm(x) @ qkv, 3, -1)
        x = x + jax.nn.softmax(q @ k.T / 8) @ v @ out
        x = x + jax.nn.gelu(norm(x) @ up) @ down
    return jnp.mean(x**2)


def marked(ws: Any, x: Any) -> Any:
    """Layers that their author marked."""
    for w in ws:
        x = x + jax.checkpoint(lambda x, w: jnp.tanh(jax.nn.gelu(x @ w) @ w.T))(x, w)
    return jnp.mean(x**2)


def convolutions(ws: Any, x: Any) -> Any:
    """Residual blocks of convolutions and normalizations."""
    dims = ("NHWC", "HWIO", "NHWC")
    norm = lambda x: (x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + 1e-5)
    conv = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)
    for a, b in ws:
        x = jax.nn.relu(x + norm(conv(jax.nn.relu(norm(conv(x, a))), b)))
    return jnp.mean(x**2)


def recurrent(w: Any, x: Any) -> Any:
    """A gated recurrent network over time."""

    def step(h: Any, x: Any) -> Any:
        gate, new = jnp.split(jnp.concatenate([h, x], -1) @ w, 2, -1)
        gate = jax.nn.sigmoid(gate)
        return gate * h + (1 - gate) * jnp.tanh(new), h

    return jnp.mean(lax.scan(step, jnp.zeros_like(x[0]), x)[1] ** 2)


def orbit(w: Any, x: Any) -> Any:
    """An integrator of many steps."""
    force = lambda x: jnp.tanh(x @ w)

    def step(x: Any, _: Any) -> Any:
        a = force(x)
        b = force(x + 0.05 * a)
        return x + 0.1 * b, None

    return jnp.sum(lax.scan(step, x, None, length=64)[0] ** 2)


def pairs(x: Any) -> Any:
    """The energy of particles in pairs."""
    far = jnp.sqrt(jnp.sum((x[:, None] - x[None]) ** 2, -1) + 1e-2)
    return jnp.sum(jnp.exp(-far) / far + jnp.tanh(far) * jnp.cos(far))


def diffusion(ws: Any, x: Any, t: Any) -> Any:
    """A denoiser with a time embedding."""
    wave = jnp.sin(t[:, None] * jnp.arange(1.0, 1.0 + x.shape[-1]))
    for a, b in ws:
        x = x + jax.nn.silu((x + wave) @ a) @ b
    return jnp.mean((x - wave) ** 2)


_STATE = {"step": f32(16, 16), "decay": f32(16, 8), "put": f32(16, 8), "get": f32(16, 8)}
_EDGES = (jax.ShapeDtypeStruct((1024,), "int32"),) * 2
_PRENORM = (f32(64, 192), f32(64, 64), f32(64, 256), f32(256, 64))
PROGRAMS: dict[str, Program] = {
    "selective scan, 1 layer": (selective_scan, ([_STATE], f32(2, 64, 16))),
    "selective scan, 2 layers": (selective_scan, ([_STATE] * 2, f32(2, 64, 16))),
    "associative scans": (scans, (f32(2, 32, 32), f32(128, 32))),
    "graph attention": (graph, ([(f32(32, 32), f32(32))] * 2, f32(256, 32), *_EDGES)),
    "message passing": (messages, ([f32(64, 32)] * 3, f32(256, 32), *_EDGES)),
    "lattice": (lattice, (f32(4, 64, 64), f32(256, 64))),
    "lattice flow": (action, (f32(256, 256),)),
    "adversarial": (adversarial, ([f32(64, 64)] * 4, f32(256, 64))),
    "gradient penalty": (penalty, ([f32(64, 64)] * 3, f32(256, 64))),
    "implicit": (implicit, (f32(128), f32(256, 128), f32(256))),
    "third derivative": (physics, ((f32(64), f32(64, 64), f32(64)), f32(512))),
    "mixture of experts": (experts, ([(f32(64, 4), f32(4, 64, 128), f32(4, 128, 64))] * 2,
                                     f32(128, 64))),
    "chunked attention": (chunked, ([f32(64, 192)] * 2, f32(256, 64))),
    "bfloat16, 32k logits": (vocabulary, ([bf16(64, 64)] * 2, bf16(64, 64), bf16(64, 32768),
                                          jax.ShapeDtypeStruct((64,), "int32"))),
    "pre-norm layers": (prenorm, ([_PRENORM] * 3, f32(128, 64))),
    "marked by its author": (marked, (f32(4, 64, 64), f32(256, 64))),
    "residual convolutions": (convolutions, ([(f32(3, 3, 16, 16),) * 2] * 2, f32(4, 16, 16, 16))),
    "gated recurrence": (recurrent, (f32(64, 64), f32(64, 32, 32))),
    "integrator": (orbit, (f32(32, 32), f32(256, 32))),
    "pairs of particles": (pairs, (f32(256, 3),)),
    "diffusion": (diffusion, ([(f32(64, 128), f32(128, 64))] * 3, f32(256, 64), f32(256))),
}  # fmt: skip

# The programs that are planned for devices that are not here.
ELSEWHERE = ("selective scan, 2 layers", "message passing", "mixture of experts",
             "chunked attention", "bfloat16, 32k logits")  # fmt: skip


def total(step: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Arguments, outputs and all that is live between, of a compiled function."""
    found = jax.jit(step).lower(*args).compile().memory_analysis()
    assert found is not None
    return (found.argument_size_in_bytes + found.output_size_in_bytes
            + found.temp_size_in_bytes - found.alias_size_in_bytes)  # fmt: skip


@contextlib.contextmanager
def recomputed_flops() -> Generator[list[int]]:
    """A list that gets the FLOPs that each plan recomputes, of the plans made in this context."""
    planner, flops = current_planner(), list[int]()

    def observing_planner(*args: Any) -> Any:
        chosen = planner(*args)
        flops.append(chosen.work[0])
        return chosen

    with use_planner(observing_planner):
        yield flops


def sweep(name: str) -> list[str]:
    """One program: a row of the table."""
    f, args = PROGRAMS[name]
    default = total(xform.grad(f), args)
    stock = min(total(xform.grad(f, policy=policy), args) for policy in STOCK)
    before = len(_COMPILED)
    try:
        jax.eval_shape(xform.grad(f, policy=budget(0)), *args)
        raise AssertionError("a budget of no bytes was kept")
    except BudgetInfeasible as error:
        floor = error.floor_bytes
    refusal = len(_COMPILED) - before
    sizes, work = list[int](), list[int]()
    kept = refused = most = 0
    longest = 0.0
    for n in np.linspace(1.02 * default, floor, POINTS).astype(int):
        measure._known.clear()  # each budget is the first
        before, start = len(_COMPILED), time.perf_counter()
        try:
            with recomputed_flops() as flops:
                jax.eval_shape(xform.grad(f, policy=budget(int(n))), *args)
        except BudgetInfeasible:
            refused += 1
            continue
        longest = max(longest, time.perf_counter() - start)
        most = max(most, len(_COMPILED) - before)
        work.append(sum(flops))
        sizes.append(total(xform.grad(f, policy=budget(int(n))), args))
        kept += sizes[-1] <= n
    fall = all(b <= a for a, b in itertools.pairwise(sizes))
    rises = all(a <= b for a, b in itertools.pairwise(work))
    return [name, f"{default / KIB:.0f}", f"{floor / KIB:.0f}", f"{stock / KIB:.0f}", str(POINTS),
            str(kept), str(refused), "yes" if fall else "no", "yes" if rises else "no", str(most),
            str(refusal), f"{longest:.1f}"]  # fmt: skip


_COMPILED: list[str] = []


def sweep_elsewhere(name: str, target: str) -> list[str]:
    """One program on a device that is not here: a row of the table for it."""
    f, args = PROGRAMS[name]

    def size(policy: Any) -> int:
        return xform.plan(f, *args, policy=policy, target=target).compiled_bytes or 0

    default, stock = size(None), min(map(size, STOCK))
    try:
        size(budget(0))
        raise AssertionError("a budget of no bytes was kept")
    except BudgetInfeasible as error:
        floor = error.floor_bytes
    plans: list[xform.Plan] = []
    kept = refused = 0
    for n in np.linspace(1.02 * default, floor, POINTS).astype(int):
        try:
            plans.append(xform.plan(f, *args, policy=budget(int(n)), target=target))
        except BudgetInfeasible:
            refused += 1
            continue
        kept += (plans[-1].compiled_bytes or n + 1) <= n
    sizes = [plan.compiled_bytes or 0 for plan in plans]
    work = [plan.recompute_flops for plan in plans]
    fall = all(b <= a for a, b in itertools.pairwise(sizes))
    rises = all(a <= b for a, b in itertools.pairwise(work))
    return [name, f"{default / KIB:.0f}", f"{floor / KIB:.0f}", f"{stock / KIB:.0f}", str(POINTS),
            str(kept), str(refused), "yes" if fall else "no", "yes" if rises else "no",
            str(max(plan.compiles for plan in plans))]  # fmt: skip


def main() -> None:
    """Sweep each program and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(PROGRAMS))
    parser.add_argument("--target", help="a device that is not here; five programs by default")
    options = parser.parse_args()
    names = options.names
    if options.target:
        names = list(ELSEWHERE) if names == list(PROGRAMS) else names
        rows = list[list[str]]()
        for name in names:
            rows.append(sweep_elsewhere(name, options.target))
            print(rows[-1], flush=True)
            if names == list(ELSEWHERE):
                write_table(HERE, HEAD[:10], rows, f"inside-{options.target}", options.target)
        return
    real = compilation.compile_for

    def counted(*args: Any, **options: Any) -> Any:
        made = real(*args, **options)
        _COMPILED.append(made.function)
        return made

    compilation.compile_for = counted
    rows = list[list[str]]()
    for name in names:
        rows.append(sweep(name))
        print(rows[-1], flush=True)
        if names == list(PROGRAMS):
            write_table(HERE, HEAD, rows, "inside")


if __name__ == "__main__":
    main()
