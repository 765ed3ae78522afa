"""The commands of `python -m xform`: each is a file of this folder.

A command's file has `run(args)`, from parsed arguments to the text that is printed, whose docstring
is its help, and `arguments(parser)`; its name is the file's, with `-` for `_`. To add one, add a
file. `function.py` reads what commands share: a function, its inputs, a policy.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import pkgutil
import sys
import sysconfig
import traceback
from typing import Any

import jax

from xform.errors import FailedFunction, WrongArgument, XformError
from xform.quiet import hushed

_MODULES = [importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)]
COMMANDS: dict[str, Any] = {
    m.__name__.rpartition(".")[2].replace("_", "-"): m for m in _MODULES if hasattr(m, "run")
}

# Where code is not the user's.
_OTHERS = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
           sysconfig.get_path("stdlib") + os.sep, "<")  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run a command line and print what it says; 0, or 1 after an error of the user's.

    A command line that cannot be parsed exits with 2, and `fits` with 3 if the answer is no.
    """
    words = sys.argv[1:] if argv is None else argv
    if words[:1] != ["run"]:  # a program finds its devices itself
        with contextlib.suppress(RuntimeError), hushed():
            jax.devices()
    try:
        text, status = answer(argv)
    except XformError as error:
        print(error, file=sys.stderr)
        return 1
    try:
        if text:  # a program that was run has said what it has to say
            print(text, flush=True)
    except BrokenPipeError:  # a reader such as `head` has enough
        # Python flushes once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def run(argv: list[str] | None = None) -> str:
    """The text that a command line asks for."""
    return answer(argv)[0]


def answer(argv: list[str] | None = None) -> tuple[str, int]:
    """The text that a command line asks for, and its exit status.

    Raises:
      XformError: something is wrong with what was asked for, or with the user's code.
    """
    parser = argparse.ArgumentParser(prog="python -m xform", allow_abbrev=False)
    commands: Any = parser.add_subparsers(required=True, metavar="command")
    for name, module in COMMANDS.items():
        about = module.run.__doc__
        sub = commands.add_parser(
            name, help=about.splitlines()[0], description=about, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        module.arguments(sub)
        sub.set_defaults(run=module.run, parser=sub)
    args, rest = parser.parse_known_args(argv)
    if rest and not hasattr(args, "options"):
        args.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if hasattr(args, "options"):
        args.options = _options(args, rest)
    try:
        return args.run(args), getattr(args, "status", 0)
    except XformError:
        raise
    except Exception as error:
        where = _blamed(error)
        if not where and not isinstance(error, OSError):
            _blame_inputs(error, args)
            raise
        kind = type(error).__name__
        raise FailedFunction(
            f"python -m xform {args.parser.prog.rpartition(' ')[2]}",
            f"{kind}: {_first_lines(str(error))}",
            where,
            "mend the function, or what inputs() returns for it",
        ) from error


def _options(args: argparse.Namespace, rest: list[str]) -> dict[str, str | None]:
    """`--name value`, `--name=value` and `--name` as a dict; of the last one the value is None."""
    values: dict[str, str | None] = {}
    for word in args.options:
        name, equals, value = word.partition("=")
        if not (name.isidentifier() and equals):
            args.parser.error(f"--arg takes name=value, not {word!r}")
        values[name] = value
    name = ""
    for word in rest:
        if word.startswith("--") and word[2:3].isalpha():
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            values[name] = value if equals else None
            name = "" if equals else name
        elif name:
            values[name], name = word, ""
        else:
            args.parser.error(f"unrecognized arguments: {word}")
    return values


def _blamed(error: BaseException) -> str:
    """The place in the user's code where an error came from; empty if it came from elsewhere."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(_OTHERS)]
    own = [f for f in own if f"{os.sep}site-packages{os.sep}" not in f.filename]
    return f"{own[-1].filename}:{own[-1].lineno} ({own[-1].name})" if own else ""


def _blame_inputs(error: Exception, args: argparse.Namespace) -> None:
    """Raise an error of `inputs` if what it returned, which JAX or xform did not take, is why.

    A configuration is no array either, and right if its argument is static: only failing tells.
    """
    on = getattr(args, "bound", None)
    if isinstance(error, TypeError | ValueError) and on and (others := on.no_arrays()):
        raise WrongArgument(
            f"the arguments of {on.name}, by {on.source}",
            f"{type(error).__name__}: {_first_lines(str(error))}",
            "",
            "return arrays or ShapeDtypeStructs, but for static arguments of a jitted function: "
            f"{others}",
        ) from error


def _first_lines(text: str) -> str:
    """A message without the long tail that JAX's have."""
    head = text.strip().split("\n\n")[0].splitlines()[:8]
    return "\n           ".join(line.strip() for line in head)
