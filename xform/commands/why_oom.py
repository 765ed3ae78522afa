"""`python -m xform why-oom`: why a function does not fit a device."""

from __future__ import annotations

import argparse

import xform
from xform.commands.given import add_function, given
from xform.commands.reports import add_targets, options


def run(args: argparse.Namespace) -> str:
    """Why a function does not fit a device: what is live at its peak, and what would help."""
    on = given(args)
    return str(xform.why_oom(on.f, *on.args, target=args.target, **options(args)))


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    add_function(parser)
    add_targets(parser, several=False)
