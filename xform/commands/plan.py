"""`python -m xform plan`: choose the values that the backward pass saves, and verify the plan."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

import xform
from xform.commands.shared.function import (
    add_argnums,
    add_function,
    add_policy,
    read_function,
    read_policy,
)
from xform.commands.shared.reports import add_donate, file, picture, write_file
from xform.commands.shared.transform import PLANNED
from xform.steps.step_plan import StepPlan


def run(args: argparse.Namespace) -> str:
    """Choose the values that the backward pass saves, and compile to verify the plan."""
    function = read_function(args, planned=True)
    # With --transform grad, value_and_grad or vjp, `function.f` is a step that takes this
    # derivative, by --argnums and --has-aux. `xform.plan` takes these options for a loss only.
    is_derivative = args.transform in PLANNED
    argnums, has_aux = (0, False) if is_derivative else (args.argnums, args.has_aux)
    plan = xform.plan(
        function.f,
        *function.args,
        policy=read_policy(args.policy),
        argnums=argnums,
        has_aux=has_aux,
        target=args.target,
        donate_argnums=args.donate,
        verify=not args.no_verify,
    )
    write_file(args.save, plan.save, args)
    write_file(args.png, plan.plot, args)
    if args.json:
        return json.dumps(_data(plan), indent=1)
    return function.with_heading(plan, argnums)


def _data(plan: xform.Plan | StepPlan) -> dict[str, Any]:
    """Return a plan as JSON data: its numbers, and a row for each value.

    The plan of a step has totals of these numbers, and the plans of its derivatives, not rows.
    """
    numbers = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)
               if f.name not in ("rows", "record", "live", "saved", "plans")}  # fmt: skip
    if isinstance(plan, StepPlan):
        totals = ("predicted_bytes", "saved_bytes", "forward_flops", "recompute_flops")
        numbers |= {name: getattr(plan, name) for name in totals}
        return {**numbers, "plans": [_data(one) for one in plan]}
    return {**numbers, "rows": [dataclasses.asdict(row) for row in plan]}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_function(parser)
    add_policy(parser)
    add_argnums(parser)
    add_donate(parser)
    parser.add_argument("--target", default=None, metavar="DEVICE",
                        help="device to plan for (default: JAX's default device)")  # fmt: skip
    parser.add_argument(
        "--no-verify", action="store_true", help="do not compile; report predicted bytes only"
    )
    parser.add_argument(
        "--png",
        type=picture,
        metavar="FILE",
        help="write a plot of the live bytes at each step of the program",
    )
    parser.add_argument("--save", type=file, metavar="FILE",
                        help="write the plan to a file that xform.load reads")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print a JSON object with rows")
