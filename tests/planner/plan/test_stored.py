"""Plans in files that somebody changed: refused with the place, and nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import xform
from xform import errors

W, X = jax.ShapeDtypeStruct((3, 16, 16), jnp.float32), jax.ShapeDtypeStruct((8, 16), jnp.float32)


def scanned(w: Any, x: Any) -> Any:
    return jnp.sum(jax.lax.scan(lambda h, w: (jnp.sin(jnp.sin(h @ w)), None), x, w)[0])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    xform.plan(scanned, W, X, verify=False).save(path)
    return json.loads(path.read_text())


def last(data: dict[str, Any]) -> dict[str, Any]:
    return data["record"]["decisions"][-1]


def put(*path: Any, to: Any) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        *way, end = path
        for step in way:
            data = data[step]
        if to is KeyError:
            del data[end]
        else:
            data[end] = to

    return change


DECISION = "record", "decisions", 0
CHANGED = {
    "another version": (put("format", to="xform plan 1"),
                        "the format is 'xform plan 1', not 'xform plan 6'"),
    "no version": (put("format", to=KeyError), "the format is None, not 'xform plan 6'"),
    "a part is missing": (put("live", to=KeyError), "plan.live is missing"),
    "a part too many": (put("more", to=1), "plan has the unknown field 'more'"),
    "a text for a number": (put("saved_bytes", to="7"),
                            "plan.saved_bytes is '7', not a whole number"),
    "a fraction": (put("predicted_bytes", to=1.5),
                   "plan.predicted_bytes is 1.5, not a whole number"),
    "a truth for a number": (put("compiles", to=True), "plan.compiles is True, not a whole "
                             "number"),
    "neither a number nor null": (put("compiled_bytes", to="7"),
                                  "plan.compiled_bytes is '7', not a whole number or null"),
    "a number for a name": (put("function", to=3), "plan.function is 3, not a text"),
    "rows that are none": (put("rows", to={}), "plan.rows is {}, not a list"),
    "a row that is none": (put("rows", 0, to=3), "plan.rows[0] is 3, not an object"),
    "a row without bytes": (put("rows", 0, "trip_bytes", to=KeyError),
                            "plan.rows[0].trip_bytes is missing"),
    "a shape of fractions": (put("rows", 0, "shape", to=[0.5]),
                             "plan.rows[0].shape[0] is 0.5, not a whole number or a text"),
    "no decisions": (put("record", "decisions", to=[]),
                   "plan.record.decisions is [], not a list of at least one decision"),
    "no programs": (put("record", "programs", to=[]),
                    "plan.record.decisions[0].program refers to 1, but there are 0 programs"),
    "no snapshots": (put(*DECISION, "snapshots", to=KeyError),
                     "plan.record.decisions[0].snapshots is missing"),
    "no state stored": (put(*DECISION, "snapshots", to=0),
                        "plan.record.decisions[0].snapshots is 0, not a positive number"),
    "a negative value": (put(*DECISION, "saved", to=[-1]),
                         "plan.record.decisions[0].saved refers to -1, which is negative"),
    "a program that is not there": (put(*DECISION, "program", to=9),
                                    "plan.record.decisions[0].program refers to 9, but there are 2 "
                                    "programs"),
    "a decision of itself": (put(*DECISION, "nodes", to={"0": [0]}),
                           "plan.record.decisions[0].nodes.0 refers to 0, but there are 0 "
                           "decisions before it"),
    "a place that is none": (put(*DECISION, "nodes", to={"-1": []}),
                             "a key of plan.record.decisions[0].nodes is '-1', not an index in "
                             "the program"),
    "one memory": (put(*DECISION, "offloaded", to={"0": ["device"]}),
                   "plan.record.decisions[0].offloaded.0 is ['device'], not two memories"),
    "a loop of no trips": (put("record", "loops", to={"0": [[0]]}),
                           "plan.record.loops.0 is [(0,)], not positive trip counts"),
    "slices of four numbers": (put("record", "slices", to=[[0, 0, 0, 2]]),
                               "plan.record.slices[0] is [0, 0, 0, 2], not four numbers, and a "
                               "number or null"),
    "slices without an axis": (put("record", "slices", to=[[0, 0, None, 2, 8]]),
                               "plan.record.slices[0] is [0, 0, None, 2, 8], not four numbers, and "
                               "a number or null"),
    "one slice": (put("record", "slices", to=[[0, 0, 0, 1, None]]),
                  "plan.record.slices[0] is [0, 0, 0, 1, None], not at least two slices"),
    "negative bytes": (put("record", "slices", to=[[0, 0, 0, 2, -8]]),
                       "plan.record.slices[0] refers to -8, which is negative"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_a_plan_that_was_changed(name: str, written: dict[str, Any], tmp_path: Path) -> None:
    change, problem = CHANGED[name]
    data = copy.deepcopy(written)
    change(data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(errors.WrongArgument) as caught:
        xform.Plan.load(path)
    assert str(caught.value) == (
        f"Plan.load({str(path)!r})\n"
        f"  problem: the file holds no plan: {problem}\n"
        "  remedy:  pass a file that Plan.save of this version of xform wrote"
    )


def test_a_file_that_is_cut_short_or_is_no_json(written: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    text = json.dumps(written)
    deep = "[" * 100_000
    for content in (text[: len(text) // 2].encode(), b"", b"[]", b"3", b"\xff\xfe", deep.encode()):
        path.write_bytes(content)
        with pytest.raises(errors.WrongArgument, match="the file holds no plan"):
            xform.Plan.load(path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: last(data).update(saved=[999]), "it saves value 999, but the program has"),
        (lambda data: last(data).update(offloaded={"999": ["device", "pinned_host"]}),
         "it saves value 999, but the program has"),
        (lambda data: last(data).update(nodes={"999": [0]}), "it has decisions for 1 loop bodies"),
        (lambda data: last(data).update(nodes={k: [0, 0] for k in last(data)["nodes"]}),
         "it has decisions for 2 loop bodies"),
    ],
)  # fmt: skip
def test_a_plan_with_decisions_about_unknown_values_or_loops_raises(
    change: Callable[[Any], None], problem: str, written: dict[str, Any], tmp_path: Path
) -> None:
    data = copy.deepcopy(written)
    change(data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    made = xform.Plan.load(path)
    with pytest.raises(errors.OtherProgram, match=problem):
        jax.eval_shape(xform.grad(scanned, policy=made), W, X)
