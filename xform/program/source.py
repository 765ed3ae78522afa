"""Source positions of equations: lines of the user's code, and name scopes.

An equation of JAX keeps a Python traceback and a *name stack*, the scopes of `jax.named_scope`
around it. `source` sets both when an equation is bound again in another trace. `frame` is the
model's line, for reports and error messages.
"""

from __future__ import annotations

import functools
import re
import sys
from traceback import extract_tb
from typing import Any

from xform._jax import JaxprEqn, source_info_util
from xform.program.frameworks import XFORM, is_framework, is_library, line_of_model

# What follows the file in the text of a frame.
_AFTER_FILE = re.compile(r"(?::\d+)+ \(.*\)$")

# Hide frames of xform from error messages and HLO metadata. XFORM ends in a separator, so
# the frames of a folder `xform_app` beside it are shown.
source_info_util.register_exclusion(XFORM)


def source(eqn: JaxprEqn, outer: Any):
    """Return a context in which new operations get the traceback and name scopes of `eqn`.

    `outer` is the name stack around the equation's own. JAX cuts tracebacks at a jit, so an
    equation inside `jax.nn.silu` has no frame in the user's code. Such an equation gets the current
    traceback, which points to the call.
    """
    info = eqn.source_info
    traceback = info.traceback if _in_user_code(info.traceback) else None
    stack = outer + info.name_stack if len(info.name_stack) else outer
    return source_info_util.user_context(traceback, name_stack=stack)


def nest_in_call(eqn: JaxprEqn, call: JaxprEqn) -> JaxprEqn:
    """Return `eqn`, an equation of a called function, inside the name scopes of the `call`."""
    info, outer = eqn.source_info, call.source_info
    traceback = info.traceback if _in_user_code(info.traceback) else outer.traceback
    stack = outer.name_stack + info.name_stack
    return eqn.replace(source_info=info.replace(traceback=traceback, name_stack=stack))


@functools.lru_cache(maxsize=2**16)
def _in_user_code(traceback: Any) -> bool:
    """Return whether a traceback has a frame outside JAX and xform."""
    info = source_info_util.new_source_info().replace(traceback=traceback)
    return bool(source_info_util.summarize(info))


def name_stack():
    """Return the current name stack."""
    return source_info_util.current_name_stack()


def frame(eqn: Any = None) -> str:
    """Return `file:line (function)` of the model's code that made `eqn`.

    It may be in an installed package (`frameworks.py`). If there is no equation, or it has no frame
    outside JAX and xform, the line is that of the running code.
    """
    info = getattr(eqn, "source_info", None)
    info = info if info and _in_user_code(info.traceback) else source_info_util.current()
    lines = source_info_util.summarize(info, num_frames=64).splitlines()[::-1]
    # A line is `file:line:column (function)`, or `file:line (function)`.
    return line_of_model((_AFTER_FILE.sub("", line), line) for line in lines) or _running_line()


def line_of_error(error: BaseException) -> str:
    """Return the line of the model's code that raised an error; "" if other code raised it.

    It may be in an installed package (`frameworks.py`).
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = extract_tb(error.__traceback__)[::-1]
    own = [f for f in frames if not (is_library(f.filename) or f.filename.startswith("<"))]
    if all(is_framework(f.filename) for f in own):  # xform called it, not the user's code
        return ""
    return line_of_model((f.filename, f"{f.filename}:{f.lineno} ({f.name})") for f in own)


def user_stacklevel() -> int:
    """Return the `stacklevel` of a warning that shall name the user's line."""
    current: Any = sys._getframe(1)
    level = 1
    while current.f_back and is_library(current.f_code.co_filename):
        current, level = current.f_back, level + 1
    return level


def _running_line() -> str:
    """Return `file:line (function)` of the innermost frame on Python's stack outside libraries.

    The libraries are xform, JAX and Python's standard library. The frame is found even if JAX's
    traceback, which is cut where a trace begins, has no such frame.
    """
    current: Any = sys._getframe()
    while current and is_library(current.f_code.co_filename):
        current = current.f_back
    if not current:
        return ""
    return f"{current.f_code.co_filename}:{current.f_lineno} ({current.f_code.co_name})"
