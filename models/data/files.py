"""The files that a path names, in an order that is the same on every machine."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from models.errors import InputError

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".webp")
STANDARD_LIBRARY = "the Python standard library"


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """What the system refuses is one line."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"no such file or folder: {error.filename}") from None
    except OSError as error:
        what = error.filename or "what was given"
        raise InputError(f"cannot read {what}: {error.strerror or error}") from None


def files_of(path: Path | None, without: Path | None = None) -> list[Path]:
    """The regular files that a path names, in the order of a hash of their names below it.

    That order is the same on every run, and any part of it is a fair sample of the files.

    Args:
      path: a file, a folder of which every file is taken, or `None` for the sources of the Python
        standard library on this machine. Names that begin with a dot are left out.
      without: a folder whose files are not taken, such as that of a run.

    Raises:
      InputError: there is no such path, it cannot be read, is neither a file nor a folder, or holds
        a folder that holds it.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        found = [f for f in root.rglob("*.py") if not SKIPPED_FOLDERS & set(f.parent.parts)]
        return sorted(found, key=lambda file: _place(root, file))
    with readable():
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            return [path]
        if not stat.S_ISDIR(mode):
            raise InputError(f"{path} is neither a file nor a folder")
        apart = None if without is None else without.resolve()
        return sorted(_within(path, (), apart), key=lambda file: _place(path, file))


def _place(root: Path, file: Path) -> str:
    return hashlib.sha256(os.fsencode(file.relative_to(root).as_posix())).hexdigest()


def _within(folder: Path, above: tuple[Path, ...], apart: Path | None) -> Iterator[Path]:
    real = folder.resolve()
    if real in above:
        raise InputError(f"{folder} is a folder within itself: remove that link")
    if real == apart:
        return
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        # A link to nothing is no file; a FIFO or a socket is none, and would wait for ever.
        mode = entry.stat().st_mode if entry.exists() else 0
        if stat.S_ISDIR(mode):
            yield from _within(entry, (*above, real), apart)
        elif stat.S_ISREG(mode):
            yield entry
