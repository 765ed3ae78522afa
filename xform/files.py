"""Files that appear whole, or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path


@contextlib.contextmanager
def whole(path: str | os.PathLike[str]) -> Generator[Path]:
    """A path to write to, with the suffix of `path`, which takes its place if all went well.

    >>> import os, tempfile
    >>> from xform.files import whole
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with whole(f"{folder}/plan.json") as partial:
    ...         _ = partial.write_text("{}")
    ...     os.listdir(folder)
    ['plan.json']
    """
    target = Path(path)
    # Beside its target: a file can take another's place only within one file system.
    partial = target.with_name(f".{target.stem}.{os.getpid()}.partial{target.suffix}")
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
