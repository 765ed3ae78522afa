"""The memory report of a compiled function: known sizes, and the readers of the report."""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import xform
from xform.errors import WrongArgument


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def chain(x: Any) -> Any:
    return jnp.sin(x @ x) @ x


def loss(params: Any, x: Any) -> Any:
    with jax.named_scope("encoder"):
        for w in params["layers"]:
            x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


PARAMS = {"layers": [f32(128, 128)] * 4}


@pytest.fixture(scope="module")
def report() -> Any:
    return xform.memory_analysis(xform.value_and_grad(loss), PARAMS, f32(512, 128))


def test_bytes_and_flops() -> None:
    report = xform.memory_analysis(chain, f32(128, 128))
    assert report.argument_bytes == report.output_bytes == 128 * 128 * 4
    assert report.temp_bytes >= 128 * 128 * 4
    assert report.alias_bytes == report.host_bytes == 0
    assert report.total_bytes == 2 * 128 * 128 * 4 + report.temp_bytes
    assert report.flops == 2 * 2 * 128**3 + 128**2
    assert report.compile_seconds > 0
    assert report.fits
    assert report.seconds is None


def test_arrays_and_types_give_the_same() -> None:
    one, other = (
        xform.memory_analysis(chain, x).to_dict() for x in (jnp.ones((16, 16)), f32(16, 16))
    )
    one.pop("compile_seconds"), other.pop("compile_seconds")
    assert one == other


def test_keywords_trees_and_nothing_allocated() -> None:
    def f(tree: Any, *, scale: Any) -> Any:
        return jax.tree.map(lambda x: jnp.sum(x * scale), tree)

    huge = f32(2**18, 2**18)
    report = xform.memory_analysis(f, {"a": huge, "b": [f32(3)]}, scale=f32())
    assert report.argument_bytes == 2**38 + 12 + 4


def test_a_jitted_function_keeps_its_donation_and_static_arguments() -> None:
    @functools.partial(jax.jit, donate_argnums=0, static_argnames="by")
    def step(state: Any, by: int) -> Any:
        return state + by

    report = xform.memory_analysis(step, f32(256, 256), by=2)
    assert report.alias_bytes == 256 * 256 * 4
    assert report.total_bytes == 256 * 256 * 4 + report.temp_bytes


def test_nnx_jit() -> None:
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    report = xform.memory_analysis(nnx.jit(lambda m, x: m(x)), model, f32(2, 8))
    assert report.flops >= 2 * 2 * 8 * 4
    assert report.argument_bytes == 4 * (8 * 4 + 4 + 2 * 8)


def test_loops_count_every_trip() -> None:
    def f(ws: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, w: (x @ w, None), x, ws)[0]

    report = xform.memory_analysis(f, f32(12, 64, 64), f32(8, 64))
    assert report.flops == 12 * 2 * 8 * 64 * 64
    # Every iteration reads a weight, and reads and writes the state.
    least = 12 * 4 * (64 * 64 + 2 * 8 * 64)
    assert least <= report.moved_bytes <= 3 * least


def test_rows_and_groups_add_up_to_the_peak_bytes(report: Any) -> None:
    assert sum(row.bytes for row in report) == report.total_bytes
    assert max(report.live) == report.total_bytes
    for key in ("category", "where", "scope", "operation"):
        assert sum(g.bytes for g in report.group_by(key)) == report.total_bytes
    lined = sum(row.bytes for row in report if "test_analysis.py:" in row.where)
    assert lined >= 0.95 * report.total_bytes
    assert any(g.name == "encoder" for g in report.group_by("scope"))


def test_categories_separate_parameters_arguments_and_gradients(report: Any) -> None:
    found = {g.name: g for g in report.group_by("category")}
    assert (found["parameter"].bytes, found["parameter"].count) == (4 * 128 * 128 * 4, 4)
    assert found["argument"].bytes == 512 * 128 * 4
    assert {"activation", "gradient"} <= set(found)


def test_printed_report_has_formula_categories_lines_and_scopes(report: Any) -> None:
    text = str(report)
    for part in ("loss on cpu", "argument + output + temp - alias", "live at the peak, by category",
                 "params['layers'][0]", "test_analysis.py:", "encoder", "the largest"):  # fmt: skip
        assert part in text


def test_json_has_the_totals_buffers_and_live_bytes_of_the_report(report: Any) -> None:
    data = json.loads(report.to_json())
    assert data["total_bytes"] == report.total_bytes
    assert data["device"]["capacity_bytes"] is None
    assert sum(b["bytes"] for b in data["buffers"] if b["at_peak"]) == report.total_bytes
    assert data["live"] == list(report.live)


def test_plot_writes_a_png_and_save_html_a_page(report: Any, tmp_path: Any) -> None:
    report.plot(tmp_path / "peak.png")
    report.save_html(tmp_path / "peak.html")
    assert (tmp_path / "peak.png").read_bytes().startswith(b"\x89PNG")
    assert "encoder" in (tmp_path / "peak.html").read_text()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_difference(report: Any) -> None:
    policy = xform.policies.save_nothing
    block = lambda params, x: xform.remat(loss, policy=policy)(params, x)
    other = xform.memory_analysis(xform.value_and_grad(block), PARAMS, f32(512, 128))
    diff = report.diff(other)
    rows = {name: (a, b) for name, a, b in diff.rows("category")}
    assert rows["parameter"][0] == rows["parameter"][1]
    assert sum(b - a for a, b in rows.values()) == other.total_bytes - report.total_bytes
    assert "change" in str(diff)


def test_advice_has_numbers(report: Any) -> None:
    said = report.advice
    donation = next(text for text in said if "donate" in text)
    assert "(256.0 KiB) have the same types as outputs" in donation
    assert "params['layers'][0]" in donation
    assert any("saved for the backward pass" in text for text in said)
    update = lambda params, x: jax.tree.map(jnp.add, params, jax.grad(loss)(params, x))
    step = jax.jit(update, donate_argnums=0)
    donated = xform.memory_analysis(step, PARAMS, f32(512, 128))
    assert donated.alias_bytes == 4 * 128 * 128 * 4
    assert not any("donate" in text for text in donated.advice)


def test_only_activations_have_a_reason_for_being_saved(report: Any) -> None:
    reasons = {r.why for r in report if r.category == "activation"}
    assert "on the cheapest cut" in reasons
    assert {r.why for r in report if r.category != "activation"} == {""}
    assert not any("xform" in r.scope for r in report)


def test_nothing_and_scalars() -> None:
    report = xform.memory_analysis(lambda x, y: (x, y + 1), f32(0, 3), 1)
    assert report.total_bytes >= 8
    assert str(report)


def test_not_a_function() -> None:
    with pytest.raises(WrongArgument, match="3 is not callable"):
        xform.memory_analysis(3)  # type: ignore[arg-type]


def test_no_such_group(report: Any) -> None:
    with pytest.raises(WrongArgument, match="give one of category, where, scope, operation"):
        report.group_by("color")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("policy", r"xform\.grad\(f, policy=...\)"),
        ("tagret", "did you mean target"),
        ("z", "the options"),
    ],
)
def test_unknown_keyword_arguments_raise_with_a_suggestion(name: str, remedy: str) -> None:
    with pytest.raises(WrongArgument, match=remedy):
        xform.memory_analysis(lambda x, w: x * w, 1.0, w=2.0, **{name: "min_cut"})
