"""The command line `python -m xform COMMAND`. Each command is a file in this folder.

A command's file defines two functions:

- `arguments(parser)` adds the options to an `argparse` parser;
- `run(args)` takes the parsed options and returns the text to print. It may set `args.status`, the
  exit status. Its docstring is the command's help.

The commands of the trainer (`trainer.py`) have a command line of their own.

The command is named like its file, with `-` for `_`. A new file is a new command. The folder
`shared` has the options that several commands have.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import os
import pkgutil
import sys
from typing import Any

import jax

from xform.commands import trainer
from xform.errors import FailedFunction, WrongArgument, XformError
from xform.program.source import line_of_error
from xform.terminal.quiet import hide_stderr

_MODULES = [importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)]
COMMANDS: dict[str, Any] = {
    m.__name__.rpartition(".")[2].replace("_", "-"): m for m in _MODULES if hasattr(m, "run")
}


def main(argv: list[str] | None = None) -> int:
    """Run a command line, print its text and return the exit status.

    The status is 0, or 1 after an error in the request or in the user's code. `fits` returns 3 if
    the function does not fit, and `run` the status of its program. `SystemExit(2)` is raised for a
    command line that cannot be parsed.

    Args:
      argv: the words after `python -m xform`; None for the command line of this process.
    """
    words = sys.argv[1:] if argv is None else argv
    of_trainer = bool(words) and words[0] in trainer.COMMANDS
    if not of_trainer and words[:1] != ["run"]:  # these programs initialize JAX themselves
        with contextlib.suppress(RuntimeError), hide_stderr():
            jax.devices()
    try:
        if of_trainer:
            return trainer.main(words)
        text, status = answer(argv)
    except XformError as error:
        print(error, file=sys.stderr)
        return 1
    try:
        if text:  # empty for `run`: the program has printed its own output
            print(text, flush=True)
    except BrokenPipeError:  # a reader such as `head` has closed the pipe
        # Python flushes stdout once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def run(argv: list[str] | None = None) -> str:
    """Run a command line and return the text that it would print."""
    return answer(argv)[0]


def answer(argv: list[str] | None = None) -> tuple[str, int]:
    """Run a command line and return its text and its exit status.

    Raises:
      XformError: something is wrong with the request, or with the user's code.
    """
    parser = argparse.ArgumentParser(prog="python -m xform", allow_abbrev=False)
    commands: Any = parser.add_subparsers(required=True, metavar="command")
    for name, module in COMMANDS.items():
        about = inspect.getdoc(module.run) or ""
        sub = commands.add_parser(
            name, help=about.splitlines()[0], description=about, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        module.arguments(sub)
        sub.set_defaults(run=module.run, parser=sub)
    for name, about in trainer.COMMANDS.items():  # `main` runs them
        commands.add_parser(name, help=about)
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
        where = line_of_error(error)
        if not where and not isinstance(error, OSError):
            _check_returned_arrays(error, args)
            raise
        kind = type(error).__name__
        raise FailedFunction(
            f"python -m xform {args.parser.prog.rpartition(' ')[2]}",
            f"{kind}: {_first_lines(str(error))}",
            where,
            "fix the function, or the arguments that inputs() returns",
        ) from error


def _options(args: argparse.Namespace, rest: list[str]) -> dict[str, str | None]:
    """Parse the options for `inputs`: the values of `--arg`, and the unknown words in `rest`.

    `rest` may hold `--name value`, `--name=value` and `--name`. The result maps names to values;
    the value of a bare `--name` is None.
    """
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


def _check_returned_arrays(error: Exception, args: argparse.Namespace) -> None:
    """After a failure, raise `WrongArgument` if `inputs` returned anything but arrays.

    This is an error only after a failure. Other values are correct for static arguments, such as a
    configuration.
    """
    function = getattr(args, "bound_function", None)
    if isinstance(error, TypeError | ValueError) and function and (others := function.non_arrays()):
        raise WrongArgument(
            f"the arguments of {function.name}, by {function.source}",
            f"{type(error).__name__}: {_first_lines(str(error))}",
            "",
            "return arrays or ShapeDtypeStructs, except for static arguments of a jitted function; "
            f"{others}",
        ) from error


def _first_lines(text: str) -> str:
    """Return the first lines of an error message, because JAX's messages are long."""
    head = text.strip().split("\n\n")[0].splitlines()[:8]
    return "\n           ".join(line.strip() for line in head)
