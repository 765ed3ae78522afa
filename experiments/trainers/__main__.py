"""Do trainers of other people keep a byte budget, unmodified? `python -m xform run --policy`."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
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
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
PLANNED = re.compile(
    r"planned step: (?P<step>\S+), .* (?P<size>\S+ \S+) on each device, .*?(?P<n>\d+) programs?"
)
FLOOR = re.compile(r"the lowest peak found is (?P<size>\S+ \S+) \(compiled")
ROOMY = "1TiB"


def run(trainer: str, sources: Path, policy: str | None) -> dict[str, Any]:
    """Run a trainer under JAX, or under xform with a budget; return what it printed."""
    under = [] if policy is None else ["-m", "xform", "run", "--policy", f"budget:{policy}"]
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
    found = {"jax": run(trainer, sources, None), "roomy": run(trainer, sources, ROOMY)}
    size = largest(found["roomy"])
    for part in BUDGETS if size else ():
        one = run(trainer, sources, f"{int(part * size)}B") | {"budget": part * size}
        found[str(part)] = one
        if floor := FLOOR.search(one["error"]):  # a little more, as the message is rounded
            size_ = 1.01 * parse_bytes(floor["size"])
            found["floor"] = run(trainer, sources, f"{int(size_)}B") | {"budget": size_}
    return found


def largest(found: dict[str, Any]) -> int:
    """Return the bytes of the largest planned step."""
    return max((parse_bytes(step["size"]) for step in found["steps"]), default=0)


def difference(found: dict[str, Any], want: dict[str, Any]) -> str:
    """Return the largest relative difference of the losses."""
    pairs = list(zip(found["losses"], want["losses"], strict=True))
    return f"{max(abs(a - b) / abs(b) for a, b in pairs):.0e}"


def cells(found: dict[str, Any]) -> list[str]:
    """Return the cells of one run: bytes, programs, the difference of the losses, and the end."""
    jax_ = found["jax"]
    row = [f"{largest(found['roomy']) / 2**20:.1f}", difference(found["roomy"], jax_)]
    for part in map(str, BUDGETS):
        one = found.get(part)
        if one and one["error"]:
            one = found.get("floor", one)
            row += [f"refused; its floor: {largest(one) / 2**20:.1f}", difference(one, jax_)]
            continue
        if one is None or one["exit"]:
            row += ["failed", ""]
            continue
        kept = "" if largest(one) <= one["budget"] * 1.001 else " EXCEEDED"
        row += [f"{largest(one) / 2**20:.1f}{kept}", difference(one, jax_)]
    return row


def main() -> None:
    """Run what is not known; print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=Path, help="a folder of checkouts; see ../unmodified")
    parser.add_argument("--only", action="append", choices=TRAINERS)
    options = parser.parse_args()
    for trainer in options.only or TRAINERS:
        if options.sources and trainer not in known(RESULTS):
            found = keep(RESULTS, trainer, measure(trainer, options.sources))[trainer]
            print(trainer, {k: (v["exit"], len(v["losses"])) for k, v in found.items()}, flush=True)
    head = ["trainer", "MiB without a limit", "losses differ by",
            *(h for p in BUDGETS for h in (f"budget {p}, MiB", "losses differ by"))]  # fmt: skip
    rows = [[name, *cells(found)] for name, found in known(RESULTS).items()]
    stamp = f"Measured with JAX {jax.__version__} on a CPU; {STEPS} steps."
    replace(HERE, "trainers", [*table(head, rows), "", stamp])


if __name__ == "__main__":
    main()
