"""Suppress the startup messages of JAX and its plugins in xform's commands.

If the compilers for TPUs and GPUs are installed but there is no such device, JAX writes many lines
of errors to stderr and then continues: when it is imported, and when it looks for devices. C++ code
writes them, so redirecting Python's `sys.stderr` does not help; `hide_stderr` redirects the file
descriptor. In a process that runs a command of xform, importing this module imports JAX with hidden
messages. If that import fails, all messages are shown.
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
    """Return a context that hides output to stderr, and shows it if the body raises an error."""
    try:
        sys.stderr.flush()
        stderr_copy = os.dup(2)
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
            os.dup2(stderr_copy, 2)
            os.close(stderr_copy)
            if failed:
                log.seek(0)
                os.write(2, log.read())


def is_command() -> bool:
    """Return whether this process runs `python -m xform` or the script `xform`."""
    script = sys.argv[0] if sys.argv else ""
    if script == "-m":  # Python is still looking for the module
        after_m = sys.orig_argv[sys.orig_argv.index("-m") + 1 :] if "-m" in sys.orig_argv else []
        return after_m[:1] == ["xform"]
    return os.path.basename(script) == "xform"


if is_command():
    with hide_stderr():
        importlib.import_module("jax")
