"""Layers that their author wrapped in `jax.checkpoint`: what do their bytes cost, opened?"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

import xform
from experiments.bench_step.run import KEEP_BARRIERS
from experiments.planner.run import block, dot_flops, inputs, layers
from experiments.planner.stock import compiled_bytes
from experiments.report import write_table
from xform import policies

HERE = Path(__file__).parent
MIB = 2**20
SAVE = jax.checkpoint_policies
HEAD = ["layers", "the author's mark", "MiB of jax.grad", "GFLOP again",
        "MiB of xform, marked", "GFLOP again", "MiB, opened", "GFLOP again"]  # fmt: skip
MARKS: dict[str, Any] = {
    "jax.checkpoint": None,
    "dots_saveable": SAVE.dots_saveable,
    "dots_with_no_batch_dims_saveable": SAVE.dots_with_no_batch_dims_saveable,
    "names: q, k, v": SAVE.save_only_these_names("q", "k", "v"),
    "names: attention": SAVE.save_only_these_names("attention"),
    "names: attention, up": SAVE.save_only_these_names("attention", "up"),
}
named = functools.partial(block, name=checkpoint_name)


def main() -> None:
    """Compile each as marked, plan it opened within the lesser bytes, and write the table."""
    rows: list[list[str]] = []
    for scan, n in ((True, 12), (False, 4)):
        args = inputs(n)
        usual = dot_flops(jax.make_jaxpr(jax.value_and_grad(layers(scan, n, named)))(*args).jaxpr)
        for name, policy in MARKS.items():
            loss = layers(scan, n, jax.checkpoint(named, policy=policy))
            step = jax.value_and_grad(loss)
            again = dot_flops(jax.make_jaxpr(step)(*args).jaxpr) - usual
            # Without the option, XLA:CPU undoes jax.checkpoint in unrolled code.
            author = compiled_bytes(step, args, None if scan else KEEP_BARRIERS)
            marked = xform.plan(loss, *args)
            assert marked.compiled_bytes is not None
            budget = policies.budget(min(author, marked.compiled_bytes))
            row = [f"{n}, {'scanned' if scan else 'unrolled'}", name,
                   f"{author / MIB:.1f}", f"{again / 1e9:.2f}",
                   f"{marked.compiled_bytes / MIB:.1f}",
                   f"{marked.recompute_flops / 1e9:.2f}"]  # fmt: skip
            try:
                opened = xform.plan(loss, *args, policy=policies.open_regions(budget))
            except xform.errors.BudgetInfeasible as error:
                row += [f"floor {error.floor_bytes / MIB:.1f}", "refused"]
            else:
                assert opened.compiled_bytes is not None
                row += [f"{opened.compiled_bytes / MIB:.1f}",
                        f"{opened.recompute_flops / 1e9:.2f}"]  # fmt: skip
            rows.append(row)
            print(row, flush=True)
    write_table(HERE, HEAD, rows, "regions")


if __name__ == "__main__":
    main()
