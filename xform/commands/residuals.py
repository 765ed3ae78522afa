"""`python -m xform residuals`: list the values that are saved for the backward pass."""

from __future__ import annotations

import argparse
import json

import xform
from xform.commands.shared.function import (
    add_argnums,
    add_function,
    add_policy,
    read_function,
    read_policy,
)


def run(args: argparse.Namespace) -> str:
    """List the values saved for the backward pass of a function, with their bytes and lines."""
    function = read_function(args)
    table = xform.residuals(
        function.f,
        *function.args,
        policy=read_policy(args.policy),
        argnums=args.argnums,
        has_aux=args.has_aux,
    )
    if args.json:
        return json.dumps(table.to_dict(), indent=1)
    return function.with_heading(table, args.argnums)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_function(parser)
    add_policy(parser)
    add_argnums(parser, default=None)
    parser.add_argument("--json", action="store_true", help="print a JSON object with rows")
