"""Policies on targets, in one table."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import xform
from xform import policies
from xform.errors import WrongArgument
from xform.steps import compare as compare_module


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def loss(ws: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return x + jnp.tanh(jnp.sin(x @ w) @ w.T), None

    return jnp.sum(jax.lax.scan(layer, x, ws)[0] ** 2)


def step(ws: Any, momentum: Any, x: Any) -> Any:
    g = xform.grad(loss)(ws, x)
    momentum = 0.9 * momentum + g
    return ws - momentum, momentum


def with_speed(report: Any) -> Any:
    """Return a report for the same device, with a known speed."""
    device = dataclasses.replace(report.device, f32_flops_per_second=1e12, bytes_per_second=1e12)
    target = dataclasses.replace(report.compiled_for, device=device)
    return dataclasses.replace(report, compiled_for=target)


ARGS = f32(12, 64, 64), f32(256, 64)
KINDS = {"all": policies.save_everything, "default": None, "nothing": policies.save_nothing}


def test_a_loss_is_differentiated() -> None:
    table = xform.compare(loss, *ARGS, policies=KINDS)
    sizes = [e.report.total_bytes for e in table]
    assert sizes == sorted(sizes, reverse=True)
    assert [(e.policy, e.target) for e in table] == [(name, "cpu") for name in KINDS]
    flops = [e.report.flops for e in table]
    assert flops[0] < flops[2]
    assert "nothing" in str(table)
    assert len(table.to_dict()["entries"]) == len(table) == 3


@pytest.mark.parametrize("donate", [False, True])
def test_a_step_follows_each_policy_and_keeps_its_donation(donate: bool) -> None:
    args = ARGS[0], ARGS[0], ARGS[1]
    f = xform.jit(step, donate_argnums=(0, 1) if donate else ())
    free, less = xform.compare(f, *args, policies=[None, policies.save_nothing])
    assert less.report.temp_bytes < free.report.temp_bytes
    assert (free.report.alias_bytes > 0) == donate


def test_a_budget_is_kept_by_the_whole_step() -> None:
    """The budget covers the state of the optimizer, too."""
    args = ARGS[0], ARGS[0], ARGS[1]
    (free,) = xform.compare(xform.jit(step), *args, policies=[None])
    budget = policies.budget(int(0.9 * free.report.total_bytes))
    (kept,) = xform.compare(xform.jit(step), *args, policies={"budget": budget})
    assert kept.report.total_bytes <= budget.bytes


def test_a_budget_of_exactly_the_bytes_of_the_default_is_the_default() -> None:
    """With two derivatives the default is compiled first, and nothing after it if it fits."""

    def adversaries(ws: Any, v: Any, x: Any) -> Any:
        first = xform.grad(loss)(ws, x)
        return ws - first, v - xform.grad(lambda v: loss(v, -x))(v)

    args = ARGS[0], ARGS[0], ARGS[1]
    (free,) = xform.compare(xform.jit(adversaries), *args, policies=[None])
    budget = policies.budget(free.report.total_bytes)
    (kept,) = xform.compare(xform.jit(adversaries), *args, policies=[budget])
    assert kept.report.total_bytes == free.report.total_bytes
    assert kept.report.flops == free.report.flops
    assert "1 program compiled" in kept.report.description.planned


def test_a_step_that_is_over_its_budget_names_the_lowest() -> None:
    """The derivative alone would fit; with the state of the optimizer it does not."""
    args = ARGS[0], ARGS[0], ARGS[1]
    (free,) = xform.compare(xform.jit(step), *args, policies=[None])
    fixed = free.report.argument_bytes + free.report.output_bytes
    budget = policies.budget(fixed)
    (entry,) = xform.compare(xform.jit(step), *args, policies={"b": budget})
    assert entry.report is None
    assert entry.floor_bytes > budget.bytes


def test_a_budget_that_cannot_be_kept_names_its_floor() -> None:
    table = xform.compare(loss, *ARGS, policies={"b": policies.budget("1 KiB")})
    (entry,) = table
    assert entry.report is None
    assert entry.floor_bytes > 12 * 64 * 64 * 4
    assert "floor" in str(xform.compare(loss, *ARGS, policies={"b": policies.budget("1 KiB")}))


def test_compare_writes_svg_and_html_and_reports_progress(tmp_path: Any) -> None:
    seen: list[tuple[str, str]] = []
    table = xform.compare(loss, *ARGS, policies=KINDS, progress=lambda *at: seen.append(at))
    table.plot(tmp_path / "c.svg")
    table.save_html(tmp_path / "c.html")
    assert seen == [(name, "default backend") for name in KINDS]
    assert "<svg" in (tmp_path / "c.svg").read_text()
    assert "nothing, cpu" in (tmp_path / "c.html").read_text()


def test_partial_functions_are_compared() -> None:
    table = xform.compare(functools.partial(loss), *ARGS, policies=[None])
    assert table.function == "partial"
    assert table.entries[0].report.total_bytes > 0


def test_a_loss_whose_argument_is_called_policy() -> None:
    """For example an agent's parameters. The names of parameters mean nothing."""
    agent = lambda params, policy: jnp.sum(jnp.sin(params @ policy) @ policy)
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    table = xform.compare(agent, x, x, policies=KINDS)
    plain = xform.compare(lambda params, other: agent(params, other), x, x, policies=KINDS)
    assert [e.report.total_bytes for e in table] == [e.report.total_bytes for e in plain]


@pytest.mark.parametrize(
    ("f", "options", "problem"),
    [
        (loss, {"policies": []}, "nothing to compare"),
        (loss, {"policies": [None], "targets": []}, "nothing to compare"),
        (loss, {"policies": policies.save_dots}, "is not a list of policies"),
        (loss, {"policies": "dots"}, "is not a list of policies"),
        (3, {"policies": [None]}, "3 is not callable"),
        (loss, {"policies": [None], "targets": 3}, "targets=3 is not a list of targets"),
        (loss, {"policies": [None], "target": "cpu"}, "is not an option of compare"),
        (xform.jit(step), {"policies": [None], "argnums": 1}, "chooses itself"),
        (xform.jit(step), {"policies": [None], "donate_argnums": 1}, "jitted already"),
    ],
)
def test_invalid_functions_policies_targets_and_options_raise(
    f: Any, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(WrongArgument, match=problem):
        xform.compare(f, *ARGS, **options)


def test_policies_of_one_name_are_numbered() -> None:
    some = [policies.budget(n, of="saved") for n in (2_000_000, 2_000_010)]
    table = xform.compare(loss, *ARGS, policies=some, targets="cpu")
    assert [e.policy for e in table] == [
        "saved:1.9MiB", "saved:1.9MiB (2)"]  # fmt: skip


def test_a_budget_of_nothing_is_refused() -> None:
    table = xform.compare(loss, *ARGS, policies=[policies.budget(0)])
    (entry,) = table
    assert entry.report is None
    assert entry.floor_bytes > 0
    assert entry.target == "cpu"


def test_a_pictures_labels_stay_in_its_frame_and_its_units_fit(monkeypatch, tmp_path) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(compare_module, "save_figure", lambda figure, *_: figures.append(figure))
    kinds = {"all": policies.save_everything, "a policy of a long name": None, "default": None}
    table = xform.compare(loss, *ARGS, policies=kinds, targets=["cpu", "cpu:1"])
    table.plot(tmp_path / "a.png")
    (figure,) = figures
    figure.canvas.draw()
    (ax,) = figure.axes
    frame = ax.get_window_extent()
    assert ax.texts
    for text in ax.texts:
        box = text.get_window_extent()
        assert frame.x0 <= box.x0 < box.x1 <= frame.x1
        assert frame.y0 <= box.y0 < box.y1 <= frame.y1
    assert any("a policy of a long name, default" in text.get_text() for text in ax.texts)
    assert ax.get_xlabel().split()[0] in ("KiB", "MiB")
    assert ax.get_ylabel() == "MFLOP"
    assert ax.get_xlim()[1] >= 1


def test_a_picture_shows_times_if_the_speed_of_each_device_is_known(monkeypatch, tmp_path) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(compare_module, "save_figure", lambda figure, *_: figures.append(figure))
    (entry,) = xform.compare(loss, *ARGS, policies=[None])
    timed = dataclasses.replace(entry, report=with_speed(entry.report))
    elsewhere = dataclasses.replace(timed, target="elsewhere")
    for entries in ([timed, timed, elsewhere], [timed, entry]):
        compare_module.Comparison("loss", tuple(entries)).plot(tmp_path / "a.png")
    labels = [figure.axes[0].get_ylabel() for figure in figures]
    legends = [figure.axes[0].get_legend().get_texts() for figure in figures]
    assert [[text.get_text() for text in texts] for texts in legends] == [
        ["cpu", "elsewhere"], ["cpu"]
    ]  # fmt: skip
    assert [len(line.get_xdata()) for line in figures[0].axes[0].lines] == [2, 1]
    assert labels == ["step, us (roofline estimate)", "MFLOP"]


def test_reports_state_planning_time_and_recomputed_flops() -> None:
    loss = lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))
    args = jnp.ones((64, 64)), jnp.ones((256, 64))
    found = xform.compare(loss, *args, policies=[None, xform.policies.budget("1 MiB")])
    default, budget = (entry.report.description.planned for entry in found)
    assert re.fullmatch(
        r"0 FLOP of unfused operations recomputed, 4.2 MFLOP in the forward pass, "
        r"planned in .*s, 1 program compiled in .*s",
        default,
    )
    assert re.fullmatch(
        r"\S+ \S+ of unfused operations recomputed.*, 4.2 MFLOP in the forward pass, "
        r"planned in .*s",
        budget,
    )
    assert f"planned: {budget}" in str([*found][1].report)
