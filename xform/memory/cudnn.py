"""Calls of the library cuDNN in programs for GPUs that need not be attached.

JAX reads the version of cuDNN when it traces a call of cuDNN's attention. That needs the library
but no GPU. The call becomes a custom call of XLA, which JAX does not guarantee to other versions of
JAX. xform compiles the program with the same version. The memory that cuDNN takes during a call,
its workspace, is known only on the device.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from collections.abc import Generator

from jax import export

from xform.errors import MissingExtra
from xform.memory.hlo import Module
from xform.program.source import line_of_error

# The first letters of the calls of cuDNN in a compiled program.
_PREFIX = "__cudnn$"
_ATTENTION = [
    "__cudnn$fmha" + "".join(words)
    for words in itertools.product(
        ("", "ScaleBias"), ("Softmax", "SoftmaxDropout"), ("", "Backward"), ("", "F8")
    )
]
# Custom calls that XLA itself compiles: `jax.export` need not refuse them. The last one is the
# call of `jax.nn.scaled_matmul`.
UNCHECKED = tuple(
    map(export.DisabledSafetyCheck.custom_call, [*_ATTENTION, "__op$block_scaled_dot"])
)
# The messages of JAX if it finds no cuDNN.
_NOT_FOUND = ("cuDNN not found.", "cuDNN is not detected.")


@contextlib.contextmanager
def naming_cudnn(target: str) -> Generator[None]:
    """A context for traces for a GPU that is not attached; it names cuDNN if that is missing.

    Raises:
      MissingExtra: the traced function calls cuDNN, and the library is not installed.
    """
    try:
        yield
    except RuntimeError as error:
        if str(error) not in _NOT_FOUND:
            raise
        cuda = 13 if importlib.util.find_spec("jax_cuda13_plugin") else 12
        raise MissingExtra(
            f"target={target!r}",
            "the function calls cuDNN (dot_product_attention with implementation='cudnn'), whose "
            "library is not installed",
            line_of_error(error),
            f"pip install nvidia-cudnn-cu{cuda}, which needs no GPU; or pass implementation='xla'",
        ) from None


def uncounted(module: Module) -> str:
    """Return a sentence about calls of cuDNN whose workspace is not known; "" if there are none."""
    calls = [i for i in module.instructions.values() if i.target.startswith(_PREFIX)]
    # A call returns its results and its workspace, which has no elements if it is not known.
    unknown = sum(not i.shape.elements[-1].bytes for i in calls if i.shape.elements)
    if not unknown:
        return ""
    count = "1 call" if unknown == 1 else f"{unknown} calls"
    return f"not counted: the workspace of cuDNN in {count}, which only the device can tell"
