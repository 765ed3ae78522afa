"""A joint program under a plan, as text."""

import jax
import jax.numpy as jnp
from jax import lax

from xform import policies
from xform.planner.plan_program import plan_program
from xform.planner.problem import Problem
from xform.planner.report.show import show_schedule
from xform.program.ir import trace

X = jax.ShapeDtypeStruct((4,), jnp.float32)


def text(f, policy, lines: bool = False) -> str:
    return show_schedule(
        plan_program(Problem(trace(f, X), (True,), (True,)), policy).schedule, lines
    )


def test_nothing_is_saved() -> None:
    assert (
        text(lambda x: [x * 2.0], policies.min_cut)
        == """\
inputs a:f32[4]
forward
  b:f32[4] = mul a 2.0
saved: nothing
backward, of c:f32[4]
  d:f32[4] = mul c 2.0
outputs b
results d"""
    )


def test_branches() -> None:
    f = lambda x: [lax.cond(x[0] > 0, jnp.sin, lambda x: x * x, x)]
    found = text(f, policies.save_everything).splitlines()
    for line in ("    branch 0, forward: ", "    branch 1, forward: ", "    branch 0, backward: ",
                 "    branch 1, backward: "):  # fmt: skip
        assert any(row.startswith(line) for row in found), line
    (cos,) = (row for row in found if "= cos" in row)
    assert cos.endswith("SAVED, 16 B: the backward pass reads it")


def test_text_marks_offloaded_and_recomputed_values() -> None:
    offload = policies.offload_dots_with_no_batch_dims("device", "pinned_host")
    found = text(lambda x: [jnp.sum(jnp.tanh(jnp.dot(jnp.outer(x, x), x)))], offload)
    assert "OFFLOADED, 16 B: " in found
    assert "tanh" in found.split("backward")[1]
    assert "RECOMPUTED" in found


def test_lines() -> None:
    found = text(lambda x: [jnp.sin(x)], policies.min_cut, lines=True)
    assert "test_show.py:" in next(row for row in found.splitlines() if "= cos" in row)
