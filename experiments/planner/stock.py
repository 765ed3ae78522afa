"""At the bytes that JAX's stock policies take: how much less is run again?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

import xform
from experiments.bench_step.run import KEEP_BARRIERS
from experiments.planner.run import block, dot_flops, inputs, layers
from experiments.report import write_table

HERE = Path(__file__).parent
MIB = 2**20
HEAD = ["layers", "policy", "placement", "MiB of jax.grad", "as it compiles by default",
        "MiB of xform", "GFLOP again: jax", "xform"]  # fmt: skip
SAVE = jax.checkpoint_policies
POLICIES: dict[str, Any] = {
    "nothing": SAVE.nothing_saveable,
    "dots": SAVE.dots_saveable,
    "dots, no batch": SAVE.dots_with_no_batch_dims_saveable,
    "names": SAVE.save_only_these_names("block"),
}


def named(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    """A block whose output has a name."""
    return checkpoint_name(block(x, p), "block")


def compiled_bytes(f: Callable[..., Any], args: Any, options: dict[str, Any] | None) -> int:
    """Arguments, outputs and temporary bytes of a function, by the compiler."""
    stats = jax.jit(f, compiler_options=options).lower(*args).compile().memory_analysis()
    sizes = (stats.argument_size_in_bytes, stats.output_size_in_bytes, stats.temp_size_in_bytes)
    return sum(sizes)


def main() -> None:
    """Compile JAX's way, plan for its bytes, and write the table."""
    rows: list[list[str]] = []
    saved: list[tuple[float, float]] = []
    for scan, n in ((True, 12), (False, 4)):
        args = inputs(n)
        usual = dot_flops(jax.make_jaxpr(jax.value_and_grad(layers(scan, n, named)))(*args).jaxpr)
        ways: list[tuple[str, str, Callable[..., jax.Array]]] = [
            ("everything", "none", layers(scan, n, named))
        ]
        for name, policy in POLICIES.items():
            wrap = lambda f, policy=policy: jax.checkpoint(f, policy=policy)
            ways.append((name, "per block", layers(scan, n, wrap(named))))
            ways.append((name, "whole", wrap(layers(scan, n, named))))
        for name, where, loss in ways:
            step = jax.value_and_grad(loss)
            again = dot_flops(jax.make_jaxpr(step)(*args).jaxpr) - usual
            # Without the option, XLA:CPU undoes jax.checkpoint in unrolled code.
            total = compiled_bytes(step, args, None if scan else KEEP_BARRIERS)
            usually = total if scan else compiled_bytes(step, args, None)
            try:
                policy = xform.policies.budget(total)
                made = xform.plan(layers(scan, n, named), *args, policy=policy)
            except xform.errors.BudgetInfeasible as error:
                ours, mine = f"floor {error.floor_bytes / MIB:.0f}", "refused"
            else:
                assert made.compiled_bytes is not None
                ours = f"{made.compiled_bytes / MIB:.0f}"
                mine = f"{made.recompute_flops / 1e9:.2f}"
                if again:
                    saved.append((made.recompute_flops, again))
            kind = f"{n}, {'scanned' if scan else 'unrolled'}"
            row = [kind, name, where, f"{total / MIB:.0f}", f"{usually / MIB:.0f}", ours,
                   f"{again / 1e9:.2f}", mine]  # fmt: skip
            rows.append(row)
            print(row, flush=True)
    mine, theirs = (sum(x) / 1e9 for x in zip(*saved, strict=True))
    less = f"{1 - mine / theirs:.0%} less"
    rows.append(
        ["all that run anything again", "", "", "", "", less, f"{theirs:.2f}", f"{mine:.2f}"]
    )
    write_table(HERE, HEAD, rows, "stock")


if __name__ == "__main__":
    main()
