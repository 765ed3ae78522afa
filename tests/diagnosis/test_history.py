"""The history of a run: loaded from the file of a stream, printed and plotted."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from xform.diagnosis import Alert, HealthHistory


def row(place: int, layer: str, **numbers: Any) -> dict[str, Any]:
    return {"layer": layer, "kind": "layer", "place": place, "where": "a.py:1 (f)", **numbers}


def written(path: Path, layers: int = 2) -> HealthHistory:
    """Write three reports; the last layer, in a branch, is missing in the first one."""
    alert = {"step": 50, "cause": "dead", "layers": ["l0"], "places": [0], "where": "a.py:1 (f)",
             "reason": "no unit is alive", "remedy": "revive it"}  # fmt: skip
    lines = []
    for i in range(3):
        rows = [row(j, f"l{j}", activation=1.0 + i + j, gradient=None if i == 2 else 0.5)
                for j in range(layers if i else layers - 1)]  # fmt: skip
        loss = None if i == 2 else 2.0 - i
        record = {"step": 50 * i, "loss": loss, "rows": rows, "alerts": [alert] if i == 1 else []}
        lines.append(json.dumps(record) + "\n")
    path.write_text("".join(lines))
    return HealthHistory.load(path)


def test_numbers_are_series_over_the_steps(tmp_path: Path) -> None:
    history = written(tmp_path / "health.jsonl")
    assert history.steps == (0, 50, 100)
    assert history.losses[:2] == (2.0, 1.0)
    assert math.isnan(history.losses[2])
    first, second = history.layers
    assert (first.name, second.name) == ("l0", "l1")
    assert first.numbers["activation"] == (1.0, 2.0, 3.0)
    assert second.numbers["activation"][1:] == (3.0, 4.0)
    assert math.isnan(second.numbers["activation"][0])
    assert math.isnan(first.numbers["gradient"][2])
    assert "update_to_weight" not in first.numbers
    (alert,) = history.alerts
    assert isinstance(alert, Alert)
    assert alert.layer == "l0"


def test_repr_is_a_summary_line_and_str_adds_a_table_and_alerts(tmp_path: Path) -> None:
    history = written(tmp_path / "health.jsonl")
    line = "3 reports, steps 0 to 100, loss 2 to nan, 1 alert"
    assert repr(history) == f"<HealthHistory: {line}>"
    text = str(history)
    assert text.startswith(line)
    assert "1 to 3" in text
    assert text.endswith("step 50: dead at l0 (a.py:1 (f)): no unit is alive; revive it")


def test_many_layers_are_not_all_printed(tmp_path: Path) -> None:
    text = str(written(tmp_path / "health.jsonl", 100))
    assert "and 94 more layers without an alert" in text
    assert len(text.splitlines()) == 10


@pytest.mark.parametrize("layers", [2, 100])
def test_plot_writes_an_svg_with_alerts_and_axis_labels(tmp_path: Path, layers: int) -> None:
    written(tmp_path / "health.jsonl", layers).plot(tmp_path / "health.svg")
    text = (tmp_path / "health.svg").read_text()
    assert text.count("dead: l0") == 1
    for label in ("loss", "activation (RMS)", "gradient (RMS)", "step"):
        assert f"<!-- {label} -->" in text


def test_an_empty_file_has_no_report(tmp_path: Path) -> None:
    (tmp_path / "health.jsonl").touch()
    history = HealthHistory.load(tmp_path / "health.jsonl")
    assert str(history).startswith("no health report")
