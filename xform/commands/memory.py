"""`python -m xform memory`: report the memory of a function on a device."""

from __future__ import annotations

import argparse

import xform
from xform.commands.compare import compare_policies
from xform.commands.function import add_function, read_function, read_policy
from xform.commands.reports import (
    add_outputs,
    add_policies,
    add_targets,
    options,
    render,
)
from xform.transforms.policy_report import report_on


def run(args: argparse.Namespace) -> str:
    """Report the memory that a function needs on a device, and the buffers at its peak.

    The device need not be attached. Without --policy the function is compiled unchanged. With
    --policy, the function is a loss, and its value_and_grad is compiled under the policy. With
    --policy-argument too, it is a training step, which gets the policy as that argument. The first
    lines of the report say what was compiled. Several policies or targets are compared in a table.
    """
    if len(args.target) > 1 or len(args.policy or ()) > 1:
        return render(compare_policies(args), args)
    function, (target,) = read_function(args), args.target
    if args.policy:
        report = report_on(
            target,
            function.f,
            function.args,
            read_policy(args.policy[0]),
            policy_argument=function.policy_argument,
            **options(args),
        )
    else:
        report = xform.memory_analysis(function.f, *function.args, target=target, **options(args))
    note = report.description.note
    if not args.policy and not report.description.transform:
        compiled = "under that policy"
        if function.policy_argument is None:
            compiled = "its value_and_grad (a training step needs --policy-argument too)"
        note = f"with --policy min_cut: {compiled}\n{note}".strip()
    return render(function.with_note(report, note), args)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_function(parser)
    add_policies(parser, None)
    add_targets(parser)
    add_outputs(parser)
