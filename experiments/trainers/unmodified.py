"""Do trainers of other people run under xform, unmodified, with the losses that JAX gives?

Each runs under plain JAX and as `python -m xform run`, in an environment of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from experiments.report import keep, known, replace, table

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS = HERE / "unmodified.json"
STEPS = 4
# The environment of each trainer, a folder in `ENVIRONMENTS`.
TRAINERS = {
    "maxtext_llama": "maxtext",
    "tunix_llama": "tunix",
    "keras_gpt": "keras",
    "flax_gemma": "flax",
    "equinox_rnn": "equinox",
    "haiku_transformer": "haiku",
    "kauldron_mnist": "kauldron",
}
# Environments with the checkouts of other programs beside them, in `sources`.
ENVIRONMENTS = Path(os.environ.get("XFORM_TRAINERS", ROOT / "build" / "trainers"))
# The largest relative difference of a loss from plain JAX's, in float32.
TOLERANCE = 1e-6
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
# A row of the table that `xform run` prints: the function, its line, the transform, and so on.
ROW = re.compile(
    r"(?P<function>\S+)  +(?P<line>\S.*?)  +(?P<transform>\w+)  +(?P<traced>\d+)  +\d+"
    r"  +(?P<jax>\S+ \w+)  +(?P<xform>\S+ \w+)  +(?P<flops>\S+ \w+)  +(?P<policy>\S+)"
)
VERSION = "import jax; print(jax.__version__)"


def missing(trainer: str) -> str:
    """Return why a trainer cannot run here; "" if it can."""
    python = ENVIRONMENTS / TRAINERS[trainer] / "bin" / "python"
    if not python.exists():
        return f"{trainer} needs an environment in {python.parent.parent}: see {HERE}/README.md"
    needs_sources = "sys.argv[1]" in (HERE / f"{trainer}.py").read_text()
    if needs_sources and not (ENVIRONMENTS / "sources").exists():
        return f"{trainer} needs the checkouts in {ENVIRONMENTS / 'sources'}: see {HERE}/README.md"
    return ""


def run(trainer: str, under: list[str]) -> dict[str, Any]:
    """Run a trainer in its environment, under some options of Python; return what it printed."""
    python = str(ENVIRONMENTS / TRAINERS[trainer] / "bin" / "python")
    script, sources = str(HERE / f"{trainer}.py"), str(ENVIRONMENTS / "sources")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    start = time.perf_counter()
    done = subprocess.run([python, "-W", "ignore", *under, script, sources, str(STEPS)],
                          env=environment, capture_output=True, text=True, check=False)  # fmt: skip
    losses = [float(x) for line in done.stdout.splitlines() if line.startswith("loss")
              for x in NUMBER.findall(line)]  # fmt: skip
    errors = done.stderr.replace(f"{sources}{os.sep}", "")
    rows = [m.groupdict() for m in map(ROW.fullmatch, errors.splitlines()) if m]
    return {"exit": done.returncode, "losses": losses, "rows": rows, "errors": errors[-2000:],
            "seconds": time.perf_counter() - start}  # fmt: skip


def measure(trainer: str) -> dict[str, Any]:
    """Run a trainer under JAX and under xform."""
    python = str(ENVIRONMENTS / TRAINERS[trainer] / "bin" / "python")
    version = subprocess.run([python, "-c", VERSION], capture_output=True, text=True, check=True)
    jax_, xform = run(trainer, []), run(trainer, ["-m", "xform", "run"])
    if not jax_["exit"]:
        del jax_["errors"]
    if not xform["exit"]:
        del xform["errors"]
    return {"version": version.stdout.strip(), "jax": jax_, "xform": xform}


def difference(found: dict[str, Any]) -> float:
    """Return the largest relative difference of the losses from plain JAX's."""
    pairs = [*zip(found["xform"]["losses"], found["jax"]["losses"], strict=True)]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def cells(name: str, found: dict[str, Any]) -> list[str]:
    """Return the cells of one trainer."""
    rows, n = found["xform"]["rows"], len(found["jax"]["losses"])
    row = rows[0] if rows else {}
    return [
        name, found["version"], str(found["xform"]["exit"]), f"{n}, {difference(found):.0e}",
        *(row.get(key, "") for key in ("line", "jax", "xform", "flops")),
    ]  # fmt: skip


def main() -> None:
    """Run what is not known; print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=TRAINERS)
    for trainer in parser.parse_args().only or TRAINERS:
        if reason := missing(trainer):
            print(reason, flush=True)
        elif trainer not in known(RESULTS):
            found = measure(trainer)
            ends = {k: (found[k]["exit"], found[k]["losses"]) for k in ("jax", "xform")}
            print(trainer, ends, flush=True)
            failed = [errors for k in ("jax", "xform") if (errors := found[k].pop("errors", ""))]
            print(*failed, sep="\n")
            if not failed:
                keep(RESULTS, trainer, found)
    head = ["trainer", "JAX", "exit code", "losses, differ by", "differentiated at", "JAX saves",
            "xform saves", "recomputed"]  # fmt: skip
    results = known(RESULTS)
    rows = [cells(name, results[name]) for name in TRAINERS if name in results]
    replace(HERE, "unmodified", [*table(head, rows), "", f"Measured on a CPU; {STEPS} steps."])


if __name__ == "__main__":
    main()
