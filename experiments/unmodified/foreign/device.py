"""Bytes, compile time and step time of the programs on the GPU of this machine.

python -m experiments.unmodified.foreign.device --sources FOLDER --measure FILE
python -m experiments.unmodified.foreign.device           # the table alone
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.report import keep, known, replace, table
from experiments.timing import paired, seconds
from experiments.turns import first_part, in_turn, second_part
from experiments.unmodified.foreign.measure import BOTH, build
from experiments.unmodified.foreign.registry import PROGRAMS
from experiments.unmodified.foreign.tables import LEAST, MIB, share

HERE = Path(__file__).parent
RESULTS = HERE / "device.json"
PARALLEL, LIMIT = 16, 100
# Seconds of steps, and the most pairs of steps.
STEPPING, MOST_STEPS = 0.8, 15


def one(name: str, sources: Path, folder: Path) -> None:
    """Measure one program in this process."""
    loss: Any = None
    args: Any = None

    def compile_both() -> tuple[Any, dict[str, Any]]:
        nonlocal loss, args
        loss, args = PROGRAMS[name].make(sources)
        for way in BOTH.values():  # so that neither of the two is the first to be compiled
            build(way, lambda x: jnp.sum(jnp.tanh(x)), (jnp.ones(8),))
        made, took = {}, {}
        for key, way in BOTH.items():
            made[key], lower, compiling = build(way, loss, args)
            took[key] = [lower, compiling]
        temp = {key: step.memory_analysis().temp_size_in_bytes for key, step in made.items()}
        device = jax.local_devices()[0].device_kind
        return made, {"temp": temp, "compile": took, "jax": jax.__version__, "device": device}

    def time_both(made: dict[str, Any]) -> dict[str, Any]:
        mine, theirs = made["default"], made["jax.grad"]
        for step in (mine, theirs):
            seconds(step, args)
        both = seconds(mine, args) + seconds(theirs, args)
        pairs = int(min(max(STEPPING / both, 7), MOST_STEPS))
        return {"time": paired(mine, theirs, args, n=pairs), "seconds of both steps": both}

    made = first_part(name, folder, compile_both)
    if made is not None:
        second_part(name, folder, lambda: time_both(made))


def measure(names: Sequence[str], sources: Path, out: Path) -> None:
    """Measure the programs, and keep their results in a file."""

    def kept(name: str, found: dict[str, Any]) -> None:
        keep(out, name, found)
        print(name, found, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        commands = {
            name: [sys.executable, "-m", "experiments.unmodified.foreign.device", "--sources",
                   str(sources), "--one", name, folder]
            for name in names
        }  # fmt: skip
        in_turn(commands, Path(folder), PARALLEL, LIMIT, kept)


def tables() -> None:
    """Print the table of the programs and the line of their medians."""
    found = {name: known(RESULTS)[name] for name in PROGRAMS if name in known(RESULTS)}
    head = ["program", "jax.grad, MiB", "bytes", "compile", "step", "quartiles", "ms of both steps"]
    rows: list[list[str]] = []
    for name, one in found.items():
        if "time" not in one:
            rows.append([name, one["failed"].splitlines()[0][:90], *[""] * 5])
            continue
        middle, low, high = one["time"]
        rows.append([name, f"{one['temp']['jax.grad'] / MIB:.1f}", f"{share(one):.2f}",
                     f"{_compiling(one):.2f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}",
                     f"{1000 * one['seconds of both steps']:.1f}"])  # fmt: skip
    done = [one for one in found.values() if "time" in one]
    large = [one for one in done if one["temp"]["jax.grad"] >= LEAST]
    middles = [
        f"{statistics.median(map(share, large)):.2f} of the bytes",
        f"{statistics.median(map(_compiling, done)):.2f} of the time of XLA",
        f"{statistics.median(one['time'][0] for one in done):.2f} of the time of a step",
    ]
    versions = sorted({f"JAX {one['jax']}, {one['device']}" for one in done})
    stamp = f"Medians over {len(done)} programs: {', '.join(middles)}. {'; '.join(versions)}."
    replace(HERE, "device", [*table(head, rows), "", stamp])


def _compiling(found: dict[str, Any]) -> float:
    """The time that XLA takes for the default, as a part of the time for jax.grad."""
    return found["compile"]["default"][1] / found["compile"]["jax.grad"][1]


def main() -> None:
    """Measure if asked to; else print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=Path, help="a folder of checkouts, as the README says")
    parser.add_argument("--measure", type=Path, metavar="FILE", help="keep the results in a file")
    parser.add_argument("--only", action="append", choices=list(PROGRAMS), metavar="NAME")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one[0], options.sources, Path(options.one[1]))
    elif options.measure:
        measure(options.only or list(PROGRAMS), options.sources, options.measure)
    else:
        tables()


if __name__ == "__main__":
    main()
