"""`Plan`: prints, explains, plots, saves itself, and decides for one program only."""

import dataclasses
import json
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import xform
from tests.planner.cuts.test_integer_program import joint_of
from tests.reference import close
from tests.sharding import mesh
from xform import errors, policies
from xform._jax import Primitive, dot_general_p
from xform.planner.costs.outcome import saved_bytes
from xform.planner.decide import schedule

W = np.cos(np.arange(6 * 16 * 16.0)).reshape(6, 16, 16).astype(np.float32) / 4
X = np.sin(np.arange(16 * 16.0)).reshape(16, 16).astype(np.float32)
ONE = 16 * 16 * 4


def unrolled(w, x):
    for i in range(6):
        x = checkpoint_name(jnp.sin(jnp.tanh(x @ w[i]) @ w[i]), f"layer {i}")
    return jnp.sum(x)


def planned(f=unrolled, *args, policy=None, **how):
    return xform.plan(f, *(args or (W, X)), policy=policy, verify=False, **how)


def test_a_loaded_plan_equals_the_saved_one_and_needs_no_solver(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planned(policy=policies.budget("6 KiB", of="saved"))
    made.save(tmp_path / "plan.json")
    assert os.listdir(tmp_path) == ["plan.json"]
    loaded = xform.Plan.load(tmp_path / "plan.json")
    assert str(loaded) == str(dataclasses.replace(made, seconds=0.0, compile_seconds=0.0))
    assert loaded.to_dict() == made.to_dict()
    monkeypatch.setattr("xform.planner.cuts.fit.decide_by_integer_program", None)  # no solver
    monkeypatch.setattr("xform.planner.cuts.graph.CutGraph.cheapest", None)
    close(jax.jit(xform.grad(unrolled, policy=loaded))(W, X), jax.grad(unrolled)(W, X), 1e-4)


@pytest.mark.skipif(jax.device_count() < 8, reason="a mesh of eight devices")
def test_bytes_over_auto_axes_are_those_of_unsharded_values() -> None:
    """The compiler's are those of each device, so the two are not compared."""
    where = NamedSharding(mesh(AxisType.Auto, data=8), P("data"))
    x = jax.ShapeDtypeStruct((128, 16), "float32", sharding=where)
    plan = xform.plan(unrolled, W, x)
    *_, peak, _ = str(plan).splitlines()
    assert "predicted, both unsharded, " in peak
    assert "on each device" in peak
    assert "%" not in peak
    assert plan.compiled_bytes < plan.predicted_bytes
    assert "unsharded" not in str(xform.plan(unrolled, W, X))


def test_load_of_a_file_without_a_plan_raises(tmp_path) -> None:
    for text in ("", "[]", "{}", json.dumps({"format": "xform plan 6"}), '{"format": "else"}'):
        path = tmp_path / "plan.json"
        path.write_text(text)
        with pytest.raises(errors.WrongArgument, match="the file holds no plan"):
            xform.Plan.load(path)
    with pytest.raises(FileNotFoundError):
        xform.Plan.load(tmp_path / "none.json")


def test_a_full_disk_leaves_the_old_plan(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned()
    path = tmp_path / "plan.json"
    made.save(path)
    before = path.read_text()

    def full(self, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(OSError, match="No space"):
        made.save(path)
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["plan.json"]


def test_explain_gives_decision_type_line_and_cost_of_each_value() -> None:
    made = planned(policy=policies.budget("6 KiB", of="saved"))
    decisions = {row.decision for row in made}
    assert decisions == {"SAVE", "RECOMPUTE"}
    for row in made:
        said = made.explain(row.value)
        assert row.decision in said
        assert row.type in said
        assert "test_plan.py" in said
        assert ("spare" if row.decision == "RECOMPUTE" else "cost") in said
    with pytest.raises(errors.WrongArgument, match="similar names: "):
        made.explain("nothing like it")


@pytest.mark.parametrize("policy", [policies.save_nothing, policies.save_dots])
def test_a_policy_for_single_values_is_the_reason(policy) -> None:
    made = planned(policy=policy)
    recomputed = [row for row in made if row.decision == "RECOMPUTE"]
    assert recomputed
    assert {row.why for row in recomputed} == {"the policy does not save it"}
    repeated = planned(policy=made)
    assert {row.why for row in repeated if row.decision == "SAVE"} <= {"the policy saves it"}
    assert [row.value for row in repeated] == [row.value for row in made]
    by_cut = {row.why for row in planned() if row.decision == "RECOMPUTE"}
    assert by_cut == {"cheaper to recompute than to save"}


def test_plot_writes_png_and_svg_files(tmp_path) -> None:
    made = planned()
    for kind in ("png", "svg"):
        made.plot(tmp_path / f"plan.{kind}")
        assert (tmp_path / f"plan.{kind}").stat().st_size > 5000
    empty = planned(lambda x: x, np.float32(1))
    empty.plot(tmp_path / "empty.png")


def test_rows_are_a_table_in_which_equal_ones_are_a_line() -> None:
    made = planned(policy=policies.save_everything)
    title, head, *lines, bytes_line, work_line = str(made).splitlines()
    assert title == "plan of unrolled, save_everything, on cpu"
    assert head.split()[:3] == ["value", "decision", "bytes"]
    assert len(lines) < len(made) == len(made.rows)
    assert sum(int(re.split("  +", line.strip())[3]) for line in lines) == len(made)
    saved = sum(r.marginal_bytes for r in made)
    assert bytes_line.startswith(f"{saved / 1024:.1f} KiB saved, peak")
    assert bytes_line.endswith("not compiled")
    assert work_line.startswith("0 FLOP of unfused operations recomputed, ")


def test_summary_shows_compiled_bytes_lower_bound_and_planning_time() -> None:
    made = dataclasses.replace(planned(), predicted_bytes=1100, recompute_flops=50, seconds=0.0)
    said = lambda **how: str(dataclasses.replace(made, **how)).splitlines()[-2:]
    assert "1000 B compiled as grad by argument 0 (+10.0%)" in said(compiled_bytes=1000)[0]
    assert said(refused=True)[0].endswith("refused by the compiler")
    assert "(" not in said()[1]
    assert "(no useful lower bound)" in said(least_flops=0)[1]
    assert "(the minimum within this budget)" in said(least_flops=50)[1]
    assert "(at least 20 FLOP within this budget)" in said(least_flops=20)[1]
    assert "planned in" not in said()[1]
    assert "planned in 2" in said(seconds=2.0)[1]
    both = said(seconds=2.0, compiles=3, compile_seconds=7.0)[1]
    assert both.endswith("planned in 2.0 s, 3 programs compiled in 7.0 s")


def test_offloaded_bytes_are_counted_apart_from_saved_bytes() -> None:
    offload = policies.offload_dots_with_no_batch_dims("device", "pinned_host")
    made = planned(policy=offload)
    assert made.offloaded_bytes == 12 * ONE
    assert ", 12.0 KiB offloaded, peak" in str(made)
    assert made.saved_bytes == 0
    (product, *_) = (r for r in made if r.decision == "OFFLOAD")
    assert "saving it would take 1.0 KiB, recomputing it" in made.explain(product.value)


def test_a_value_is_explained_by_the_users_name() -> None:
    made = planned(policy=policies.save_only_these_names("layer 2", "layer 4"))
    assert "SAVE" in made.explain("layer 2")
    with pytest.raises(errors.WrongArgument, match=r"similar names: .*layer"):
        made.explain("layer 22")


def test_plan_applied_to_another_program_raises() -> None:
    made = planned(argnums=None)
    joint = joint_of(unrolled, jnp.asarray(W), jnp.asarray(X))
    how = schedule(joint, made.decide(joint), "cpu")
    assert saved_bytes(how) == made.saved_bytes
    other = joint_of(unrolled, jnp.asarray(W), jnp.asarray(X[:8]))
    with pytest.raises(
        errors.OtherProgram, match=r"<Plan of unrolled, min_cut, peak .* KiB predicted>"
    ):
        made.decide(other)


def test_a_plan_as_jax_checkpoint_policy_saves_only_products() -> None:
    made = planned()
    assert made(dot_general_p, dimension_numbers=(((1,), (0,)), ((), ())))
    assert not made(Primitive("sin"))
    got = jax.jit(jax.grad(jax.checkpoint(unrolled, policy=made)))(W, X)
    close(got, jax.grad(unrolled)(W, X), 1e-4)


def test_of_nothing() -> None:
    empty = planned(lambda x: 0.0, jnp.zeros((0, 3)))
    assert (len(empty), empty.saved_bytes, empty.recompute_flops, empty.shapes()) == (0, 0, 0, {})
    with pytest.raises(errors.WrongArgument, match="similar names: none"):
        empty.explain("x")


def test_planning_time_is_not_serialized() -> None:
    f = lambda w, x: jnp.sum(lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)[0])
    first, second = planned(f), planned(f)
    assert first.seconds > 0
    assert json.dumps(first.to_dict()) == json.dumps(second.to_dict())
