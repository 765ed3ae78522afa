"""What the command lines share: the place where a user's error becomes one line and code 2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer
from rich.console import Console

from models.errors import InputError

INPUT_ERROR = 2
INTERRUPTED = 130


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn an `InputError` into `error: ...` on stderr and an exit with code 2."""
    try:
        yield
    except InputError as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", highlight=False, markup=False)
        raise typer.Exit(INPUT_ERROR) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
