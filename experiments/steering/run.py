"""What each switch of `xform.steering` saves, by the compilers for a CPU, a GPU and a TPU.

python -m experiments.steering.run
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import jax
from jax import lax

import xform
from experiments.report import write_table
from experiments.steering import programs
from experiments.steering.programs import Program
from xform import policies
from xform.memory.targets import missing, parse_target
from xform.steering.settings import Steering

HERE = Path(__file__).parent
CPU, GPU, TPU = "cpu", "gpu:h100", "tpu:v5e:1x1"
HEAD = ["switch", "program", "target", "MiB with", "MiB without", "without / with",
        "MiB moved with", "MiB moved without", "instructions with", "without"]  # fmt: skip
MIB = 2**20
remat = xform.remat(programs.residual)
mean_pooling = functools.partial(programs.pooled, jax.nn.gelu, lax.add, 0.0)
max_pooling = functools.partial(programs.pooled, jax.nn.gelu, lax.max, -float("inf"))


@dataclasses.dataclass(frozen=True)
class Row:
    """A switch, and a program that it is for on some targets."""

    switch: str
    program: str
    make: Callable[[], Program]
    targets: tuple[str, ...]


ROWS = (
    Row("recomputes_wait", "remat of each layer", functools.partial(programs.perceptron, remat),
        (CPU, GPU, TPU)),
    Row("recomputes_wait", "the default",
        functools.partial(programs.perceptron, programs.residual), (CPU, GPU, TPU)),
    Row("recomputes_wait", "half of the layers saved", programs.chain, (CPU, GPU, TPU)),
    Row("recomputes_wait", "kernels", programs.kernels, (CPU,)),
    Row("selects", "remat of each layer", functools.partial(programs.perceptron, remat), (CPU,)),
    Row("selects", "the default",
        functools.partial(programs.perceptron, programs.residual), (CPU,)),
    Row("selects", "half of the layers saved", programs.chain, (CPU,)),
    Row("selects", "save_dots",
        functools.partial(programs.perceptron, programs.residual, policies.save_dots), (CPU,)),
    Row("early_recomputes_wait", "cross entropy", programs.cross_entropy, (CPU, TPU)),
    Row("early_recomputes_wait", "cross entropy, nothing saved",
        functools.partial(programs.cross_entropy, policies.save_nothing), (CPU, TPU)),
    Row("operands_wait", "decoder", programs.decoder, (GPU,)),
    Row("gradients_first", "on eight devices", programs.sharded, ("gpu:h100:8",)),
    Row("draws_wait", "dropout", programs.dropout, (CPU,)),
    Row("saved_values_written", "dropout", programs.dropout, (CPU, GPU)),
    Row("saved_values_written", "signs", programs.leaky, (CPU, GPU)),
    Row("pooling_operands_written", "mean pooling", mean_pooling, (CPU,)),
    Row("pooling_operands_written", "max pooling", max_pooling, (CPU,)),
    Row("long_chains_written", "normalized layers", programs.normalized, (CPU,)),
    Row("own_layouts", "attention", programs.attention, (GPU,)),
    Row("sums_in_loops", "microbatches", programs.microbatches, (CPU, GPU, TPU)),
    Row("unpools", "max pooling", max_pooling, (CPU, GPU)),
)  # fmt: skip


def measure(row: Row, target: str) -> list[str]:
    """Return a line of the table: the program of a row with its switch on and off."""
    reports = []
    for on in (True, False):
        with Steering(**{row.switch: on}).used():
            gradient, args = row.make()
            reports.append(xform.memory_analysis(jax.jit(gradient), *args, target=target))
    temporary = [report.temp_bytes for report in reports]
    moved = [f"{report.moved_bytes / MIB:.0f}" for report in reports]
    lines = [str(len(r.assignment.module.instructions)) for r in reports if r.assignment]
    return [row.switch, row.program, target, *(f"{size / MIB:.1f}" for size in temporary),
            f"{temporary[1] / max(1, temporary[0]):.2f}", *moved, *lines]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of a switch's name")
    parser.add_argument("--targets", default="", help="the beginning of a target's name")
    options = parser.parse_args()
    rows: list[list[str]] = []
    for row in ROWS:
        for target in row.targets:
            if options.only not in row.switch or not target.startswith(options.targets):
                continue
            if absent := missing(parse_target(target)):
                print(f"{row.switch}, {target}: needs {', '.join(absent)}")
                continue
            rows.append(measure(row, target))
            print(rows[-1], flush=True)
    write_table(HERE, HEAD, rows, target="by each target's compiler")


if __name__ == "__main__":
    main()
