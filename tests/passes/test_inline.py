"""Calls of jitted functions that a program makes once are inlined; others stay."""

import jax
import jax.numpy as jnp
from jax import lax

from xform.passes.inline import bodies_called_once, inline_bodies
from xform.program.ir import trace


def operations(f) -> list[str]:
    """Return the primitives of a program after its once-called functions were inlined."""
    prog = trace(f, jax.core.ShapedArray((3,), "float32"))
    return [e.primitive.name for e in inline_bodies(prog, bodies_called_once(prog)).equations]


def test_a_call_is_inlined_with_the_calls_inside_it() -> None:
    inner = jax.jit(jnp.sin)
    outer = jax.jit(lambda x: jnp.cos(inner(x)))
    assert operations(lambda x: [outer(x) + 1]) == ["sin", "cos", "add"]


def test_a_function_that_is_called_twice_stays_a_call() -> None:
    layer = jax.jit(jnp.sin)
    assert operations(lambda x: [layer(layer(x))]) == ["jit", "jit"]
    model = jax.jit(lambda x: layer(layer(x)))
    assert operations(lambda x: [model(x)]) == ["jit", "jit"]
    assert operations(lambda x: [jax.jit(lambda x: layer(x) * 2)(layer(x))]) == [
        "jit",
        "jit",
        "mul",
    ]


def test_custom_rules_regions_and_loops_stay() -> None:
    rule = jax.custom_jvp(jnp.sin)
    rule.defjvp(lambda xs, dxs: (rule(*xs), dxs[0]))
    assert operations(lambda x: [jax.jit(rule)(x)]) == ["custom_jvp_call"]
    assert "sin" not in operations(lambda x: [jax.checkpoint(jax.jit(jnp.sin))(x)])
    loop = lambda x: lax.fori_loop(0, 3, lambda _, x: jax.jit(jnp.sin)(x), x)
    assert operations(lambda x: [loop(x)]) == ["scan"]
