"""Write the README's tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.report import write_table
from experiments.unmodified.results import AGREEMENT, Results
from experiments.unmodified.ways import HALF, LEAST, STOCK

MIB = 2**20
COMPILED = ["default", "save_dots", "save_nothing"]
SIZES = ["program", "target", "jax.grad, MiB", *STOCK, *COMPILED, "default, FLOPs again",
         "default, live of kept", f"budget, {LEAST}", "FLOPs again", f"budget, {HALF}",
         "FLOPs again"]  # fmt: skip
STEPS = ["program", "loss differs by", "gradient differs by", "step time of jax.grad's",
         "quartiles"]  # fmt: skip


def write(folder: Path, results: Results) -> None:
    """Write the bytes and FLOPs of programs on targets, and the default's accuracy on a CPU."""
    sizes = [sized(name, target, ways) for name, parts in results.items()
             for target, ways in parts.items()
             if target != AGREEMENT and "jax.grad" in ways]  # fmt: skip
    write_table(folder, SIZES, sizes, "sizes", "by each target's compiler")
    steps = [timed(name, parts[AGREEMENT]) for name, parts in results.items()
             if AGREEMENT in parts]  # fmt: skip
    write_table(folder, STEPS, steps, "steps", "cpu")


def sized(name: str, target: str, ways: Mapping[str, Any]) -> list[str]:
    """Return each way's temporary bytes relative to jax.grad's, and its recomputed FLOPs."""
    base = ways["jax.grad"]
    if "refused" in base:
        return [name, target, "refused", *[""] * (len(SIZES) - 3)]
    row = [name, target, f"{base['temp'] / MIB:.0f}"]
    row += [part(ways.get(way), base) for way in (*STOCK, *COMPILED)]
    row += [again(ways.get("default"), base), live(ways.get("default", {}))]
    for way in (LEAST, HALF):
        row += [part(ways.get(way), base), again(ways.get(way), base)]
    return row


def part(size: Mapping[str, Any] | None, base: Mapping[str, Any]) -> str:
    """Return the temporary bytes relative to jax.grad's, as text."""
    if size is None:
        return ""
    if "refused" in size:
        return "refused"
    # The floor counts all bytes, including arguments and outputs, which are not temporary.
    if "floor" in size:
        return f"no plan below {(size['floor'] - base['total'] + base['temp']) / base['temp']:.2f}"
    return f"{size['temp'] / base['temp']:.2f}"


def again(size: Mapping[str, Any] | None, base: Mapping[str, Any]) -> str:
    """Return the FLOPs beyond jax.grad's, relative to jax.grad's, as text."""
    if size is None or "flops" not in size:
        return ""
    return f"{size['flops'] / base['flops'] - 1:.1%}"


def live(size: Mapping[str, Any]) -> str:
    """Return the residuals live at the peak, relative to the plan's, as text."""
    return f"{size['live'] / size['kept']:.2f}" if "live" in size else ""


def timed(name: str, found: Mapping[str, Any]) -> list[str]:
    """Return the differences, and the median ratio of step times with its quartiles."""
    middle, low, high = found["time"]
    return [name, f"{found['loss difference']:.0e}", f"{found['gradient difference']:.0e}",
            f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]  # fmt: skip
