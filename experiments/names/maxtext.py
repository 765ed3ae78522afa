"""Plan the named values of MaxText's own step, and let MaxText compile the exported settings."""

from __future__ import annotations

import argparse
from pathlib import Path

import xform
from experiments.report import write_table
from experiments.trainers.maxtext_step import Step

HERE = Path(__file__).parent
MIB, GFLOP = 2**20, 10**9
HEAD = ["budget, MiB", "settings", "promised, MiB", "MaxText, MiB", "recomputed, GFLOP"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, action="append",
                        help="a budget between `full` (0) and `minimal` (1)")  # fmt: skip
    args = parser.parse_args()
    full, minimal = (Step(remat_policy=p).compiled_bytes() for p in ("full", "minimal"))
    print(f"full {full / MIB:.1f} MiB, minimal {minimal / MIB:.1f} MiB", flush=True)
    step, rows = Step(remat_policy="full"), list[list[str]]()
    for share in args.share or (0.3, 0.6):
        budget = round(full + share * (minimal - full))
        with step.on_mesh():
            plan = xform.plan_names(step.under, *step.args, policy=xform.policies.budget(budget),
                                    free=False, **step.options)  # fmt: skip
        print(plan, flush=True)
        settings = plan.maxtext()
        itself = Step(**settings).compiled_bytes()
        kept = {name: value for name, value in settings.items() if value != "remat"}
        rows.append([
            f"{budget / MIB:.1f}",
            " ".join(f"{name}={value}" for name, value in kept.items()),
            f"{plan.compiled_bytes / MIB:.2f}",
            f"{itself / MIB:.2f}",
            f"{plan.recompute_flops / GFLOP:.1f}",
        ])  # fmt: skip
    write_table(HERE, HEAD, rows, name="maxtext")


if __name__ == "__main__":
    main()
