"""Decisions as plain data: back to the same plan, refused for another program."""

import json

import jax
import jax.numpy as jnp
import pytest

from tests.planner.cuts.test_fit import PROGRAMS, WS, X
from tests.planner.cuts.test_integer_program import joint_of
from xform import errors, policies
from xform.planner.costs.outcome import saved_bytes
from xform.planner.decide import schedule
from xform.planner.plan.decision import decision_of
from xform.planner.plan.record import Record, record

WAYS = {
    "min_cut": lambda most: policies.min_cut,
    "half": lambda most: policies.budget(most // 2, of="saved"),
    "at a price": lambda most: policies.MinCut(0.01, 0.01),
    "nothing": lambda most: policies.save_nothing,
    "dots": lambda most: policies.save_dots,
    "everything": lambda most: policies.save_everything,
}


def same(a, b) -> bool:
    """Whether two plans keep, run again and read the same, in every nested program."""
    return (
        set(a.saved) == set(b.saved)
        and list(map(id, a.order)) == list(map(id, b.order))
        and (a.recomputed, a.reads, a.decided_per_value)
        == (b.recomputed, b.reads, b.decided_per_value)
        and a.inner.keys() == b.inner.keys()
        and all(same(p, q) for n in a.inner for p, q in zip(a.inner[n], b.inner[n], strict=True))
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_plan_comes_back_from_its_record(name: str, way: str) -> None:
    joint = joint_of(PROGRAMS[name], WS, X)
    most = saved_bytes(schedule(joint, policies.min_cut, "cpu"))
    how = schedule(joint, WAYS[way](most), "cpu")
    data = json.loads(json.dumps(record(decision_of(how), joint, {}).__dict__))
    read = Record(tuple(map(tuple, data["programs"])), tuple(data["decisions"]), data["loops"])
    twin = joint_of(PROGRAMS[name], WS, X)
    assert same(how, schedule(joint, read.decision(joint, "test"), "cpu"))
    # And for another trace of the same program.
    other = schedule(twin, read.decision(twin, "test"), "cpu")
    assert saved_bytes(other) == saved_bytes(how)
    assert record(decision_of(other), twin, {}) == record(decision_of(how), joint, {})


def test_equal_layers_are_written_once() -> None:
    @jax.jit
    def block(x, w):
        for _ in range(30):
            x = jnp.sin(x @ w) * 1.1
        return x

    def deep(n):
        def f(w, x):
            for _ in range(n):
                x = block(x, w)
            return jnp.sum(x)

        return f

    sizes = []
    for n in (4, 8):
        joint = joint_of(deep(n), WS[0], X)
        how = schedule(joint, policies.min_cut, "cpu")
        sizes.append([len(part) for part in record(decision_of(how), joint, {}).__dict__.values()])
    assert sizes[0] == sizes[1]


def test_another_program_is_refused_with_the_first_difference() -> None:
    f = lambda w, x: jnp.sum(jnp.sin(x @ w))
    joint = joint_of(f, WS[0], X)
    made = record(decision_of(schedule(joint, policies.min_cut, "cpu")), joint, {})
    other = joint_of(lambda w, x: jnp.sum(jnp.cos(x @ w)), WS[0], X)
    with pytest.raises(errors.OtherProgram) as caught:
        made.decision(other, "a plan")
    said = str(caught.value)
    assert "first difference is at equation" in said
    assert "sin[" in said
    assert "cos[" in said
    assert "test_record.py" in said
    wider = joint_of(f, WS[0], jnp.ones((16, 6)))
    with pytest.raises(errors.OtherProgram, match=r"float32\[16,6\]|f32\[16,6\]"):
        made.decision(wider, "a plan")
