"""Training steps that update each layer within the backward pass: bytes and time."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import xform
from experiments.report import write_table
from experiments.timing import paired

HERE = Path(__file__).parent
MIB = 2**20
LAYERS, WIDTH, ROWS = 16, 512, 64
HEAD = [
    "layers",
    "optimizer",
    "jax.grad, MiB",
    "xform.grad, MiB",
    "fused, MiB",
    "fused, save_nothing, MiB",
    "time ratio",
    "quartiles",
]
OPTIMIZERS = {
    "SGD": optax.sgd(0.01),
    "momentum": optax.sgd(0.01, momentum=0.9),
    "AdamW": optax.adamw(1e-3),
}
Step = Callable[..., Any]


def scanned(ws: Any, x: Any) -> Any:
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)
    return jnp.mean(h**2)


def unrolled(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def programs() -> Iterator[tuple[str, Any, Any]]:
    """Yield names, losses and parameters."""
    rng = np.random.default_rng(0)
    ws = jnp.asarray(rng.normal(size=(LAYERS, WIDTH, WIDTH)) / WIDTH**0.5, "float32")
    yield "scanned", scanned, ws
    yield "unrolled", unrolled, [*ws]


def separate(loss: Any, optimizer: Any, value_and_grad: Any) -> Step:
    """Return a step that computes the gradient of all parameters, and then updates them."""

    def step(params: Any, state: Any, x: Any) -> Any:
        value, grads = value_and_grad(loss)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


class Training:
    """A compiled step with its own parameters and state, which each call donates."""

    def __init__(self, step: Step, params: Any, state: Any, x: Any):
        self._params, self._state = jax.tree.map(jnp.copy, (params, state))
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, x).compile()
        stats: Any = compiled.memory_analysis()
        self._compiled, self.temporary = compiled, stats.temp_size_in_bytes / MIB

    def __call__(self, x: Any) -> Any:
        self._params, self._state, value = self._compiled(self._params, self._state, x)
        return value


def measured(loss: Any, params: Any, optimizer: Any, times: int) -> list[str]:
    """Return the bytes of four steps, and the time of the fused one relative to xform.grad's."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, WIDTH)), "float32")
    steps = [
        separate(loss, optimizer, jax.value_and_grad),
        separate(loss, optimizer, xform.value_and_grad),
        xform.fused_update(loss, optimizer),
        xform.fused_update(loss, optimizer, policy="save_nothing"),
    ]
    runs = [Training(step, params, optimizer.init(params), x) for step in steps]
    for _ in range(3):
        values = [float(run(x)) for run in runs]
        np.testing.assert_allclose(values, values[0], rtol=1e-5)
    middle, low, high = paired(runs[2], runs[1], (x,), times)
    return [*(f"{run.temporary:.1f}" for run in runs), f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]


def on_target(target: str) -> None:
    """Print the bytes of steps with AdamW that the compiler of an absent device reports."""
    weight = jax.ShapeDtypeStruct((2048, 2048), "float32")
    stack = jax.ShapeDtypeStruct((8, 2048, 2048), "float32")
    x, adamw = jax.ShapeDtypeStruct((1024, 2048), "float32"), OPTIMIZERS["AdamW"]
    rows: list[list[str]] = []
    for name, loss, params in (("scanned", scanned, stack), ("unrolled", unrolled, [weight] * 8)):
        steps = [
            separate(loss, adamw, jax.value_and_grad),
            separate(loss, adamw, xform.value_and_grad),
            xform.fused_update(loss, adamw),
        ]
        state = jax.eval_shape(adamw.init, params)
        donated = [jax.jit(step, donate_argnums=(0, 1)) for step in steps]
        reports = [xform.memory_analysis(f, params, state, x, target=target) for f in donated]
        rows.append([target, name, *(f"{r.temp_bytes / MIB:.1f}" for r in reports)])
        print(rows[-1], flush=True)
    write_table(HERE, ["target", *HEAD[:1], *HEAD[2:5]], rows, target.partition(":")[0], target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=21, help="pairs of steps")
    parser.add_argument("--target", help="compile for an absent device instead, and run nothing")
    args = parser.parse_args()
    if args.target:
        on_target(args.target)
        return
    times = args.times
    rows: list[list[str]] = []
    for name, loss, params in programs():
        for optimizer_name, optimizer in OPTIMIZERS.items():
            rows.append([name, optimizer_name, *measured(loss, params, optimizer, times)])
            print(rows[-1], flush=True)
    write_table(HERE, HEAD, rows)


if __name__ == "__main__":
    main()
