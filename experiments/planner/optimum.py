"""How far from the least work that fits: exact solutions, and chains of equal steps."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import xform
from experiments.planner.run import block
from experiments.planner.zoo import conv, normed
from experiments.report import write_table
from tests.interpret.test_checkpoints import fewest
from xform.interpret.joint import Joint, analyze
from xform.interpret.slots import steps_run
from xform.planner.costs.outcome import recompute_flops, saved_bytes
from xform.planner.cuts.fit import propose_by_prices
from xform.planner.decide import best_of_proposals, schedule
from xform.policies import MinCut
from xform.program.ir import trace

HERE = Path(__file__).parent
HEAD = ["graphs", "forward equations", "budgets", "exact again, mean", "worst",
        "prices alone, mean", "worst, of a budget"]  # fmt: skip
CHAINS = ["steps", "states", "steps run: revolve", "least, by trying all", "xform"]
BUDGETS = (0.8, 0.6, 0.4, 0.2, 0.05)
Case = tuple[Callable[..., Any], tuple[Any, ...]]


def drawn(seed: int) -> Case:
    """A random program of products, elementwise operations and sums of earlier values."""
    pick = random.Random(seed)
    widths = [16, 32, 64, 128]
    steps = pick.randint(8, 60)
    schedule = [(pick.random(), pick.random(), pick.random(), pick.choice(widths))
            for _ in range(steps)]  # fmt: skip

    def f(ws: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        values = [x]
        for kind, a, b, width in schedule:
            recent = values[-6:]
            u, v = recent[int(a * len(recent))], recent[int(b * len(recent))]
            if kind < 0.45:
                y = u @ ws[f"{u.shape[1]} {width}"]
            elif kind < 0.75:
                y = [jnp.sin, jnp.tanh, jnp.exp][int(a * 3)](0.1 * u)
            elif u.shape == v.shape:
                y = u * v
            else:
                y = u * jnp.mean(v, 1, keepdims=True)
            values.append(y)
        return sum(jnp.sum(y) for y in values[-3:])

    ws = {f"{a} {b}": jnp.ones((a, b)) for a in widths for b in widths}
    return f, (ws, jnp.ones((32, 64)))


def models() -> list[Case]:
    """Parts of real models."""
    w = functools.partial(jnp.ones, dtype=jnp.float32)

    def mlp(n: int) -> Case:
        def f(ws: jax.Array, x: jax.Array) -> jax.Array:
            for v in ws:
                x = x + jax.nn.gelu(x @ v)
            return jnp.sum(x)

        return f, (w((n, 64, 64)), w((32, 64)))

    def gated(ws: Any, x: jax.Array) -> jax.Array:
        for a, b, c in ws:
            x = x + (jax.nn.silu(x @ a) * (x @ b)) @ c
        return jnp.sum(x)

    def residual(ws: Any, x: jax.Array) -> jax.Array:
        for a, b in ws:
            y = jax.nn.relu(normed(conv(x, a), w(8)))
            x = jax.nn.relu(x + normed(conv(y, b), w(8)))
        return jnp.sum(x)

    def recurrent(ws: Any, x: jax.Array) -> jax.Array:
        h = c = jnp.zeros((16, 32))
        for k in range(6):
            i, f, g, o = jnp.split(x[k] @ ws[0] + h @ ws[1], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return jnp.sum(h)

    def attention(n: int) -> Case:
        width = 256
        p = {k: w((width, width)) for k in "qkvo"} | {"g1": w(width), "g2": w(width)}
        p |= {"up": w((width, 4 * width)), "down": w((4 * width, width))}

        def f(p: Any, x: jax.Array) -> jax.Array:
            for _ in range(n):
                x = block(x, p)
            return jnp.sum(x)

        return f, (p, w((4, 512, width)))

    def runge(a: jax.Array, x: jax.Array) -> jax.Array:
        rate = lambda x: jnp.tanh(jnp.tanh(x @ a) @ a)
        for _ in range(3):
            k1 = rate(x)
            k2 = rate(x + 0.1 * k1)
            k3 = rate(x + 0.1 * k2)
            x = x + 0.1 * (k1 + 2 * k2 + 2 * k3 + rate(x + 0.2 * k3))
        return jnp.sum(x)

    three = tuple((w((64, 128)), w((64, 128)), w((128, 64))) for _ in range(4))
    kernels = tuple((w((3, 3, 8, 8)), w((3, 3, 8, 8))) for _ in range(3))
    return [
        mlp(4), mlp(8), mlp(12), (gated, (three, w((32, 64)))), (gated, (three[:2], w((8, 64)))),
        (residual, (kernels, w((2, 16, 16, 8)))), attention(1), attention(2),
        (recurrent, ((w((24, 128)), w((32, 128))), w((6, 16, 24)))),
        (runge, (w((64, 64)), w((8, 64)))),
    ]  # fmt: skip


def joint_of(f: Callable[..., Any], args: tuple[Any, ...]) -> Joint:
    """The joint program, with all arguments active."""
    leaves, tree = jax.tree.flatten(args)
    prog = trace(lambda *xs: [f(*jax.tree.unflatten(tree, xs))], *leaves)
    return analyze(prog, (True,) * len(leaves))


def ratios(joint: Joint) -> list[tuple[float, float]]:
    """At each budget: the policy's work, and that of prices alone, to the optimum's."""
    make = lambda how: schedule(joint, how, "cpu")
    most, least = make(MinCut()), make(MinCut(0.0, 0.0))
    low, high = saved_bytes(least), saved_bytes(most)
    found = []
    for part in BUDGETS:
        n = low + int(part * (high - low))
        exact = recompute_flops(make(xform.policies.budget(n, of="saved", solver="exact")))
        usual = recompute_flops(make(xform.policies.budget(n, of="saved")))
        priced = recompute_flops(best_of_proposals(joint, propose_by_prices(least, n), "cpu"))
        if exact:
            found.append((usual / exact, priced / exact))
    return found


def chain(length: int) -> Case:
    """Equal steps, of which a state is all that the way back needs."""
    step = lambda h, _: (jnp.tanh(h @ h), None)
    return lambda x: jnp.sum(lax.scan(step, x, None, length=length)[0]), (jnp.ones((8, 8)),)


def main() -> None:
    """Solve all graphs at all budgets, and write both tables."""
    rows: list[list[str]] = []
    for name, cases in (("50 random", [drawn(k) for k in range(50)]), ("10 of models", models())):
        joints = [joint_of(*case) for case in cases]
        sizes = [len(j.forward) for j in joints]
        found = [r for joint in joints for r in ratios(joint)]
        usual, priced = (np.array(x) for x in zip(*found, strict=True))
        rows.append([name, f"{min(sizes)} to {max(sizes)}", str(len(found)),
                     f"{usual.mean():.3f}", f"{usual.max():.3f}", f"{priced.mean():.3f}",
                     f"{priced.max():.3f}"])  # fmt: skip
        print(rows[-1], flush=True)
    write_table(HERE, HEAD, rows, "optimum")
    rows = []
    for length, n in ((10, 2), (20, 3), (36, 5), (100, 4), (200, 8), (1000, 44), (1000, 10)):
        f, args = chain(length)
        policy = xform.policies.budget((n + 1) * args[0].nbytes, of="saved")
        made = xform.plan(f, *args, policy=policy, verify=False)
        step = 2 * args[0].shape[0] ** 3
        tried = str(fewest(length, n)) if length <= 100 else ""
        # All but the last step on the way forward; and again, each step where it is pulled back.
        ours = length - 1 + round(made.recompute_flops / step) - length
        rows.append([str(length), str(n), str(steps_run(length, n)), tried, str(ours)])
    write_table(HERE, CHAINS, rows, "chains")


if __name__ == "__main__":
    main()
