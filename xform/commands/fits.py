"""`python -m xform fits`: check whether a function fits a device."""

from __future__ import annotations

import argparse
import json

import xform
from xform.commands.shared.function import (
    add_function,
    add_policy,
    read_function,
    under_policy,
)
from xform.commands.shared.reports import add_targets, options

# The exit status if the function does not fit.
OVER = 3


def run(args: argparse.Namespace) -> str:
    """Check whether a function fits a device. Exits with 3 if it does not.

    Without --policy the function is compiled unchanged. With --policy, this command compiles what
    `memory --policy` compiles.
    """
    function = read_function(args, planned=args.policy is not None)
    report = xform.fits(
        under_policy(function, args, args.policy, args.target),
        *function.args,
        target=args.target,
        **options(args),
    )
    args.status = 0 if report.fits else OVER
    if args.json:
        return json.dumps({"fits": report.fits, **report.to_dict()}, indent=1)
    described = function.with_note(report, report.description.note)
    return f"{report.verdict()}\n{described.description}"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_function(parser)
    add_targets(parser, several=False)
    add_policy(parser, None)
    parser.add_argument("--json", action="store_true", help="print the report as a JSON object")
