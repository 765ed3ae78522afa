"""The compiler's own text."""

import jax
import jax.numpy as jnp
import pytest

from xform.errors import WrongArgument
from xform.memory.printed import compiled_text, stablehlo_text

X = jax.ShapeDtypeStruct((4,), jnp.float32)


def test_texts() -> None:
    assert "stablehlo.sine" in stablehlo_text(jnp.sin, [X])
    for target in (None, "cpu"):
        assert compiled_text(jnp.sin, [X], target).startswith("HloModule")


def test_of_another_target() -> None:
    with pytest.raises(WrongArgument) as e:
        compiled_text(jnp.sin, [X], "gpu:h100")
    assert str(e.value) == (
        "the optimized HLO for target='gpu:h100'\n"
        "  problem: only the CPU's compiler is asked for its text\n"
        "  remedy:  leave out the target, or look at the StableHLO, which is the same for all"
    )
