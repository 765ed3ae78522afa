"""Do trainers of other people keep a byte budget, unmodified? `python -m xform run --policy`."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.report import keep, known, replace, table
from xform.terminal.text import parse_bytes

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
TRAINERS = ["flax_lm1b", "flax_gemma", "flax_mnist", "flax_seq2seq", "haiku_transformer",
            "equinox_rnn"]  # fmt: skip
STEPS = 4
# Parts of the bytes that the step takes without a budget.
BUDGETS = (0.9, 0.8)
# The same for budgets with slices, of the trainers that are run with them.
SLICED, SLICES_BUDGETS = ("flax_gemma", "flax_lm1b"), (0.8,)
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
PLANNED = re.compile(
    r"planned step: (?P<step>\S+), .* (?P<size>\S+ \S+) on each device, .*?(?P<n>\d+) programs?"
)
FLOOR = re.compile(r"the lowest peak found is (?P<size>\S+ \S+) \(compiled")
ROOMY = "1TiB"


def run(trainer: str, sources: Path, policy: str | None) -> dict[str, Any]:
    """Run a trainer under JAX, or under xform with a policy; return what it printed."""
    under = [] if policy is None else ["-m", "xform", "run", "--policy", policy]
    script = str(HERE / f"{trainer}.py")
    command = [sys.executable, "-W", "ignore", *under, script, str(sources), str(STEPS)]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent), "JAX_PLATFORMS": "cpu"}
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    losses = [float(x) for line in done.stdout.splitlines() if line.startswith("loss")
              for x in NUMBER.findall(line)]  # fmt: skip
    found = [m.groupdict() for m in PLANNED.finditer(done.stderr)]
    error = next((s for s in done.stderr.splitlines() if "lowest peak" in s), "")
    error = error.replace(str(sources), "FOLDER")[:200]
    return {"exit": done.returncode, "losses": losses, "steps": found, "error": error,
            "seconds": time.perf_counter() - start}  # fmt: skip


def measure(trainer: str, sources: Path) -> dict[str, Any]:
    """Run a trainer under JAX, with a budget that everything fits, and with smaller budgets."""
    found = {"jax": run(trainer, sources, None), "roomy": run(trainer, sources, f"budget:{ROOMY}")}
    size = largest(found["roomy"])
    for part in BUDGETS if size else ():
        found |= within(trainer, sources, "budget", part, size)
    return found


def measure_slices(trainer: str, sources: Path, size: int) -> dict[str, Any]:
    """Run a trainer under JAX, and with budgets with slices. `size`: its bytes without a budget."""
    found = {"jax": run(trainer, sources, None)}
    for part in SLICES_BUDGETS:
        found |= within(trainer, sources, "slices:budget", part, size)
    return found


def within(trainer: str, sources: Path, policy: str, part: float, size: int) -> dict[str, Any]:
    """Run a trainer within a part of `size` bytes; if that is refused, also within the floor."""
    budget = part * size
    one = run(trainer, sources, f"{policy}:{int(budget)}B") | {"budget": budget}
    if not (floor := FLOOR.search(one["error"])):
        return {str(part): one}
    budget = 1.01 * parse_bytes(floor["size"])  # a little more, as the message is rounded
    again = run(trainer, sources, f"{policy}:{int(budget)}B") | {"budget": budget}
    return {str(part): one, "floor": again}


def largest(found: dict[str, Any]) -> int:
    """Return the bytes of the largest planned step."""
    return max((parse_bytes(step["size"]) for step in found["steps"]), default=0)


def difference(found: dict[str, Any], want: dict[str, Any]) -> str:
    """Return the largest relative difference of the losses."""
    pairs = list(zip(found["losses"], want["losses"], strict=True))
    return f"{max(abs(a - b) / abs(b) for a, b in pairs):.0e}"


def cells(found: dict[str, Any], parts: Sequence[float]) -> list[str]:
    """Return the cells of each budget of a trainer: bytes, and the difference of the losses."""
    row: list[str] = []
    for part in map(str, parts):
        one = found.get(part)
        if one and one["error"]:
            one = found.get("floor", one)
            row += [f"refused; its floor: {mib(one)}", difference(one, found["jax"])]
            continue
        if one is None or one["exit"]:
            row += ["failed", ""]
            continue
        kept = "" if largest(one) <= one["budget"] * 1.001 else " EXCEEDED"
        row += [f"{mib(one)}{kept}", difference(one, found["jax"])]
    return row


def mib(found: dict[str, Any]) -> str:
    """Return the MiB of the largest planned step."""
    return f"{largest(found) / 2**20:.1f}"


def write_tables() -> None:
    """Write the tables of all stored results."""
    results = known(RESULTS)
    stamp = f"Measured with JAX {jax.__version__} on a CPU; {STEPS} steps."
    of_parts = lambda parts: [h for p in parts for h in (f"budget {p}, MiB", "losses differ by")]
    head = ["trainer", "MiB without a limit", "losses differ by", *of_parts(BUDGETS)]
    rows = [[name, mib(found["roomy"]), difference(found["roomy"], found["jax"]),
             *cells(found, BUDGETS)]
            for name in TRAINERS if (found := results.get(name))]  # fmt: skip
    replace(HERE, "trainers", [*table(head, rows), "", stamp])
    head = ["trainer", "MiB without a limit", *of_parts(SLICES_BUDGETS)]
    rows = [[name, mib(results[name]["roomy"]), *cells(found, SLICES_BUDGETS)]
            for name in SLICED if (found := results.get(sliced(name)))]  # fmt: skip
    replace(HERE, "slices", [*table(head, rows), "", stamp])


def sliced(trainer: str) -> str:
    """Return the name of a trainer's results with slices."""
    return f"{trainer}, slices"


def main() -> None:
    """Run what is not known; print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=Path, help="a folder of checkouts; see ../unmodified")
    parser.add_argument("--only", action="append", choices=TRAINERS)
    options = parser.parse_args()
    for trainer in options.only or TRAINERS:
        if options.sources and trainer not in known(RESULTS):
            found = keep(RESULTS, trainer, measure(trainer, options.sources))[trainer]
            print(trainer, {k: (v["exit"], len(v["losses"])) for k, v in found.items()}, flush=True)
        if options.sources and trainer in SLICED and sliced(trainer) not in known(RESULTS):
            size = largest(known(RESULTS)[trainer]["roomy"])
            keep(RESULTS, sliced(trainer), measure_slices(trainer, options.sources, size))
    write_tables()


if __name__ == "__main__":
    main()
