"""A stream of health reports: its file, alerts, events and resumed runs."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from xform.diagnosis import Alert, AlertLimits, Diagnosis, HealthHistory, HealthStream
from xform.errors import FileNotWritten, WrongArgument


class Board:
    """Like `tensorboardX.SummaryWriter`, but it only records."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.texts: list[tuple[str, str, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.texts.append((tag, text, step))


def loss(params, x):
    h = x
    for w in params["layers"]:
        h = jax.nn.relu(h @ w)
    return jnp.mean((h @ params["head"]) ** 2)


KEYS = jax.random.split(jax.random.key(0), 6)
PARAMS = {
    "layers": [jax.random.normal(k, (16, 16)) / 8**0.5 for k in KEYS[:4]],
    "head": jax.random.normal(KEYS[4], (16, 1)) / 4,
}
X = jax.random.normal(KEYS[5], (32, 16))
DIAGNOSIS = Diagnosis(loss, PARAMS, X)


@jax.jit
def measure(params: Any, rate: Any) -> Any:
    value, grads, readings = DIAGNOSIS.value_and_grad(params, X)
    after = jax.tree.map(lambda w, g: w - rate * g, params, grads)
    return value, DIAGNOSIS.updated(readings, params, after)


def scaled(layer: int, factor: float) -> Any:
    layers = [w * (factor if i == layer else 1.0) for i, w in enumerate(PARAMS["layers"])]
    return PARAMS | {"layers": layers}


def write(stream: HealthStream, step: int, params: Any = PARAMS, rate: float = 1e-3) -> list[Alert]:
    return stream.write(step, *measure(params, rate))


def stream_of(path: Path | None = None, **options: Any) -> tuple[HealthStream, list[Alert]]:
    alerts: list[Alert] = []
    return HealthStream(DIAGNOSIS, path, on_alert=alerts.append, **options), alerts


def test_reports_are_due_every_n_steps() -> None:
    stream, _ = stream_of(every=50)
    assert [i for i in range(151) if stream.due(i)] == [0, 50, 100, 150]


def test_the_file_has_the_numbers_of_the_report(tmp_path: Path) -> None:
    stream, alerts = stream_of(tmp_path / "health.jsonl")
    value, readings = measure(PARAMS, 1e-3)
    stream.write(50, value, readings)
    (record,) = map(json.loads, (tmp_path / "health.jsonl").read_text().splitlines())
    assert (record["step"], record["alerts"], alerts) == (50, [], [])
    assert record["loss"] == pytest.approx(float(loss(PARAMS, X)), rel=1e-5)
    rows = DIAGNOSIS.report([value], readings).rows
    assert [row["layer"] for row in record["rows"]] == [row.title for row in rows]
    for written, row in zip(record["rows"], rows, strict=True):
        assert written["activation"] == pytest.approx(row.activation, rel=1e-5)
        assert written["update_to_weight"] == pytest.approx(row.update_to_weight, rel=1e-5)
    grads = jax.grad(loss)(PARAMS, X)
    ratio = 1e-3 * jnp.linalg.norm(grads["head"]) / jnp.linalg.norm(PARAMS["head"])
    assert record["rows"][-1]["update_to_weight"] == pytest.approx(float(ratio), rel=1e-3)


def test_an_alert_comes_once_with_layer_and_line() -> None:
    stream, alerts = stream_of()
    for step in range(0, 300, 50):
        write(stream, step, scaled(2, 1e-3 if step >= 100 else 1.0))
    (alert,) = alerts
    assert (alert.step, alert.cause, alert.layers) == (100, "vanishing", ("layers.2",))
    assert "test_stream.py" in alert.where
    assert str(alert).startswith("step 100: vanishing at layers.2 (")
    assert "similar layers by" in str(alert)


def test_a_growing_activation_is_compared_with_reports_before() -> None:
    stream, alerts = stream_of(limits=AlertLimits(gradient_growth=None))
    for step in range(3):
        assert not write(
            stream, step, jax.tree.map(lambda w: 2.5 * w, PARAMS) if step == 1 else PARAMS, 1e-9
        )
    write(stream, 3, jax.tree.map(lambda w: 2.5 * w, PARAMS), rate=1e-9)
    (alert,) = alerts
    assert (alert.cause, alert.layers) == ("growing activation", ("head", "layers.3"))
    assert "98 times its median before (limit 30)" in alert.reason  # 2.5 to the power of 5


@pytest.mark.parametrize(
    ("rate", "limits", "cause"),
    [
        (1e3, None, "large update"),
        (1e-12, AlertLimits(smallest_update=1e-8), "small update"),
        (1e-12, None, ""),
        (1e3, AlertLimits(largest_update=None), ""),
    ],
)
def test_updates_have_limits(rate: float, limits: AlertLimits | None, cause: str) -> None:
    stream, alerts = stream_of(limits=limits)
    write(stream, 0, rate=rate)
    write(stream, 50, rate=rate)
    assert [alert.cause for alert in alerts] == ([cause] if cause else [])
    assert all(len(alert.layers) == 5 for alert in alerts)


def test_weights_that_are_no_numbers_are_named_as_such(tmp_path: Path) -> None:
    stream, alerts = stream_of(tmp_path / "health.jsonl")
    write(stream, 0, scaled(1, math.nan))
    assert alerts[0].layer == "layers.1"
    assert alerts[0].reason == "its weights are NaN or Inf"
    assert HealthHistory.load(tmp_path / "health.jsonl").alerts == tuple(alerts)
    assert "NaN" not in (tmp_path / "health.jsonl").read_text().replace("NaN or Inf", "")


def test_resumed_stream_writes_the_file_and_alerts_of_an_unbroken_run(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    bad = scaled(2, 1e-3)
    params = {0: PARAMS, 50: bad, 100: bad, 150: scaled(0, 200.0)}
    stream, alerts = stream_of(whole)
    for step, at in params.items():
        write(stream, step, at)
    first, first_alerts = stream_of(parts)
    for step in (0, 50, 100):
        write(first, step, params[step])
    with parts.open("a") as file:
        file.write('{"step": 150, "lo')  # the process died here
    second, second_alerts = stream_of(parts, after=70)
    for step in (100, 150):
        write(second, step, params[step])
    assert parts.read_text() == whole.read_text()
    assert first_alerts + second_alerts == alerts
    assert {alert.step for alert in alerts} == {50, 150}


def test_a_new_stream_replaces_the_file(tmp_path: Path) -> None:
    path = tmp_path / "health.jsonl"
    for _ in range(2):
        write(stream_of(path)[0], 0)
    assert len(path.read_text().splitlines()) == 1


def test_events_are_scalars_of_each_layer_and_alerts_as_text() -> None:
    board = Board()
    stream, _ = stream_of(board=board)
    write(stream, 50, scaled(2, 1e-3))
    names = {name for name, _, step in board.scalars if step == 50}
    assert "health/update_to_weight/layers.2" in names
    assert len(names) == len(board.scalars)
    assert [text[:8] for _, text, _ in board.texts] == ["step 50:"]


def test_bad_intervals_bad_files_and_missing_folders_raise(tmp_path: Path) -> None:
    with pytest.raises(WrongArgument, match="every must be at least 1"):
        stream_of(every=0)
    (tmp_path / "other").write_text('{"a": 1}\n')
    with pytest.raises(WrongArgument, match="line 1 is not a health report"):
        HealthHistory.load(tmp_path / "other")
    with pytest.raises(WrongArgument, match="FileNotFoundError"):
        HealthHistory.load(tmp_path / "none")
    with pytest.raises(FileNotWritten):
        stream_of(tmp_path / "none" / "health.jsonl")
