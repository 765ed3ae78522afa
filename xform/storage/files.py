"""Atomic writing of files: a file appears complete, or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

from xform.errors import FileNotWritten


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Generator[Path]:
    """Return a context that writes a file completely or not at all.

    It yields a temporary path, with the suffix of `path`, for the body to write to. If the body
    succeeds, that file replaces `path`. If the body fails, that file is removed and `path` is
    unchanged.

    Raises:
      FileNotWritten: the temporary file cannot be written, or cannot replace `path`.

    >>> import os, tempfile
    >>> from xform.storage.files import atomic_write
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_write(f"{folder}/plan.json") as partial:
    ...         _ = partial.write_text("{}")
    ...     os.listdir(folder)
    ['plan.json']
    """
    target = Path(path)
    # In the same folder: a file can atomically replace another only within one file system.
    partial = target.with_name(f".{target.stem}.{os.getpid()}.partial{target.suffix}")
    try:
        yield partial
        partial.replace(target)
    except OSError as error:
        if error.filename not in (str(partial), partial):  # an error about another file
            raise
        raise FileNotWritten(
            f"writing {target}",
            f"{type(error).__name__}: {error.strerror}",
            "",
            "choose a file in an existing folder that is writable",
        ) from None
    finally:
        with contextlib.suppress(OSError):  # for example, the folder does not exist
            partial.unlink(missing_ok=True)
