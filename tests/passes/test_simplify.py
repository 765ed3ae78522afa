"""A conversion to a dtype and back is removed only if that dtype represents every value."""

import jax
import numpy as np
import pytest

from xform.passes.simplify import Simplify
from xform.program.ir import trace

DTYPES = ("bool", "int8", "int16", "int32", "uint8", "uint16", "float16", "bfloat16", "float32")
# What NumPy calls a safe cast changes no value. Of bfloat16, with 8 bits of significand, it says
# nothing: the values of these types and no others fit into it.
IN_BFLOAT16 = ("bool", "int8", "uint8", "bfloat16")


def keeps_every_value(small: str, large: str) -> bool:
    """Return whether `large` represents every value of `small`, other than by xform."""
    if large == "bfloat16":
        return small in IN_BFLOAT16
    if small == "bfloat16":
        return large == "float32"
    return np.can_cast(small, large, "safe")


@pytest.mark.parametrize("small", DTYPES)
def test_only_conversions_that_keep_every_value_are_removed(small: str) -> None:
    for large in DTYPES:
        if large == small:
            continue
        there_and_back = lambda x, large=large: [x.astype(large).astype(small)]
        prog = Simplify().rewrite(trace(there_and_back, jax.core.ShapedArray((3,), small)))
        assert (prog.outputs == prog.inputs) == keeps_every_value(small, large), large
