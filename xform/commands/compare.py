"""`python -m xform compare`: compare policies and targets."""

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
    render,
)


def run(args: argparse.Namespace) -> str:
    """Compare policies and targets: bytes, FLOPs and estimated time."""
    return render(compare_policies(args), args)


def compare_policies(args: argparse.Namespace) -> Any:
    """The comparison that the command line requests."""
    on = read_function(args)
    policies = [policy(text) for text in args.policy or ["min_cut"]]
    comparison = xform.compare(on.f, *on.args, policies=policies, targets=args.target,
                               policy_argument=on.policy_argument, **options(args))  # fmt: skip
    return on.named(comparison, comparison.description.note)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_function(parser)
    add_policies(parser, "save_everything,min_cut,save_dots,save_nothing")
    add_targets(parser)
    add_outputs(parser)
