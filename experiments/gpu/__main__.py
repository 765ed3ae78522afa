"""Compare the promised bytes of training steps with the peak of this machine's GPU; time them."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.gpu import picture
from experiments.gpu.case import FULL, WAYS
from experiments.gpu.programs import SIZES
from experiments.report import keep, known, replace, table
from experiments.turns import in_turn

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
MODELS = ["GPT-2 124M", "Llama 1.1B"]
GIB = 2**30
# Seconds for all compilations.
LIMIT = 160


def measure(models: list[str], out: Path) -> None:
    """Compile all steps at once, then run them one by one; keep the results in `out`."""

    def kept(name: str, found: dict[str, Any]) -> None:
        keep(out, name, found)
        print(name, found, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        command = lambda part: {
            f"{model}, {way}": [
                sys.executable,
                "-m",
                "experiments.gpu.case",
                part,
                model,
                way,
                folder,
            ]
            for model in models
            for way in WAYS
        }
        compiling, running = command("compile"), command("run")
        in_turn(compiling, Path(folder), len(compiling), LIMIT, kept, running)


def row(model: str, way: str, found: dict[str, Any], full: dict[str, Any]) -> list[str]:
    """Return the cells of the table for one step."""
    if "failed" in found and "promised" not in found:
        return [model, way, found["failed"].splitlines()[0][:80], *[""] * 6]
    promised, seen = found["promised"], found.get("peak")
    return [
        model,
        way,
        f"{promised / GIB:.2f}",
        f"{seen / GIB:.2f}" if seen else "did not run",
        f"{seen / promised:.3f}" if seen else "",
        f"{1000 * found['step']:.0f}" if "step" in found else "",
        f"{found['step'] / full['step']:.2f}" if "step" in found and "step" in full else "",
        f"{found['seconds']:.0f}",
        str(found.get("compiles", 1)),
    ]


def tables() -> None:
    """Print the table, and draw the plot."""
    results = known(RESULTS)
    head = ["model", "step", "promised, GiB", "the device's peak, GiB", "peak / promised",
            "ms a step", "of full's time", "seconds to plan and compile", "programs compiled",
            ]  # fmt: skip
    rows = [
        row(model, way, results[f"{model}, {way}"], results.get(f"{model}, {FULL}", {}))
        for model in MODELS
        for way in WAYS
        if f"{model}, {way}" in results
    ]
    stamp = results.get("stamp", "")
    replace(HERE, "steps", [*table(head, rows), "", stamp])
    picture.draw(HERE / "steps.png", {m: {w: results.get(f"{m}, {w}", {}) for w in WAYS}
                                      for m in MODELS})  # fmt: skip


def main() -> None:
    """Measure if asked to; print the table and draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", type=Path, metavar="FILE",
                        help="run the steps on this machine's GPU, and keep the results in a file"
                        )  # fmt: skip
    parser.add_argument("--model", action="append", choices=list(SIZES))
    options = parser.parse_args()
    if options.measure is None:
        return tables()
    measure(options.model or MODELS, options.measure)


if __name__ == "__main__":
    main()
