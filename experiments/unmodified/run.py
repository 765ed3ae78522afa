"""Bytes, FLOPs and time of other people's losses under `jax.grad` and xform's policies."""

from __future__ import annotations

import argparse
from pathlib import Path

import jax

from experiments.report import known
from experiments.unmodified import picture, tables
from experiments.unmodified.measure import agreement, sizes
from experiments.unmodified.programs import PROGRAMS
from experiments.unmodified.results import AGREEMENT, add
from experiments.unmodified.ways import BUDGETS, JAX, XFORM

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
TARGETS = "cpu,tpu:v5e:1x1,gpu:h100"
WAYS = ",".join((*JAX, *XFORM, *BUDGETS, AGREEMENT))


def measure(name: str, options: argparse.Namespace) -> None:
    """Add the missing results of a program, one after the other."""
    loss, args = PROGRAMS[name](options.sources)
    wanted = options.ways.split(",")
    for target in options.targets.split(","):
        seen = known(RESULTS).get(name, {})
        left = {way: size for way, size in seen.get(target, {}).items()
                if not options.again or way not in wanted}  # fmt: skip
        for way, found in sizes(loss, args, target, left, wanted):
            add(RESULTS, name, target, {way: found})
        if target == "cpu" and AGREEMENT in wanted and (options.again or AGREEMENT not in seen):
            add(RESULTS, name, AGREEMENT, agreement(loss, args, options.pairs))


def main() -> None:
    """Measure the selected programs, then write the tables and the plot of all results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=Path, help="folder of checkouts (see README.md); "
                        "without it only the tables and the plot are written")  # fmt: skip
    parser.add_argument("--only", action="append", choices=list(PROGRAMS), metavar="NAME")
    parser.add_argument("--targets", default=TARGETS)
    parser.add_argument("--ways", default=WAYS, help="default: %(default)s")
    parser.add_argument("--again", action="store_true", help="also measure stored results again")
    parser.add_argument("--pairs", type=int, default=5, help="timed pairs of steps")
    options = parser.parse_args()
    for name in options.only or PROGRAMS:
        if options.sources:
            measure(name, options)
    results = known(RESULTS)
    tables.write(HERE, {name: results[name] for name in PROGRAMS if name in results})
    picture.draw(HERE / "bytes.png", results)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
