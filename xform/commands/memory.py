"""`python -m xform memory`: report the memory of a function on a device."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xform
from xform.commands.compare import compare_policies
from xform.commands.shared.function import add_function, read_function, under_policy
from xform.commands.shared.reports import (
    add_outputs,
    add_policies,
    add_targets,
    file,
    options,
    render,
)
from xform.errors import BudgetInfeasible
from xform.memory.report import MemoryReport
from xform.memory.saved_peaks import growth, save_peaks
from xform.steps.compare import of_targets
from xform.terminal.text import human_bytes

# The exit status if the peak grew.
GREW = 3


def run(args: argparse.Namespace) -> str:
    """Report the memory that a function needs on a device, and the buffers at its peak.

    The device need not be attached. The command compiles

    - the function, unchanged, without --policy;
    - a training step, whose derivatives follow the policy, with --policy if xform.jit made the
      function, or with --transform jit;
    - value_and_grad of a loss, under the policy, with --policy for any other function.

    The first lines of the report say what was compiled. Several policies or targets are compared in
    a table.

    --save writes the bytes at the peak to a small file, and --against compares with such a file: it
    exits with 3 if a total grew by more than --tolerance, and prints the lines that grew.
    """
    if len(args.policy or ()) > 1 or (args.policy and len(args.target) > 1):
        comparison = compare_policies(args)
        if args.save or args.against:
            for entry in comparison:
                if entry.report is None:
                    raise BudgetInfeasible(
                        f"policy {entry.policy} on {entry.target}",
                        f"the lowest peak found is {human_bytes(entry.floor_bytes)}", "",
                        "raise the budget: a peak that does not exist cannot be compared",
                        floor_bytes=entry.floor_bytes,
                    )  # fmt: skip
        reports = [entry.report for entry in comparison if entry.report is not None]
        return _render(comparison, reports, args)
    function = read_function(args, planned=bool(args.policy))
    policy = args.policy[0] if args.policy else None
    f = under_policy(function, args, policy, args.target[0])
    reports = [
        xform.memory_analysis(f, *function.args, target=target, **options(args))
        for target in args.target
    ]
    first = reports[0].description
    note = first.note
    if not (first.policy or first.transform):
        step = " (of a training step, also --transform jit)"
        note = f"for its derivative under a policy: --policy min_cut{step}\n{note}".strip()
    result = reports[0] if len(reports) == 1 else of_targets(reports)
    return _render(function.with_note(result, note), reports, args)


def _render(result: Any, reports: Sequence[MemoryReport], args: argparse.Namespace) -> str:
    """Return the report, or with --against its comparison with saved peaks.

    It also writes the file of --save, and sets `args.status` if a peak grew.
    """
    parts: list[str] = []
    if args.against:
        found = growth(args.against, *reports, tolerance=args.tolerance)
        args.status = GREW if any(one.exceeds for one in found) else 0
        parts += map(str, found)
    else:
        parts.append(render(result, args))
    if args.save:
        save_peaks(args.save, *reports)
        parts.append(f"wrote {args.save}")
    return "\n".join(parts)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_function(parser)
    add_policies(parser, None)
    add_targets(parser)
    add_outputs(parser)
    parser.add_argument("--save", type=file, metavar="FILE",
                        help="write the bytes at the peak to this JSON file")  # fmt: skip
    parser.add_argument("--against", type=Path, metavar="FILE",
                        help="compare with a file that --save wrote, instead of printing the "
                        "report")  # fmt: skip
    parser.add_argument("--tolerance", default="2%", metavar="2%",
                        help="the growth that is accepted, as a share or as bytes such as 10MiB "
                        "(default: 2%%)")  # fmt: skip
