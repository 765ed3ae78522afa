"""Compare the promised bytes of training steps with the peak of this machine's GPU; time them."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

from experiments.device import picture
from experiments.device.case import FULL, WAYS
from experiments.device.programs import SIZES
from experiments.report import keep, known, replace, table
from experiments.turns import in_turn

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
MODELS = ["GPT-2 124M", "Llama 1.1B"]
GIB = 2**30
# The share of the time for compilations; the rest is for running the steps.
COMPILING = 0.4


def measure(models: list[str], minutes: float) -> None:
    """Compile the steps that have no results at once, then run them one by one.

    Results are kept as soon as a step has run, so a later call goes on with the others. Of two
    models the steps of the first come first, in the order of `WAYS`.
    """
    results = known(RESULTS)
    names = {f"{model}, {way}": (model, way) for model in models for way in WAYS}
    missing = [name for name in names if "step" not in results.get(name, {})]

    def kept(name: str, found: dict[str, Any]) -> None:
        keep(RESULTS, name, found)
        print(name, found, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        for name in names.keys() - set(missing):  # budgets read the bytes of other steps
            (Path(folder) / f"{name}.json").write_text(json.dumps(results[name]))
        command = lambda part: {
            name: [sys.executable, "-m", "experiments.device.case", part, *names[name], folder]
            for name in missing
        }
        limit = COMPILING * 60 * minutes
        in_turn(command("compile"), Path(folder), max(1, len(missing)), limit, kept, command("run"))
    packages = f"JAX {jax.__version__}, Python {platform.python_version()}"
    day = datetime.date.today().isoformat()
    results = known(RESULTS)
    devices = {results[name]["device"] for name in missing if "device" in results[name]}
    if devices:
        on = ", ".join(sorted(devices))
        keep(RESULTS, "stamp", f"Measured {day} on an {on}, {packages}.")


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
    """Measure on a GPU, if this machine has one; print the table and draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="time for all measurements")
    parser.add_argument("--model", action="append", choices=list(SIZES))
    parser.add_argument("--again", action="store_true", help="forget all results first")
    options = parser.parse_args()
    # Do not ask JAX here: this process would take the memory of the GPU from the steps.
    if shutil.which("nvidia-smi") or options.model:
        if options.again:
            RESULTS.unlink(missing_ok=True)
        measure(options.model or MODELS, options.minutes)
    tables()


if __name__ == "__main__":
    main()
