"""The compiler's own text."""

import jax
import jax.numpy as jnp
import pytest

from xform.errors import CompilationFailed
from xform.memory import program_text
from xform.memory.program_text import compiled_text, stablehlo_text
from xform.memory.report import MemoryReport
from xform.memory.targets import parse_target

X = jax.ShapeDtypeStruct((4,), jnp.float32)


def test_texts() -> None:
    assert "stablehlo.sine" in stablehlo_text(jnp.sin, [X])
    for target in (None, "cpu"):
        assert compiled_text(jnp.sin, [X], target).startswith("HloModule")


def test_of_several_devices_that_are_not_here() -> None:
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    text = compiled_text(jnp.sin, [X], "cpu:2")
    assert text.startswith("HloModule")
    assert "f32[4]{0} sine(" in text


def test_a_refused_program_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    target = parse_target("tpu:v5e:1x1")
    refused = MemoryReport("sin", target, 1, {}, 0, 0.0, None, refused="big", needed_bytes=2**35)
    monkeypatch.setattr(program_text, "compile_for", lambda f, args, target: refused)
    with pytest.raises(CompilationFailed) as e:
        compiled_text(jnp.sin, [X], "tpu:v5e:1x1")
    assert str(e.value) == (
        "the optimized HLO of sin for target='tpu:v5e:1x1'\n"
        f"  problem: {refused.verdict()}\n"
        "  remedy:  name a larger device, or look at the StableHLO"
    )
