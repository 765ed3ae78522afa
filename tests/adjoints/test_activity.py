"""Activities of values agree with JAX's gradients, and with stops and constants."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xform import passes
from xform._jax import Primitive
from xform.adjoints.activity import Activity, activities, activity_of
from xform.program.ir import trace

X, C = jnp.array([0.4, -0.2, 0.9]), jnp.array(2.0)


def outputs(f: Any, *args: Any, active: Any = (0,)) -> list[Activity]:
    inputs: list[Activity] = ["active" if i in active else "constant" for i in range(len(args))]
    prog = trace(f, *args)
    known = activities(prog, inputs)
    return [activity_of(v, known) for v in prog.outputs]


CASES: dict[str, tuple[Any, list[Activity]]] = {
    "sin": (lambda x, c: [jnp.sin(x)], ["active"]),
    "stop_gradient": (lambda x, c: [lax.stop_gradient(x) * 2], ["stopped"]),
    "past a stop": (lambda x, c: [lax.stop_gradient(x) * x], ["active"]),
    "integers": (lambda x, c: [(x * 9).astype(int) + 1], ["stopped"]),
    "comparison": (lambda x, c: [x > 0], ["stopped"]),
    "back from integers": (lambda x, c: [jnp.round(x).astype(int) * c], ["stopped"]),
    "constant": (lambda x, c: [c * 2, jnp.ones(3)], ["constant", "constant"]),
    "jit": (lambda x, c: jax.jit(lambda a, b: [a * 2, b * 2])(x, c), ["active", "constant"]),
    "jit of a stop": (lambda x, c: jax.jit(lambda a: [lax.stop_gradient(a)])(x), ["stopped"]),
    "remat": (lambda x, c: jax.checkpoint(lambda a, b: [a * b, b])(x, c), ["active", "constant"]),
    "custom_jvp": (lambda x, c: [jax.nn.relu(x), jax.nn.relu(c)], ["active", "constant"]),
    "branch by a constant": (
        lambda x, c: [lax.cond(c > 0, lambda: c, lambda: c * 2)],
        ["constant"],
    ),
    "branch by an active": (
        lambda x, c: [lax.cond(x[0] > 0, lambda: c, lambda: c * 2)],
        ["stopped"],
    ),
    "branch of an active": (
        lambda x, c: [lax.cond(c > 0, lambda: x, lambda: x * 0 + c)],
        ["active"],
    ),
    "loop": (
        lambda x, c: lax.scan(
            lambda s, t: ((s[0] * t, s[1] + s[0].astype(int), s[2] + 1), s[2] * c),
            (x, jnp.zeros(3, int), 0),
            jnp.ones(3),
        ),
        ["active", "stopped", "constant", "constant"],
    ),
    "a carry that becomes active": (
        lambda x, c: lax.scan(lambda s, _: ((s[1], x * 2), s[0]), (c * X, c * X), None, 3),
        ["active", "active", "active"],
    ),
    "while by a constant": (
        lambda x, c: lax.while_loop(
            lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * x, s[2] * c), (0, x, c)
        ),
        ["constant", "active", "constant"],
    ),
    "while by an active": (
        lambda x, c: lax.while_loop(
            lambda s: s[1].sum() < 3, lambda s: (s[0] + 1, s[1] * 2, s[2] * c), (0, x, c)
        ),
        ["stopped", "active", "stopped"],
    ),
    "one function, twice": (
        lambda x, c: [jax.nn.silu(x), jax.nn.silu(c)],
        ["active", "constant"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_outputs(case: str) -> None:
    f, want = CASES[case]
    assert outputs(lambda x, c: jax.tree.leaves(f(x, c)), X, C) == want


@pytest.mark.parametrize("case", CASES)
def test_nonzero_tangents_are_active_and_constants_never_change(case: str) -> None:
    """A nonzero tangent implies an active value; a value that changes is not constant."""
    f, want = CASES[case]
    g = lambda x: jax.tree.leaves(f(x, C))
    tangents = jax.jvp(g, (X,), (jnp.ones(3),))[1]
    for tangent, activity in zip(tangents, want, strict=True):
        moves = tangent.dtype != jax.dtypes.float0 and bool(np.any(tangent))
        assert not moves or activity == "active"
    for (a, b), activity in zip(zip(g(X), g(-3 * X), strict=True), want, strict=True):
        assert np.array_equal(a, b) or activity != "constant"


@pytest.mark.parametrize("active", [(), (0,), (1,), (0, 1)])
def test_all_inputs(active: tuple[int, ...]) -> None:
    f = lambda x, y: [x * 2, y * 2, x * y]
    got = outputs(f, X, X, active=active)
    say = lambda *on: "active" if set(on) & set(active) else "constant"
    assert got == [say(0), say(1), say(0, 1)]


def test_values_inside_bodies_have_activities_too() -> None:
    f = lambda x: [lax.scan(lambda s, t: (jnp.sin(s) * t, (s > 0)), x, jnp.ones(2))[0]]
    prog = trace(f, X)
    known = activities(prog, ["active"])
    said: list[str] = []
    passes.listing(
        prog, paint=lambda v, text: (said.append(f"{text} {activity_of(v, known)}"), text)[1]
    )
    kinds = {text.partition(":")[2] for text in said if ":" in text}
    assert {"bool[3] stopped", "f32[] constant", "f32[3] active"} <= kinds
    assert "bool[3] active" not in kinds


def test_primitives_without_a_rule_have_activities() -> None:
    p = Primitive("without_a_rule")
    p.def_abstract_eval(lambda x: x)
    assert outputs(lambda x, n: [p.bind(x), p.bind(n)], X, jnp.arange(3)) == ["active", "constant"]
    assert outputs(lambda n: [p.bind(n)], jnp.arange(3)) == ["stopped"]
