"""Measure the bytes, the recomputed work and the search of budgets with slices."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import xform
from experiments.report import keep, known, write_table
from experiments.slices.elsewhere import ON_TARGETS, measure
from experiments.slices.programs import MIB, PROGRAMS, Program

HERE = Path(__file__).parent
# A leaf of a gradient is zero if it is smaller than this times the largest number.
ZERO = 1e-6
RESULTS = HERE / "results.json"
HEAD = [
    "program",
    "jax.grad, temporary MiB",
    "bar",
    "budget",
    "with slices, temporary MiB",
    "of jax.grad's",
    "recomputed, of the forward pass",
    "difference of gradients",
    "compilations",
    "CPU seconds of the search",
    "share of planning in its time",
    "slices",
]


def bytes_of(f: Any, args: tuple[Any, ...]) -> tuple[Any, int, int]:
    """Compile a function; return it, its temporary bytes and those of arguments and outputs."""
    compiled = jax.jit(f).lower(*args).compile()
    figures: Any = compiled.memory_analysis()
    ends = figures.argument_size_in_bytes + figures.output_size_in_bytes
    return compiled, figures.temp_size_in_bytes, ends


def difference(a: Any, b: Any) -> float:
    """Return the largest difference of two gradients, relative to the largest number of a leaf.

    A leaf that is zero up to rounding, such as the bias of the keys of attention, does not count.
    """
    pairs = [tuple(map(np.asarray, xs)) for xs in zip(*map(jax.tree.leaves, (a, b)), strict=True)]
    largest = max(float(np.max(np.abs(y))) for _, y in pairs)
    sizes = [(float(np.max(np.abs(x - y))), float(np.max(np.abs(y)))) for x, y in pairs]
    return max(error / size for error, size in sizes if size > ZERO * largest)


def measured(program: Program, folder: Path) -> list[str]:
    """Return the cells of a row, after the name."""
    loss, args = program.make(folder)
    theirs, temporary, ends = bytes_of(jax.grad(loss), args)
    limit = int(program.total or ends + (program.share or 1) * temporary)
    start = time.process_time()
    plan = xform.plan(loss, *args, policy=xform.policies.budget(limit, slices=True))
    seconds = time.process_time() - start
    mine, mine_temporary, _ = bytes_of(xform.grad(loss, policy=plan), args)
    slices = "; ".join(text.partition(" (")[0] for text in plan.sliced_regions)
    in_all = f"{(program.total or 0) / MIB:.1f} MiB in all"
    return [
        f"{temporary / MIB:.1f}",
        program.bar,
        in_all if program.total else f"{program.share}",
        f"{mine_temporary / MIB:.1f}",
        f"{mine_temporary / temporary:.2f}",
        f"{plan.recompute_flops / plan.forward_flops:.1%}",
        f"{difference(mine(*args), theirs(*args)):.0e}",
        f"{plan.compiles}",
        f"{seconds:.1f}",
        f"{plan.seconds / (plan.seconds + plan.compile_seconds):.0%}",
        slices or "none needed",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=Path, help="a folder of other people's programs")
    parser.add_argument("--only", action="append", help="measure this program again")
    parser.add_argument("--target", choices=ON_TARGETS, help="an absent device to compile for")
    args = parser.parse_args()
    if args.target:
        measure(args.target, args.sources, args.only)
        return
    for name, program in PROGRAMS.items():
        asked = name in args.only if args.only else name not in known(RESULTS)
        if asked and (args.sources or not program.foreign):
            row = measured(program, args.sources or HERE)
            keep(RESULTS, name, row)
            print(name, *row, sep=" | ", flush=True)
    results = known(RESULTS)
    write_table(HERE, HEAD, [[name, *results[name]] for name in PROGRAMS if name in results])
