"""Rows of a Plan: the cost of each value, compared with plans that decide otherwise about it."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import xform
from tests.planner.cuts.test_integer_program import joint_of
from xform import policies
from xform.interpret.cost import equation_flops
from xform.interpret.node import user_equation
from xform.planner.decide import schedule
from xform.planner.plan.decision import decision_of
from xform.planner.report.rows import rows_of
from xform.policies import MinCut

W, X = jnp.ones((6, 8, 8)) / 9, jnp.ones((4, 8))
ONE = 4 * 8 * 4


def layer(x, w):
    return jnp.tanh(jnp.sin(x @ w) @ w.T) * x


def unrolled(w, x):
    for i in range(3):
        x = layer(x, w[i])
    return jnp.sum(x**2)


def scanned(w, x):
    return jnp.sum(lax.scan(lambda x, w: (layer(x, w), None), x, w)[0] ** 2)


def loops(w, x):
    inner = lambda x, w: lax.scan(lambda x, _: (layer(x, w), None), x, None, length=3)[0]
    return jnp.sum(lax.scan(lambda x, w: (inner(x, w), None), x, w)[0] ** 2)


def of(f, policy=policies.save_everything):
    how = schedule(joint_of(f, W, X), policy, "cpu")
    return how, rows_of(how)


def again(how) -> int:
    """Return the recomputed FLOPs of a Plan without nodes, fused operations included."""
    distinct = {id(e): e for e in how.order if id(e) in how.recomputed}
    return sum(equation_flops(user_equation(e)) for e in distinct.values())


@pytest.mark.parametrize("policy", [MinCut(), MinCut(0.0, 0.0), MinCut(0.1, 0.1),
                                    policies.save_everything, policies.save_dots])  # fmt: skip
def test_a_row_has_the_flops_and_bytes_of_the_opposite_decision(policy) -> None:
    joint = joint_of(unrolled, W, X)
    how = schedule(joint, policy, "cpu")
    how = schedule(joint, decision_of(how), "cpu")
    values = {f"{e.primitive.name}.{i}": e.outvars[0] for i, e in enumerate(joint.forward)}
    rows = rows_of(how)
    assert {r.value for r in rows if r.decision == "SAVE"} == {
        name for name, v in values.items() if v in how.saved
    }
    for row in rows:
        v, saved = values[row.value], frozenset(how.saved)
        other = saved - {v} if row.decision == "SAVE" else saved | {v}
        made = schedule(joint, dataclasses.replace(decision_of(how), saved=other), "cpu")
        assert row.marginal_flops == abs(again(made) - again(how))
        assert row.marginal_bytes == v.aval.size * 4


@pytest.mark.parametrize(("f", "stacked"), [(scanned, (6,)), (loops, (6, 3))])
def test_values_of_loops_bear_their_path_and_count_in_all_trips(f, stacked) -> None:
    _, rows = of(f)
    inside = [r for r in rows if r.operation == "cos"]
    assert [(r.loops, r.trip_bytes) for r in inside] == [(stacked, ONE)]
    (row,) = inside
    trips = 6 if f is scanned else 18
    assert row.value.count("scan.") == len(stacked)
    assert row.value.rpartition("/")[2].startswith("cos.")
    assert row.marginal_bytes == trips * ONE
    # A product and its cosine: before them only the state is saved.
    assert row.marginal_flops == trips * (2 * 4 * 8 * 8 + 4 * 8)
    carries = [r.loops for r in rows if "/carry." in r.value]
    assert carries == [stacked]


def test_values_kept_in_a_recomputed_inner_loop_count_only_its_trips() -> None:
    _, rows = of(loops, MinCut(0.0, 0.0))
    inside = [r for r in rows if r.value.count("scan.") == 2]
    assert {r.loops for r in inside} == {(3,)}


def test_rows_are_sorted_by_bytes_and_absent_if_nothing_is_kept() -> None:
    _, rows = of(lambda w, x: jnp.sum(jnp.sin(x @ w[0, :, :2]) @ w[0, :2]) + jnp.sum(jnp.exp(x)))
    sizes = [r.marginal_bytes for r in rows]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) > 2
    for f in (lambda w, x: jnp.float32(1), lambda w, x: jnp.sum(2 * x)):
        assert of(f)[1] == []


def test_branches_are_numbered_and_names_are_the_users() -> None:
    def f(w, x):
        x = checkpoint_name(jnp.exp(x), "h")
        return jnp.sum(lax.cond(x[0, 0] > 0, jnp.sin, lambda x: jnp.exp(x @ w[0]), x) * x)

    _, rows = of(f)
    named = [r for r in rows if r.operation == "name 'h'"]
    branches = {r.value.split("/")[0][-3:] for r in rows if "/" in r.value}
    assert branches == {"[0]", "[1]"}
    assert len(named) <= 1
    assert all("test_rows.py" in r.where for r in rows)


def rows_of_logits(w, x):
    return jnp.mean(jax.nn.logsumexp(x @ w, -1))


def sum_of_layers(w, x):
    return jnp.sum(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0] ** 2)


@pytest.mark.parametrize(
    ("f", "w", "size"),
    [(rows_of_logits, (16, 512), 200_000), (sum_of_layers, (6, 16, 16), 160_000)],
)
def test_rows_in_slices_have_lines_of_the_function(f, w, size) -> None:
    types = jax.ShapeDtypeStruct(w, "float32"), jax.ShapeDtypeStruct((512, 16), "float32")
    plan = xform.plan(f, *types, policy=policies.budget(size, slices=True, verify=False))
    assert plan.slices
    assert all(re.search(rf"test_rows.py:\d+:\d+ \({f.__name__}", row.where) for row in plan)


@jax.custom_jvp
def with_zeros(x):
    return jnp.sin(x)


with_zeros.defjvp(lambda xs, dxs: (jnp.sin(*xs), jnp.cos(*xs) * dxs[0]), symbolic_zeros=True)


def calls_rule(w, x):
    return jnp.sum(with_zeros(x @ w[0]))


def test_values_of_a_rule_with_symbolic_zeros_have_the_line_of_the_call() -> None:
    _, rows = of(calls_rule)
    assert "cos" in {r.operation for r in rows}
    assert all("(calls_rule)" in r.where for r in rows)


def test_a_value_has_the_name_that_the_user_gave() -> None:
    def f(w, x):
        step = lambda h, w: (checkpoint_name(jnp.sin(h @ w), "mlpwi_0") @ w.T, None)
        return jnp.sum(lax.scan(step, x, w)[0])

    w, x = jnp.ones((4, 8, 8)), jnp.ones((2, 8))
    keep = jax.checkpoint_policies.save_only_these_names("mlpwi_0")
    plan = xform.plan(f, w, x, policy=keep, verify=False)
    values = [r.value for r in plan if r.operation == "name 'mlpwi_0'"]
    assert values
    assert all(value.startswith("scan.") and "/mlpwi_0." in value for value in values)
    assert plan.explain(values[0]) == plan.explain("mlpwi_0")


def test_offloaded_products_have_offload_rows_with_trip_counts() -> None:
    offload = policies.offload_dots_with_no_batch_dims("device", "pinned_host")
    _, rows = of(scanned, offload)
    sent = [r for r in rows if r.decision == "OFFLOAD"]
    assert [(r.operation, r.loops) for r in sent] == [("dot_general", (6,))] * 2
    assert all(r.type == "float32[4,8]" for r in sent)


def test_types_of_scalars_empty_and_narrow_values() -> None:
    for x, text in ((jnp.float32(1), "float32[]"), (jnp.ones((0, 3)), "float32[0,3]"),
                    (jnp.ones(5, jnp.bfloat16), "bfloat16[5]")):  # fmt: skip
        f = lambda x: jnp.sum(jnp.sin(x)).astype(jnp.float32)
        (row,) = rows_of(schedule(joint_of(f, x), policies.save_everything, "cpu"))
        assert (row.type, row.marginal_bytes) == (text, x.nbytes)
        assert row.trip_bytes == jax.eval_shape(jnp.sin, x).size * x.dtype.itemsize
