"""`python -m xform max-batch`: the largest batch that fits a device."""

from __future__ import annotations

import argparse
import json

import xform
from xform.commands.given import add_function, given, positions
from xform.commands.reports import add_targets, options


def run(args: argparse.Namespace) -> str:
    """The largest batch with which a function fits a device, by compiling alone."""
    on = given(args)
    found = xform.max_batch(on.f, *on.args, target=args.target, batch_axis=args.batch_axis,
                            batch_argnums=args.batch_argnums, multiple_of=args.multiple_of,
                            **options(args))  # fmt: skip
    if args.json:
        return json.dumps({"batch": found.size, "tried": found.tried}, indent=1)
    return str(found)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    add_function(parser)
    add_targets(parser, several=False)
    parser.add_argument("--batch-axis", type=int, default=0, help="which axis (default: 0)")
    parser.add_argument("--batch-argnums", type=positions, default=-1, metavar="1,2",
                        help="arguments that have a batch (default: the last); or all")  # fmt: skip
    parser.add_argument("--multiple-of", type=int, default=1, metavar="N",
                        help="sizes that are asked for")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="an object")
