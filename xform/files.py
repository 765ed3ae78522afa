"""Files that appear whole, or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

from xform.errors import FileNotWritten


@contextlib.contextmanager
def whole(path: str | os.PathLike[str]) -> Generator[Path]:
    """A path to write to, with the suffix of `path`, which takes its place if all went well.

    Raises:
      FileNotWritten: the file system does not let it be written.

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
    except OSError as error:
        if error.filename not in (str(partial), partial):  # it is of something else
            raise
        raise FileNotWritten(
            f"writing {target}",
            f"{type(error).__name__}: {error.strerror}",
            "",
            "name a file in a folder that is there and can be written to",
        ) from None
    finally:
        with contextlib.suppress(OSError):  # such as a folder that is none
            partial.unlink(missing_ok=True)
