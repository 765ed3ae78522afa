"""`python -m xform show`: print the program of a function, as traced, planned or compiled.

The joint program, which `--transform` adds, is the forward and the backward pass as one program.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from xform.adjoints.activity import ACTIVITIES, Activity, activities, activity_of
from xform.commands.shared.function import (
    BoundFunction,
    add_argnums,
    add_function,
    add_policy,
    read_policy,
    read_untransformed,
)
from xform.commands.shared.reports import split_commas
from xform.commands.shared.transform import arrays_alone
from xform.errors import WrongArgument
from xform.interpret.joint import analyze
from xform.introspection.argnums import positions as of_call
from xform.memory.program_text import compiled_text, stablehlo_text
from xform.passes import PASSES, PassResult, Pipeline, listing
from xform.passes.base import size
from xform.planner.decide import schedule
from xform.planner.report.show import show_schedule
from xform.policies import policy_name
from xform.program.arithmetic import differentiable
from xform.program.ir import Program, trace
from xform.terminal.text import columns
from xform.transforms.inspect import FlatArguments, derivative_at


@dataclasses.dataclass(frozen=True)
class _ArrayFunction:
    """A function of arrays only, and the types of its arguments."""

    f: Callable[..., Any]
    types: list[Any]


# Terminal codes for the colours of values: green, yellow, dim.
_CODES: dict[Activity, str] = {"active": "32", "stopped": "33", "constant": "2"}


def run(args: argparse.Namespace) -> str:
    """Print the program of a function: as traced, after a transform, after passes, as compiled.

    With --transform grad, value_and_grad, vjp or linearize, the joint program comes first: the
    forward part, the saved values, the backward part, and the recomputed operations. --stablehlo
    and --hlo show the input and the output of the compiler instead.

    On a terminal, or with --color, values are in colour. Values are green if the derivative with
    respect to the arguments of --argnums passes through them. They are yellow if the derivative is
    stopped (by stop_gradient, or at integers), and dim if they are constant. The environment
    variable NO_COLOR turns colours off.
    """
    if args.target and not args.hlo:
        raise WrongArgument(
            f"show --target {args.target}", "only --hlo compiles for a target", "",
            "add --hlo, or leave out --target",
        )  # fmt: skip
    function = read_untransformed(args)
    flat = _transformed(function, args)
    steps: list[PassResult] = []
    if args.passes:
        pipeline = Pipeline([PASSES[name]() for name in args.passes])
        steps = list(pipeline.steps(trace(flat.f, *flat.types)))
        flat = dataclasses.replace(flat, f=pipeline(flat.f))
    if args.stablehlo:
        return stablehlo_text(flat.f, flat.types)
    if args.hlo:
        return compiled_text(flat.f, flat.types, args.target)
    return "\n\n".join(_sections(function, args, flat, steps))


def _sections(function: BoundFunction, args: argparse.Namespace, flat: _ArrayFunction,
              steps: Sequence[PassResult]) -> Iterator[str]:  # fmt: skip
    called = f"{args.transform} of {function.name}" if args.transform else function.name
    if args.transform in ("grad", "value_and_grad", "vjp", "linearize"):
        yield _joint(function, args)
    text = lambda prog: f"{_count(prog)}\n{_listing(function, args, prog)}"
    if not steps:
        yield f"{called}: {text(trace(flat.f, *flat.types))}"
        return
    if args.print_after_all:
        for step in steps:
            yield f"after {step.name}: {text(step.program)}"
    else:
        yield f"{called}, after all passes: {text(steps[-1].program)}"
    rows = [
        [s.name, str(s.equations_before), str(s.equations_after), f"{1000 * s.seconds:.1f}"]
        for s in steps
    ]
    yield columns([["pass", "equations before", "after", "ms"], *rows], right=(1, 2, 3))


def _listing(function: BoundFunction, args: argparse.Namespace, prog: Program) -> str:
    """Return the program as text. If colours are on, values are coloured, and a legend follows."""
    if not _in_colour(args.color):
        return listing(prog, args.lines)
    given = FlatArguments(function.args)
    n, argnums = len(given.arrays()), _argnums(function, args.argnums)
    if args.transform not in (None, "grad", "value_and_grad"):
        argnums = range(len(function.args))
    wrt = of_call(argnums, len(function.args), "show --argnums")
    # Inputs after the arguments are cotangents or tangents.
    active = {*given.indices(wrt), *range(n, len(prog.inputs))}
    inputs: list[Activity] = [
        "active" if i in active and differentiable(v.aval) else "constant"
        for i, v in enumerate(prog.inputs)
    ]
    known = activities(prog, inputs)
    painted = lambda activity, text: f"\x1b[{_CODES[activity]}m{text}\x1b[0m"
    text = listing(prog, args.lines, paint=lambda v, text: painted(activity_of(v, known), text))
    return f"{text}\ncolours {' '.join(painted(c, c) for c in reversed(ACTIVITIES))}"


def _in_colour(requested: bool | None) -> bool:
    """Return whether to print in colour: as requested, else on a terminal without NO_COLOR."""
    if requested is not None:
        return requested
    is_refused = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not is_refused


def _count(prog: Program) -> str:
    """Return the number of equations as text, such as "5 equations"."""
    n = size(prog)
    return f"{n} equation{'s' * (n != 1)}"


def _joint(function: BoundFunction, args: argparse.Namespace) -> str:
    """Return the text of the joint program of the requested transform, under its policy."""
    if args.transform in ("grad", "value_and_grad"):
        traced = derivative_at("show", function.f, function.args, args.argnums, args.has_aux)
    else:
        flat = _of_arrays(function)
        traced = derivative_at("show", flat.f, flat.types, None, args.has_aux)
    if args.transform == "linearize":
        fun = traced.function
        linearized = schedule(
            analyze(fun.program, fun.active(), fun.differentiable(), push=True), None
        )
        text = show_schedule(linearized, args.lines, "tangents")
        return f"joint program of {function.name}, linearized\n{text}"
    policy = read_policy(args.policy or "min_cut")
    text = show_schedule(traced.planned(policy).schedule, args.lines)
    return f"joint program of {function.name}, {policy_name(policy)}\n{text}"


def _of_arrays(function: BoundFunction) -> _ArrayFunction:
    """Return the function as one of only its array arguments; the other arguments are fixed."""
    return _ArrayFunction(*arrays_alone(function.f, function.args))


def _transformed(function: BoundFunction, args: argparse.Namespace) -> _ArrayFunction:
    """Return the function after `--transform`, as one of arrays only.

    Its outputs are a flat list of arrays. Outputs of dtype float0 are left out. For `vjp`, only the
    cotangents are returned, not the value.
    """
    if args.transform:
        function = function.transformed(args, read_policy(args.policy) if args.policy else None)
    flat = _of_arrays(function)

    def program(*xs: Any) -> list[Any]:
        return [y for y in jax.tree.leaves(flat.f(*xs)) if y.dtype != jax.dtypes.float0]

    return dataclasses.replace(flat, f=program)


def _argnums(function: BoundFunction, argnums: int | Sequence[int] | None) -> int | Sequence[int]:
    """Return `argnums`, or the positions of all arguments for None."""
    return tuple(range(len(function.args))) if argnums is None else argnums


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_function(parser)
    add_policy(parser, default=None)
    add_argnums(parser)
    parser.add_argument("--passes", type=_passes, default=(), metavar="PASS,PASS",
                        help=f"passes to run, in the given order: {', '.join(PASSES)}")  # fmt: skip
    parser.add_argument("--print-after-all", action="store_true",
                        help="show the program after each pass")  # fmt: skip
    parser.add_argument(
        "--lines", action="store_true", help="show the source line of each equation"
    )
    parser.add_argument("--color", action=argparse.BooleanOptionalAction,
                        help="colour values by whether a derivative passes through them (default: "
                        "on a terminal)")  # fmt: skip
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--stablehlo", action="store_true", help="show the compiler's input, as StableHLO"
    )
    form.add_argument(
        "--hlo", action="store_true", help="show the compiler's output, as optimized HLO"
    )
    parser.add_argument("--target", metavar="DEVICE",
                        help="device to compile for with --hlo; it need not be "
                        "present")  # fmt: skip


def _passes(text: str) -> tuple[str, ...]:
    """Parse names of passes, separated by commas."""
    names = split_commas(text)
    if unknown := [n for n in names if n not in PASSES]:
        known = ", ".join(PASSES)
        raise argparse.ArgumentTypeError(f"unknown pass {', '.join(unknown)}; use {known}")
    return tuple(names)
