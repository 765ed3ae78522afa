"""`python -m xform compare`: compare policies and targets."""

from __future__ import annotations

import argparse
from typing import Any

import xform
from xform.commands.shared.function import add_function, read_function, read_policy
from xform.commands.shared.reports import (
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
    """Return the `Comparison` that the command line requests."""
    function = read_function(args, planned=True)
    policies = [read_policy(text) for text in args.policy or ["min_cut"]]
    comparison = xform.compare(
        function.f,
        *function.args,
        policies=policies,
        targets=args.target,
        **options(args),
    )
    return function.with_note(comparison, comparison.description.note)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_function(parser)
    add_policies(parser, "save_everything,min_cut,save_dots,save_nothing")
    add_targets(parser)
    add_outputs(parser)
