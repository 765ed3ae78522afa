"""Plan named values of six models within three budgets, and compile the exported policies."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import xform
from experiments.names import decoders, libraries
from experiments.names.decoders import Model
from experiments.report import keep, known, write_table

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
MIB, GFLOP = 2**20, 10**9
MODELS: dict[str, Callable[[], Model]] = {
    "GPT-2, scanned": decoders.gpt2,
    "Llama, unrolled": decoders.llama,
    "mixture of experts, scanned": decoders.experts,
    "Flax Linen, scanned": libraries.flax,
    "Equinox, unrolled": libraries.equinox,
    "Haiku, unrolled": libraries.haiku,
}
# The budgets, as shares of the way from the peak if nothing is saved to that if all names are.
SHARES = 0.2, 0.5, 0.8
HEAD = [
    "model",
    "budget, MiB",
    "saved names",
    "promised, MiB",
    "plain JAX, MiB",
    "difference",
    "recomputed, GFLOP",
    "free plan, MiB",
    "free plan recomputes, GFLOP",
    "programs compiled",
    "seconds",
]


def options_of(model: Model, target: str) -> dict[str, Any]:
    """Return options of `jax.jit`: XLA on a CPU must not undo `jax.checkpoint` if unrolled."""
    undone = model.unrolled and target == "cpu"
    kept = {"compiler_options": {"xla_disable_hlo_passes": "cse_barrier_expander"}}
    return kept if undone else {}


def plain_bytes(model: Model, policy: Any, target: str) -> int:
    """Return the compiled bytes of the program under a policy, as a site would compile it."""
    run = functools.partial(model.site or model.gradient, policy=policy)
    run = jax.jit(run, **options_of(model, target))
    if target != "cpu":
        return xform.memory_analysis(run, *model.args, target=target).total_bytes or 0
    figures: Any = run.lower(*model.args).compile().memory_analysis()
    ends = figures.argument_size_in_bytes + figures.output_size_in_bytes
    return ends + figures.temp_size_in_bytes - figures.alias_size_in_bytes


def exported(plan: Any) -> Any:
    """Return the policy that the plan's Python code makes, in a namespace without xform."""
    space: dict[str, Any] = {"layer": lambda x: x}
    exec(plan.as_code(), space)
    return space["policy"]


def rows_of(name: str, target: str) -> list[list[str]]:
    """Return a row for each budget of a model."""
    model = MODELS[name]()
    names_of = functools.partial(
        xform.plan_names,
        model.gradient,
        *model.args,
        target=target,
        **options_of(model, target),
    )
    least = plain_bytes(model, jax.checkpoint_policies.nothing_saveable, target)
    most = names_of(policy="budget:1TiB", free=False).compiled_bytes
    rows: list[list[str]] = []
    for share in SHARES:
        budget = round(least + share * (most - least))
        start = time.perf_counter()
        plan = names_of(policy=xform.policies.budget(budget))
        seconds = time.perf_counter() - start
        plain = plain_bytes(model, exported(plan), target)
        free, offloaded = plan.free, [f"{n} (offloaded)" for n in plan.offloaded]
        rows.append([
            f"{budget / MIB:.1f}",
            ", ".join([*plan.saved, *offloaded]) or "none",
            f"{plan.compiled_bytes / MIB:.2f}",
            f"{plain / MIB:.2f}",
            f"{plain / plan.compiled_bytes - 1:+.2%}",
            f"{plan.recompute_flops / GFLOP:.2f}",
            f"{(free.compiled_bytes or 0) / MIB:.2f}" if free else "none fits",
            f"{free.recompute_flops / GFLOP:.2f}" if free else "",
            f"{plan.compiles} + {free.compiles if free else 0}",
            f"{seconds:.0f}",
        ])  # fmt: skip
        print(name, target, *rows[-1], sep=" | ", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="cpu", help="such as gpu:h100")
    parser.add_argument("--only", action="append", help="measure this model again")
    args = parser.parse_args()
    for name in args.only or MODELS:
        key = f"{args.target}: {name}"
        if args.only or key not in known(RESULTS):
            keep(RESULTS, key, rows_of(name, args.target))
    results = known(RESULTS)
    rows = [[n, *r] for n in MODELS for r in results.get(f"{args.target}: {n}", [])]
    write_table(HERE, HEAD, rows, name=args.target.partition(":")[0], target=args.target)


if __name__ == "__main__":
    main()
