"""`python -m xform compare`: policies on targets, side by side."""

from __future__ import annotations

import argparse
from typing import Any

import xform
from xform.commands.function import add_function, policy, read_function
from xform.commands.reports import (
    add_outputs,
    add_policies,
    add_targets,
    options,
    told,
)


def run(args: argparse.Namespace) -> str:
    """What policies take on targets: bytes, FLOPs, estimated time."""
    return told(compared(args), args)


def compared(args: argparse.Namespace) -> Any:
    """The comparison that a command line asks for."""
    on = read_function(args)
    policies = {name: policy(name) for name in args.policy or ["min_cut"]}
    comparison = xform.compare(on.f, *on.args, policies=policies, targets=args.target,
                               **options(args))  # fmt: skip
    return on.named(comparison, comparison.asked.note)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    add_function(parser)
    add_policies(parser, "save_everything,min_cut,save_dots,save_nothing")
    add_targets(parser)
    add_outputs(parser)
