"""Long loops within a budget: how much slower than with everything saved?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import xform
from experiments.planner.zoo import lstm, ode
from experiments.report import write_table
from experiments.timing import paired

HERE = Path(__file__).parent
MIB = 2**20
HEAD = ["loop", "budget", "MiB saved", "trips", "compiled MiB", "of save_everything",
        "time ratio", "quartiles", "largest error"]  # fmt: skip


def states(loss: Callable[..., Any], args: Any) -> int:
    """Bytes of the states of a loop in all trips."""
    rows = xform.residuals(loss, *args, argnums=0, policy=xform.policies.save_everything)
    return sum(r.total_bytes for r in rows if r.kind == "carry")


def taken(made: xform.Plan) -> str:
    """The shape that a plan gives the loop, and how many states it stores, if not all."""
    stored = [str(choice["snapshots"]) for choice in made.record.decisions if choice["snapshots"]]
    shapes = map(str, made.shapes().values())
    return ", ".join([*shapes, *(f"{n} states stored" for n in stored)])


def newton(a: jax.Array, xs: jax.Array) -> jax.Array:
    """A loop of a traced number of steps, after a scan of twenty."""
    x, _ = lax.scan(lambda x, b: (jnp.sin(x @ a) + b, None), xs[0], xs)
    moving = lambda s: (s[1] < 60) & (jnp.max(jnp.abs(s[0])) > 1e-3)
    x, _ = lax.while_loop(moving, lambda s: (jnp.tanh(s[0] @ a), s[1] + 1), (x, 0))
    return jnp.mean(x**2)


def main() -> None:
    """Plan, compile, compare, time, and write the table."""
    rows: list[list[str]] = []
    everything = xform.policies.save_everything
    for name, (loss, args) in {"LSTM, 1000 steps": lstm(), "ODE, 200 steps": ode()}.items():
        whole = xform.plan(loss, *args, policy=everything)
        free = jax.jit(xform.value_and_grad(loss, policy=everything)).lower(*args).compile()
        for part, of, amount in (
            (0.05, "all that is saved", whole.saved_bytes),
            (0.05, "the states", states(loss, args)),
        ):
            policy = xform.policies.budget(int(part * amount), of="saved")
            try:
                made = xform.plan(loss, *args, policy=policy)
            except xform.errors.BudgetInfeasible as error:
                least = f"refused: floor {error.floor_bytes / MIB:.2f}"
                rows.append([name, f"{part:.0%} of {of}", least, *[""] * 6])
                continue
            step = jax.jit(xform.value_and_grad(loss, policy=made)).lower(*args).compile()
            far = jax.tree.map(
                lambda a, b: float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))),
                step(*args), free(*args),
            )  # fmt: skip
            middle, low, high = paired(step, free, args)
            compiled, all_bytes = made.compiled_bytes, whole.compiled_bytes
            assert compiled is not None
            assert all_bytes is not None
            rows.append([
                name, f"{part:.0%} of {of}", f"{made.saved_bytes / MIB:.2f}",
                taken(made), f"{compiled / MIB:.1f}",
                f"{compiled / all_bytes:.3f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}",
                f"{max(jax.tree.leaves(far)):.0e}",
            ])  # fmt: skip
            print(rows[-1], flush=True)
    a = jax.random.normal(jax.random.key(0), (128, 128)) / 12
    xs = jax.random.normal(jax.random.key(1), (20, 256, 128))
    with xform.policies.checkpoints_per_while_loop(8):
        most = xform.residuals(newton, a, xs, argnums=0).total_bytes
        policy = xform.policies.budget(int(0.6 * most), of="saved")
        made = xform.plan(newton, a, xs, policy=policy)
        got = jax.jit(xform.grad(newton, policy=made))(a, xs)
        want = xform.grad(newton)(a, xs)
    far = float(jnp.max(jnp.abs(got - want)) / jnp.max(jnp.abs(want)))
    print(f"scan and while: {made.saved_bytes / MIB:.2f} of {most / MIB:.2f} MiB, error {far:.0e}")
    rows.append(["scan of 20, then a while loop", "60% of what min_cut saves",
                 f"{made.saved_bytes / MIB:.2f}", "", f"{(made.compiled_bytes or 0) / MIB:.1f}", "",
                 "", "", f"{far:.0e}"])  # fmt: skip
    write_table(HERE, HEAD, rows, "loops")


if __name__ == "__main__":
    main()
