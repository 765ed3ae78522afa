"""The commands: `python -m models train`, `sample`, `export` and `demo`, each with `--help`."""

from __future__ import annotations

import importlib
import os
import sys

from models.errors import InputError

COMMANDS = {
    "data": "tokens of documents, written once for many runs",
    "train": "train a model, or go on with a run",
    "sample": "text from a trained model",
    "export": "a trained model in a folder, for `transformers` or for JAX alone",
    "demo": "memory, training, samples and plots in a few minutes",
}
INPUT_ERROR = 2
INTERRUPTED = 130


def main(arguments: list[str]) -> int:
    """Run the command that is named first: a module of `models.run`, imported when it is asked.

    A user's mistake is one line on standard error, and code 2.
    """
    name, *rest = arguments or ["--help"]
    if name not in COMMANDS:
        print("usage: python -m models COMMAND [--help]\n")
        print("\n".join(f"  {command:8} {about}" for command, about in COMMANDS.items()))
        return 0 if name in ("--help", "-h") else INPUT_ERROR
    try:
        return importlib.import_module(f"models.run.{name}").main(rest)
    except InputError as error:
        print("error:", *str(error).splitlines(), file=sys.stderr)
        return INPUT_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


def script() -> int:
    """The command of this process, which ends in silence where nobody reads what it says."""
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except OSError as error:
        code = INPUT_ERROR
        print(f"error: {error.filename or 'standard output'}: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


if __name__ == "__main__":
    sys.exit(script())
