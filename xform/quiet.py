"""What JAX and its plugins print when they start, kept out of what commands print.

With the compilers for TPUs and GPUs installed, and no such device, JAX writes tens of lines of
errors to stderr before it goes on without: while it is imported, and when it looks for devices.
They are the writing of C++, and pass by Python's `sys.stderr`. A process that is a command of
xform's imports JAX here, before any other module of xform does; what goes wrong is shown in full.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
from collections.abc import Generator


@contextlib.contextmanager
def hushed() -> Generator[None]:
    """Within it nothing is written to stderr; what was is written then, if there is an error."""
    try:
        sys.stderr.flush()
        own = os.dup(2)
    except (OSError, AttributeError):  # there is no stderr
        yield
        return
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        failed = True
        try:
            yield
            failed = False
        finally:
            sys.stderr.flush()
            os.dup2(own, 2)
            os.close(own)
            if failed:
                log.seek(0)
                os.write(2, log.read())


def is_command() -> bool:
    """Whether this process is `python -m xform`, or the script `xform`."""
    first = sys.argv[0] if sys.argv else ""
    if first == "-m":  # Python is still looking for the module
        after = sys.orig_argv[sys.orig_argv.index("-m") + 1 :] if "-m" in sys.orig_argv else []
        return after[:1] == ["xform"]
    return os.path.basename(first) == "xform"


if is_command():
    with hushed():
        importlib.import_module("jax")
