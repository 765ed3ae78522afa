"""`python -m xform max-batch`: find the largest batch that fits a device."""

from __future__ import annotations

import argparse
import json
from typing import Any

import xform
from xform.commands.shared.function import (
    add_function,
    add_policy,
    positions,
    read_function,
    under_policy,
)
from xform.commands.shared.reports import add_targets, options


def run(args: argparse.Namespace) -> str:
    """Find the largest batch that fits a device, by compiling. Nothing is run.

    If `inputs` has an argument `batch`, it is called for the arguments of each batch size.
    Otherwise, or with --batch-axis or --batch-argnums, one axis of some arguments is resized.
    Without --batch-argnums, these are the last argument and all others that have the same size on
    that axis. Without --policy the function is compiled unchanged. With --policy, this command
    compiles what `memory --policy` compiles.
    """
    function = read_function(args, planned=args.policy is not None)
    by_axis = args.batch_axis is not None or args.batch_argnums != "auto"
    inputs = None if by_axis else function.args_of_batch
    batch = xform.memory.max_batch(
        under_policy(function, args, args.policy, args.target),
        *(() if inputs else function.args),
        target=args.target,
        inputs=inputs,
        batch_axis=args.batch_axis or 0,
        batch_argnums=args.batch_argnums,
        multiple_of=args.multiple_of,
        **options(args),
    )
    if args.json:
        return json.dumps({"batch": batch.size, "of": batch.of, "tried": batch.tried}, indent=1)
    return str(batch)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_function(parser)
    add_targets(parser, several=False)
    add_policy(parser, None)
    parser.add_argument("--batch-axis", type=int, metavar="N",
                        help="axis of the arguments that is the batch (default: 0)")  # fmt: skip
    parser.add_argument("--batch-argnums", type=_argnums, default="auto", metavar="1,2",
                        help="positions of the arguments that have a batch axis, or all "
                        "(default: found from their sizes)")  # fmt: skip
    parser.add_argument("--multiple-of", type=int, default=1, metavar="N",
                        help="try only batch sizes that are multiples of N")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def _argnums(text: str) -> Any:
    return text if text == "auto" else positions(text)
