"""Compare slices that xform finds with the changes that authors made by hand."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import chex
import jax

import xform
from experiments.remedies.programs import PROGRAMS
from experiments.report import write_table
from experiments.timing import paired

_FOLDER = Path(__file__).parent
# The budget, relative to the program that was changed by hand.
_SHARE = 1.5
_MIB = 2**20


def _compiled(gradient: Any, x: jax.Array) -> tuple[Any, Any]:
    """Compile a gradient; return it and the compiler's bytes."""
    run = jax.jit(gradient).lower(x).compile()
    return run, run.memory_analysis()


def _draw(bars: dict[str, list[float]]) -> None:
    """Draw the bytes of each program relative to `jax.grad`, on a logarithmic axis."""
    import matplotlib.pyplot as plt

    _, ax = plt.subplots(figsize=(7, 3))
    ways = "changed by hand", "xform.grad", "xform.grad, slices=True"
    for i, way in enumerate(ways):
        places = [j + (i - 1) / 4 for j in range(len(bars))]
        ax.bar(places, [shares[i] for shares in bars.values()], 0.22, label=way)
    ax.set_xticks(range(len(bars)), list(bars))
    ax.set_yscale("log")
    ax.set_ylabel("temporary bytes / jax.grad's")
    ax.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    plt.tight_layout()
    plt.savefig(_FOLDER / "bytes.png", dpi=150)


def main() -> None:
    """Measure each program, and print the table."""
    rows, bars = list[list[str]](), dict[str, list[float]]()
    for name, make in PROGRAMS.items():
        made = make()
        x = made.x
        plain, plain_bytes = _compiled(jax.grad(made.loss), x)
        by_hand, hand_bytes = _compiled(jax.grad(made.by_hand), x)
        default, default_bytes = _compiled(xform.grad(made.loss), x)
        total = hand_bytes.argument_size_in_bytes + hand_bytes.output_size_in_bytes
        total += _SHARE * hand_bytes.temp_size_in_bytes
        budget = xform.policies.budget(int(total), slices=True)
        start = time.perf_counter()
        sliced, sliced_bytes = _compiled(xform.grad(made.loss, policy=budget), x)
        seconds = time.perf_counter() - start
        for run in (by_hand, default, sliced):
            chex.assert_trees_all_close(run(x), plain(x), rtol=1e-3, atol=1e-6)
        every = (plain_bytes, hand_bytes, default_bytes, sliced_bytes)
        temp = [b.temp_size_in_bytes for b in every]
        bars[name] = [n / temp[0] for n in temp[1:]]
        times = [f"{paired(run, by_hand, (x,))[0]:.2f}" for run in (default, sliced)]
        rows.append([name, made.change, *(f"{n / _MIB:.2f}" for n in temp), *times,
                     f"{seconds:.0f}"])  # fmt: skip
        print(rows[-1], flush=True)
    head = [
        "program", "changed by hand", "jax.grad, MiB", "by hand", "xform.grad", "slices=True",
        "time of xform.grad / by hand", "of slices=True / by hand", "s to plan and compile",
    ]  # fmt: skip
    write_table(_FOLDER, head, rows)
    _draw(bars)


if __name__ == "__main__":
    main()
