"""A guard: xform never enters JAX's own automatic differentiation.

Under the guard, making a JVPTrace or a LinearizeTrace, or running backward_pass3, raises if the
nearest caller outside JAX's AD machinery is a file under xform/. These cases are allowed:

- an operation of ours that an *outer* JAX transform sees (`jax.grad` of `xform.grad`): its trace
  was made, and checked, elsewhere, and processes the operation;
- a user's function that calls JAX's AD itself (`xform.grad(jax.grad(f))`), or a custom rule;
- JAX's numpy, scipy and linear solvers, which use JAX's AD inside.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import pytest
from jax._src.interpreters import ad

import xform

_OURS = str(Path(xform.__file__).parent)
_JAX = str(Path(jax.__file__).parent)

# JAX's AD, and code that passes calls on to it, without its numpy, scipy and solvers.
_MACHINERY = tuple(
    f"{_JAX}/{name}.py"
    for name in (
        "_src/interpreters/ad",
        "_src/interpreters/batching",
        "_src/interpreters/partial_eval",
        "_src/lax/control_flow/common",
        "_src/lax/control_flow/conditionals",
        "_src/lax/control_flow/loops",
        "_src/ad_checkpoint",
        "_src/ad_util",
        "_src/api",
        "_src/api_util",
        "_src/core",
        "_src/custom_derivatives",
        "_src/custom_transpose",
        "_src/linear_util",
        "_src/pjit",
        "_src/profiler",
        "_src/shard_map",
        "_src/traceback_util",
        "_src/tree_util",
        "_src/util",
        "core",
    )
)

# xform calls the user's function here, which may do anything: `xform.grad(jax.grad(f))`.
# Also, the public checks compare with JAX's derivatives.
_DOORS = {
    ("transforms/function.py", "run"),
    ("transforms/function.py", "bound"),
    ("memory/compilation.py", "_compile_locally"),
    ("memory/lowering.py", "lower"),
    ("interpret/concrete.py", "run"),  # the body of a `shard_map`
    ("rules/call_time.py", "_run_active"),
    ("ir.py", "trace"),
    # A program under `run` may be left to JAX, or compared with it.
    ("commands/shared/record.py", "_call"),
    ("commands/shared/record.py", "theirs_forward"),
    ("commands/shared/record.py", "backward"),
}
_REFERENCES = {"testing/__init__.py", "testing/watch.py"}
_OF_TRACES = ("_shard_map_jvp", "_shard_map_linearize")


class EnteredJaxAD(AssertionError):
    """A file of xform entered JAX's own AD."""


def offender(frame: FrameType | None) -> str | None:
    """Return the line of xform that enters JAX's AD at `frame`; None if other code does."""
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        if name.startswith(f"{_OURS}/"):
            where = name.removeprefix(f"{_OURS}/")
            if where in _REFERENCES or (where, code.co_name) in _DOORS:
                return None
            return f"xform/{where}:{frame.f_lineno} ({code.co_name})"
        if name == ad.__file__ and "process_" in code.co_name:
            return None  # an existing trace, whose creator was checked then
        if name == f"{_JAX}/_src/shard_map.py" and code.co_name in _OF_TRACES:
            return None  # likewise
        if name not in _MACHINERY and not name.startswith(f"{_JAX}/interpreters/"):
            return None
        frame = frame.f_back
    return None


def _refuse(what: str) -> None:
    where = offender(sys._getframe(2))
    if where:
        raise EnteredJaxAD(f"{where} enters JAX's own AD: {what}")


@contextmanager
def guard() -> Iterator[None]:
    """Make JAX's AD raise `EnteredJaxAD` if xform enters it."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (ad.JVPTrace, ad.LinearizeTrace):
            patch.setattr(kind, "__init__", _watched(kind.__init__, kind.__name__))
        patch.setattr(ad, "backward_pass3", _watched(ad.backward_pass3, "backward_pass3"))
        yield


def _watched(f: Any, name: str) -> Any:
    def watched(*args: Any, **kwargs: Any) -> Any:
        _refuse(name)
        return f(*args, **kwargs)

    return watched
