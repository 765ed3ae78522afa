"""Source positions of equations: frames of the user's code, and name scopes."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import jax

from xform._jax import JaxprEqn, source_info_util

_XFORM = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# Hide frames of xform from error messages and HLO metadata.
source_info_util.register_exclusion(_XFORM)


def source(eqn: JaxprEqn, outer: Any):
    """Context that sets the traceback and the name stack of `eqn`, to bind it in another trace.

    JAX cuts tracebacks at a jit, so an equation inside `jax.nn.silu` has no frame in the user's
    code. Such an equation gets the current traceback, which points to the call.
    """
    info = eqn.source_info
    traceback = info.traceback if _in_user_code(info.traceback) else None
    stack = outer + info.name_stack if len(info.name_stack) else outer
    return source_info_util.user_context(traceback, name_stack=stack)


def within(eqn: JaxprEqn, call: JaxprEqn) -> JaxprEqn:
    """An equation of a called function, with its source position nested in that of the call."""
    info, outer = eqn.source_info, call.source_info
    traceback = info.traceback if _in_user_code(info.traceback) else outer.traceback
    stack = outer.name_stack + info.name_stack
    return eqn.replace(source_info=info.replace(traceback=traceback, name_stack=stack))


@functools.lru_cache(maxsize=2**16)
def _in_user_code(traceback: Any) -> bool:
    info = source_info_util.new_source_info().replace(traceback=traceback)
    return bool(source_info_util.summarize(info))


def name_stack():
    """The current name stack."""
    return source_info_util.current_name_stack()


def frame(eqn: Any = None) -> str:
    """`file:line (function)` of the user's code for `eqn`, or of the running code without one.

    Installed libraries count as the user's code only if there are no other frames.
    """
    info = getattr(eqn, "source_info", None)
    info = info if info and _in_user_code(info.traceback) else source_info_util.current()
    frames = source_info_util.summarize(info, num_frames=64).splitlines()[::-1]
    own = (f for f in frames if f"{os.sep}site-packages{os.sep}" not in f)
    return next(own, frames[0] if frames else _running())


def _running() -> str:
    """`file:line (function)` from Python's stack: JAX's traceback is cut where a trace begins."""
    at: Any = sys._getframe()
    while at and at.f_code.co_filename.startswith(_LIBRARIES):
        at = at.f_back
    return f"{at.f_code.co_filename}:{at.f_lineno} ({at.f_code.co_name})" if at else ""


_LIBRARIES = tuple(
    folder + os.sep
    for folder in (
        _XFORM,
        os.path.dirname(os.path.abspath(jax.__file__ or "")),
        os.path.dirname(os.path.abspath(os.__file__)),
    )
)
