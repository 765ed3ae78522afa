"""`python -m xform why-oom`: explain why a function does not fit a device."""

from __future__ import annotations

import argparse

import xform
from xform.commands.shared.function import (
    add_function,
    add_policy,
    read_function,
    under_policy,
)
from xform.commands.shared.reports import add_targets, options


def run(args: argparse.Namespace) -> str:
    """Explain why a function does not fit a device: the buffers at its peak, and advice.

    Without --policy the function is compiled unchanged. With --policy, this command compiles what
    `memory --policy` compiles.
    """
    function = read_function(args, planned=args.policy is not None)
    f = under_policy(function, args, args.policy, args.target)
    return str(xform.memory.why_oom(f, *function.args, target=args.target, **options(args)))


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_function(parser)
    add_targets(parser, several=False)
    add_policy(parser, None)
