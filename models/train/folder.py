"""The folder of a run: its lock, the names of its files, and how they are written."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from models.errors import InputError

# The names of the files and folders in it.
CHECKPOINTS, CONFIG, LOG, PLAN = "checkpoints", "config.toml", "log.jsonl", "plan.json"
DATA, TOKENIZER, HEALTH = "data", "tokenizer.json", "health.jsonl"
LOCK, BOARD, PROFILE = "lock", "tensorboard", "profile"


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Create the folder and lock it for this process. The lock is released if the process dies.

    Raises:
      InputError: another process has locked it, or it cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            out.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((out / LOCK).open("a+"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = (out / LOCK).read_text().strip() or "another process"
            raise InputError(
                f"{out} is in use by {owner}: wait for it to end, or choose another --out"
            ) from None
        except OSError as error:
            raise InputError(f"cannot write to {out}: {error.strerror}") from None
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()}\n")
            file.flush()
        except OSError as error:
            raise InputError(f"cannot write {out / LOCK}: {error.strerror}") from None
        yield


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: it appears complete or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def set_aside(path: Path) -> Path:
    """Rename a file to an unused name, and return it."""
    places = (path.with_name(f"{path.name}.set-aside-{i}") for i in range(1_000_000))
    return path.rename(next(place for place in places if not place.exists()))
