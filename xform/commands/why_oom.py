"""`python -m xform why-oom`: why a function does not fit a device."""

from __future__ import annotations

import argparse

import xform
from xform.commands.function import add_function, add_policy, read_function, under
from xform.commands.reports import add_targets, options


def run(args: argparse.Namespace) -> str:
    """Why a function does not fit a device: what is live at its peak, and what would help.

    Without --policy the function is compiled as it is, see `memory`.
    """
    on = read_function(args)
    f = under(on, args.policy)
    return str(xform.why_oom(f, *on.args, target=args.target, **options(args)))


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    add_function(parser)
    add_targets(parser, several=False)
    add_policy(parser, None)
