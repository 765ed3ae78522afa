"""Suppress the startup messages of JAX and its plugins in xform's commands.

If the compilers for TPUs and GPUs are installed but there is no such device, JAX writes tens of
lines of errors to stderr and then continues: when it is imported, and when it looks for devices.
C++ code writes them, so redirecting Python's `sys.stderr` does not help. In a process that runs a
command of xform, this module imports JAX first. If the import fails, all messages are shown.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
from collections.abc import Generator


@contextlib.contextmanager
def hide_stderr() -> Generator[None]:
    """Context that hides all output to stderr; if the body fails, the output is shown then."""
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
    """Whether this process runs `python -m xform` or the script `xform`."""
    first = sys.argv[0] if sys.argv else ""
    if first == "-m":  # Python is still looking for the module
        after = sys.orig_argv[sys.orig_argv.index("-m") + 1 :] if "-m" in sys.orig_argv else []
        return after[:1] == ["xform"]
    return os.path.basename(first) == "xform"


if is_command():
    with hide_stderr():
        importlib.import_module("jax")
