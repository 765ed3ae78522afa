"""The command line `python -m models COMMAND`. Each command has a `--help`."""

from __future__ import annotations

import importlib
import os
import sys

from models import program
from models.errors import InputError

COMMANDS = {
    "data": "tokenize documents once, for use in many runs",
    "train": "train a model, or continue a training run",
    "generate": "generate text with a trained model",
    "export": "write a trained model to a folder, for `transformers` or as a JAX function",
    "demo": "train a small GPT-2 in a few minutes: memory table, training, a sample, plots",
}
INPUT_ERROR = 2
INTERRUPTED = 130


def main(arguments: list[str]) -> int:
    """Run the command named by the first argument and return the exit code.

    Each command is a module of `models.run`, which is imported only when it is used. An
    `InputError` becomes one line on standard error and exit code 2.
    """
    name, *rest = arguments or ["--help"]
    if name not in COMMANDS:
        print(f"usage: {program.NAME} COMMAND [--help]\n")
        print("\n".join(f"  {command:8} {about}" for command, about in COMMANDS.items()))
        return 0 if name in ("--help", "-h") else INPUT_ERROR
    try:
        return importlib.import_module(f"models.run.{name}").main(rest)
    except InputError as error:
        print("error:", *str(error).splitlines(), file=sys.stderr)
        return INPUT_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


def script(arguments: list[str] | None = None) -> int:
    """Run a command, by default that of `sys.argv`, and return the exit code.

    A failed write to standard output becomes one line on standard error and exit code 2.
    """
    try:
        code = main(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except OSError as error:
        code = INPUT_ERROR
        print(f"error: {error.filename or 'standard output'}: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


if __name__ == "__main__":
    sys.exit(script())
