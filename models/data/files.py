"""List the files of a path, in an order that is the same on every machine.

`readable` turns errors of the file system into one-line messages.
"""

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
    """Return a context that turns an `OSError` into an `InputError` with a one-line message."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"no such file or folder: {error.filename}") from None
    except OSError as error:
        what = error.filename or "the data"
        raise InputError(f"cannot read {what}: {error.strerror or error}") from None


def files_of(path: Path | None, without: Path | None = None) -> list[Path]:
    """List the regular files of a path, ordered by a hash of their names relative to it.

    The order is the same on every run, and any part of the list is a fair sample of the files.

    Args:
      path: a file; a folder, whose files are listed recursively; or None for the source
        files of this machine's Python standard library. Names that begin with a dot are skipped.
      without: a folder whose files are skipped, such as the folder of a run.

    Raises:
      InputError: the path does not exist, cannot be read, is neither a file nor a folder, or
        contains a link to a folder around it.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        found = [f for f in root.rglob("*.py") if not SKIPPED_FOLDERS & set(f.parent.parts)]
        return sorted(found, key=lambda file: _order(root, file))
    with readable():
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            return [path]
        if not stat.S_ISDIR(mode):
            raise InputError(f"{path} is neither a file nor a folder")
        skipped = None if without is None else without.resolve()
        return sorted(_within(path, (), skipped), key=lambda file: _order(path, file))


def _order(root: Path, file: Path) -> str:
    """Return the sort key of a file: a hash of its name relative to `root`."""
    return hashlib.sha256(os.fsencode(file.relative_to(root).as_posix())).hexdigest()


def _within(folder: Path, above: tuple[Path, ...], skipped: Path | None) -> Iterator[Path]:
    """Iterate over the files in a folder and its subfolders, except those in `skipped`.

    `above` are the folders around it, to detect a link that leads back to one of them.
    """
    real = folder.resolve()
    if real in above:
        raise InputError(f"{folder} is a link to a folder that contains it: remove the link")
    if real == skipped:
        return
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        # Skip broken links. Skip FIFOs and sockets too: reading them would block.
        mode = entry.stat().st_mode if entry.exists() else 0
        if stat.S_ISDIR(mode):
            yield from _within(entry, (*above, real), skipped)
        elif stat.S_ISREG(mode):
            yield entry
