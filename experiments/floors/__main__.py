"""Plan steps within the fewest bytes that `jax.checkpoint` reaches."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import xform
from experiments.floors.programs import LAYERS, step_of
from experiments.report import keep, known, replace, table

FOLDER = Path(__file__).parent
TARGETS = ["gpu:h100", "tpu:v5e:1x1", "cpu"]
_stock = jax.checkpoint_policies
POLICIES: dict[str, Any] = {
    "full": _stock.nothing_saveable,
    "dots": _stock.dots_saveable,
    "dots without batch": _stock.dots_with_no_batch_dims_saveable,
    "names": _stock.save_only_these_names("mixed", "hidden"),
}
_MIB = 2**20


def _plain(f: Any) -> Any:
    return f


def bytes_of_jax(
    name: str, scanned: bool, target: str, policies: Sequence[str]
) -> dict[str, int | None]:
    """Return the bytes of the step under `jax.checkpoint` around each layer and around the loss."""
    found: dict[str, int | None] = {}
    for policy in policies:
        saveable = POLICIES[policy]
        mark = lambda f, saveable=saveable: jax.checkpoint(f, policy=saveable)
        for where, wraps in {"layer": (mark, _plain), "loss": (_plain, mark)}.items():
            step, types = step_of(name, scanned, jax.value_and_grad, *wraps)
            report = xform.memory_analysis(step, *types, target=target, donate_argnums=0)
            found[f"{policy}, {where}"] = report.total_bytes
    return found


def bytes_of_xform(name: str, scanned: bool, target: str, limit: int) -> dict[str, Any]:
    """Ask `xform.jit` for `limit` bytes, without marks; the floor that it names if it refuses."""
    step, types = step_of(name, scanned, xform.value_and_grad, _plain, _plain)
    jitted, policy = xform.jit(step, donate_argnums=0), xform.policies.budget(limit)
    try:
        plan = xform.plan(jitted, *types, policy=policy, target=target)
    except xform.errors.BudgetInfeasible as error:
        return {"bytes": error.floor_bytes, "compiles": None}
    return {"bytes": plan.compiled_bytes, "compiles": plan.compiles}


def main() -> None:
    """Measure what is not stored, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--only", help="measure only models whose name contains this text")
    parser.add_argument("--again", action="store_true", help="measure what is stored, too")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="default: all")
    args = parser.parse_args()
    path = FOLDER / "results.json"
    for target in args.target or TARGETS[:2]:
        for scanned in (False, True):
            for name in LAYERS:
                full_name = f"{name}, {'scanned' if scanned else 'unrolled'}"
                key = f"{full_name}, {target}"
                if (args.only or "") not in full_name or (key in known(path) and not args.again):
                    continue
                found = bytes_of_jax(name, scanned, target, args.policy or [*POLICIES])
                limit = min(size for size in found.values() if size is not None)
                ours = bytes_of_xform(name, scanned, target, limit)
                best = min(found, key=lambda way: found[way] or sys.maxsize)
                print(f"{key}: {best} {limit / _MIB:.1f}, xform.jit {ours}", flush=True)
                keep(path, key, {"jax": found, "xform": ours})
    rows = []
    for key, measured in known(path).items():
        model, target = key.rsplit(", ", 1)
        sizes, ours = measured["jax"], measured["xform"]
        best = min(sizes, key=lambda way: sizes[way] or sys.maxsize)
        rows.append([
            model, target, best, f"{sizes[best] / _MIB:,.1f}", f"{ours['bytes'] / _MIB:,.1f}",
            f"{ours['bytes'] / sizes[best]:.3f}", str(ours["compiles"] or "refused"),
        ])  # fmt: skip
    head = (
        "model",
        "target",
        "smallest of jax.checkpoint",
        "MiB",
        "xform.jit, MiB",
        "ratio",
        "programs compiled",
    )
    replace(FOLDER, "table", table(head, rows))


if __name__ == "__main__":
    main()
