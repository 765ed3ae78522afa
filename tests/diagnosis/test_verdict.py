"""The verdict names the planted fault at its layer, and no fault at the layers beside it."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xform
from experiments.health.networks import NETWORKS
from experiments.health.planted import found, plant
from xform.diagnosis import thresholds
from xform.diagnosis.row import LayerHealth
from xform.diagnosis.verdict import FINE, VERDICTS, with_verdicts

SEEDS = 2
SLOW = 12


def row(i: int, **numbers: Any) -> LayerHealth:
    """Return a healthy layer, with some numbers replaced."""
    usual: dict[str, Any] = {
        "name": f"layers.{i}", "trip": (), "kind": "layer", "scope": "", "where": "", "place": i,
        "kin": "layer dot_general [(8, 8)]", "bypassed": False, "size": 64, "activation": 1.0,
        "gradient": 1e-3, "input": 1.0, "gain": 1.0, "dead": 0.1, "saturated": 0.1,
        "correlation": 0.6, "noise": 0.1, "weight": 8.0, "gradient_to_weight": 1e-3,
    }  # fmt: skip
    return LayerHealth(**usual | numbers)


def verdicts(rows: list[LayerHealth]) -> list[str]:
    return [r.verdict for r in with_verdicts(rows)]


def with_one(at: int = 3, n: int = 7, **numbers: Any) -> list[LayerHealth]:
    return [row(i, **(numbers if i == at else {})) for i in range(n)]


@pytest.mark.parametrize(
    ("numbers", "verdict"),
    [
        ({"dead": 1.0}, "dead"),
        ({"saturated": 0.95}, "saturated"),
        ({"gain": 1.1 * thresholds.GAIN_FACTOR}, "exploding"),
        ({"gain": 0.9 / thresholds.GAIN_FACTOR}, "vanishing"),
        ({"correlation": 0.12}, "shattered"),
        ({"nonfinite": 2.0, "activation": np.nan}, "nonfinite"),
        ({"gain": 0.9 * thresholds.GAIN_FACTOR, "dead": 0.9, "saturated": 0.8}, FINE),
        ({"kind": "sum", "kin": "sum", "least": 0.0, "gain": None}, FINE),  # it has no siblings
        ({"gain": None, "weight": 0.0, "activation": 0.0}, FINE),  # it starts from zero
    ],
)
def test_each_verdict(numbers: dict[str, Any], verdict: str) -> None:
    assert verdicts(with_one(**numbers)) == [FINE] * 3 + [verdict] + [FINE] * 3
    assert verdict in VERDICTS
    one = with_verdicts(with_one(**numbers))[3]
    assert bool(one.reason) == bool(one.remedy) == (verdict != FINE)


def test_a_layer_that_suffers_from_another_says_so() -> None:
    rows = with_one(dead=1.0)
    rows = [dataclasses.replace(r, gradient=0.0) if i < 3 else r for i, r in enumerate(rows)]
    rows[4] = dataclasses.replace(rows[4], input=0.0, gain=None, dead=1.0)
    said = with_verdicts(rows)
    assert [r.verdict for r in said] == [FINE] * 3 + ["dead"] + [FINE] * 3
    assert [r.because for r in said] == ["layers.3"] * 3 + ["", "layers.3", "", ""]


def test_the_first_layer_with_a_nan_is_at_fault_and_going_back_the_last() -> None:
    numbers = [{"nonfinite": 1.0 * (i > 2), "gradient_nonfinite": 1.0} for i in range(6)]
    rows = [row(i, **n) for i, n in enumerate(numbers)]
    assert verdicts(rows).index("nonfinite") == 3
    guard, check = (with_verdicts([row(0, nonfinite=1.0, input=x)])[0] for x in (1.0, math.nan))
    assert "limit the operation's inputs" in guard.remedy
    assert "check the batch" in check.remedy
    rows = [row(i, gradient_nonfinite=1.0 * (i < 4)) for i in range(6)]
    assert [i for i, v in enumerate(verdicts(rows)) if v != FINE] == [3]


def test_gradients_that_are_lost_over_many_layers() -> None:
    rows = [row(i, gradient=10.0 ** -(9 - i)) for i in range(9)]
    assert set(verdicts(rows)[:3]) == {"vanishing"}
    assert set(verdicts(rows)[5:]) == {FINE}
    rows = [row(i, gradient=10.0 ** (9 - i)) for i in range(9)]
    assert set(verdicts(rows)[:3]) == {"exploding"}


def test_exploding_takes_precedence_over_shattered_gradients() -> None:
    alike = lambda i: 0.05 if i < 7 else 0.9
    rows = [row(i, gradient=10.0 ** (9 - 2 * i), correlation=alike(i)) for i in range(9)]
    assert verdicts(rows) == ["exploding"] * 6 + ["shattered", FINE, FINE]


def test_verdict_finds_a_layer_that_lacks_its_peers_skip_connection() -> None:
    rows = [row(i, bypassed=0 < i < 8 and i not in (3, 4)) for i in range(9)]
    assert [i for i, v in enumerate(verdicts(rows)) if v != FINE] == [4]  # where the sum should be
    assert "add the block's input" in with_verdicts(rows)[4].remedy
    assert set(verdicts([row(i) for i in range(9)])) == {FINE}  # no layer has one


def test_a_sum_of_which_one_part_is_zero_among_those_like_it() -> None:
    rows = [row(i, kind="sum", kin="sum", trip=(i,), place=0, least=0.3) for i in range(5)]
    rows[3] = dataclasses.replace(rows[3], least=0.0)
    assert verdicts(rows) == [FINE] * 3 + ["vanishing", FINE]
    rows[0] = dataclasses.replace(rows[0], least=0.0)  # a state that starts from zero
    assert verdicts(rows)[0] == FINE


@pytest.mark.parametrize("kind", ["layer", "path", "sum"])
@pytest.mark.parametrize(
    "fault",
    ["dead", "saturated", "exploding", "vanishing", "small operand", "shattered", "drifting"],
)
def test_a_remedy_fits_the_row(kind: str, fault: str) -> None:
    """A sum has no weights, and a row with a path around it needs none."""
    numbers: dict[str, dict[str, Any]] = {
        "dead": {"dead": 1.0},
        "saturated": {"saturated": 1.0},
        "exploding": {"gain": 1e4},
        "vanishing": {"gain": 1e-4},
        "small operand": {"least": 1e-6},
        "shattered": {"correlation": 0.12},
        "drifting": {"gradient": 1e-9},
    }
    usual = {"bypassed": kind != "layer"} | (
        {"kind": "sum", "kin": "sum", "least": 0.5, "weight": None} if kind == "sum" else {}
    )
    rows = [row(i, **usual | (numbers[fault] if i == 3 else {})) for i in range(7)]
    found = with_verdicts(rows)[3]
    only_of = {"small operand": "sum", "shattered": "layer path", "drifting": "layer path"}
    assert (found.verdict != FINE) == (kind in only_of.get(fault, kind))
    if kind != "layer":
        assert "add" not in found.remedy
    if kind == "sum":
        assert "its weights" not in found.remedy
        assert "its bias" not in found.remedy


def test_no_rows_missing_numbers_and_zero_gradients_give_no_fault() -> None:
    assert with_verdicts([]) == []
    empty = dict.fromkeys(("input", "gain", "dead", "saturated", "correlation", "weight"))
    assert verdicts(with_one(**empty)) == [FINE] * 7
    assert verdicts([row(0, gradient=0.0)]) == [FINE]


@pytest.mark.parametrize("fault", NETWORKS["RNN-200"].faults)
def test_a_fault_at_one_of_200_steps(fault: str) -> None:
    for seed in range(SEEDS):
        rows, at = plant("RNN-200", fault, 500 + seed)
        assert found("RNN-200", rows, at), (seed, at, [r for r in rows if r.verdict != FINE])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "RNN-200"])
def test_faults_at_one_layer_of_each_network(name: str) -> None:
    for fault in NETWORKS[name].faults:
        runs = [plant(name, fault, 500 + seed) for seed in range(SLOW)]
        assert sum(found(name, rows, at) for rows, at in runs) >= 0.95 * SLOW, fault


@pytest.mark.parametrize(("gain", "shattered"), [(1.0, False), (8.0, True)])
def test_gradients_of_neighbours_in_a_chaotic_network(gain: float, shattered: bool) -> None:
    def loss(ws: Any, x: Any) -> Any:
        for w in ws[:-1]:
            x = jnp.sin(gain * (x @ w))
        return jnp.sum((x @ ws[-1])[:, 0])

    keys = jax.random.split(jax.random.key(0), 6)
    ws = [jax.random.normal(k, (128, 128)) * 128**-0.5 for k in keys]
    x = jax.random.normal(keys[0], (16, 128))
    report = xform.health(loss, ws, x, power_iterations=0)
    assert any(row.verdict == "shattered" for row in report) == shattered
