"""The public function `health`: steps, updates, its outputs, and the arguments that it refuses."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xform
from tests.diagnosis.networks import WIDTH, batch, plain, scanned, weights
from xform.diagnosis.report import Report
from xform.errors import FileNotWritten, WrongArgument


@pytest.fixture(scope="module")
def faulty() -> Report:
    """Return a report with a fault in the third layer."""
    ws = weights(5)
    ws[2] = 100 * ws[2]
    return xform.health(plain, ws, batch(), power_iterations=2)


def test_printed_report_names_the_faulty_layer_and_its_remedy(faulty: Report) -> None:
    text = str(faulty)
    assert text.splitlines()[0].startswith("plain: ws.2 is exploding (loss ")
    assert re.search(r"^ws\.2 .* exploding +.*networks.py:\d+", text, re.MULTILINE)
    assert "variance 1 / fan-in" in text
    assert [row.name for row in faulty.findings] == ["ws.2"]
    assert len(list(faulty)) == len(faulty) == 5


def test_lines_of_json(faulty: Report, tmp_path: Path) -> None:
    faulty.save_jsonl(tmp_path / "health.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "health.jsonl").read_text().splitlines()]
    assert [r["verdict"] for r in rows] == ["fine", "fine", "exploding", "fine", "fine"]
    assert json.loads(json.dumps(faulty.to_dict()))["rows"] == rows


def test_the_page_and_the_picture(faulty: Report, tmp_path: Path) -> None:
    faulty.save_html(tmp_path / "health.html")
    page = (tmp_path / "health.html").read_text()
    assert page.count('<tr class="fault"') == 1
    assert "default-src 'none'" in page
    assert "<script" not in page
    assert not re.search(r"(src|href)=", page)
    faulty.plot(tmp_path / "health.svg")
    texts = re.findall(r"<!-- (.*?) -->", (tmp_path / "health.svg").read_text(), re.DOTALL)
    assert any("ws.2: exploding" in text for text in texts)
    for save in (faulty.plot, faulty.save_html, faulty.save_jsonl):
        with pytest.raises(FileNotWritten):
            save(tmp_path / "none" / "health.svg")


def test_markup_in_names_is_shown_as_text(faulty: Report, tmp_path: Path) -> None:
    rows = tuple(dataclasses.replace(r, name="<b>$x</b>", activation=np.inf) for r in faulty)
    report = dataclasses.replace(faulty, function="<script>", rows=rows)
    report.save_html(tmp_path / "health.html")
    assert "<script" not in (tmp_path / "health.html").read_text()
    report.plot(tmp_path / "health.png")
    report.save_jsonl(tmp_path / "health.jsonl")
    first = (tmp_path / "health.jsonl").read_text().splitlines()[0]
    assert json.loads(first)["activation"] is None


def test_updates_of_optax_and_by_hand() -> None:
    ws, x = jnp.stack(weights(3, 0.5)), batch()
    report = xform.health(scanned, ws, x, steps=3, update=optax.sgd(0.1), power_iterations=0)
    assert len(report.losses) == 3
    assert report.losses[0] > report.losses[-1]
    by_hand = xform.health(
        scanned, ws, x, steps=3, update=lambda p, g: p - 0.1 * g, power_iterations=0
    )
    np.testing.assert_allclose(report.losses, by_hand.losses, rtol=1e-6)
    ratios = lambda of, name: [getattr(row, name) for row in of if row.kind == "layer"]
    moved = np.asarray(ratios(report, "update_to_weight"))
    np.testing.assert_allclose(moved, ratios(by_hand, "update_to_weight"), rtol=1e-5)
    np.testing.assert_allclose(moved, 0.1 * np.asarray(ratios(report, "gradient_to_weight")), 1e-2)


def test_layers_killed_by_update_steps_are_unhealthy() -> None:
    """A learning rate that kills a ReLU is found after some steps."""
    ws = [(w, jnp.zeros(WIDTH)) for w in weights(3)]

    def loss(ws: Any, x: Any) -> Any:
        h = x
        for w, b in ws:
            h = jax.nn.relu(h @ w + b)
        return jnp.mean(h)

    far = lambda p, g: jax.tree.map(lambda p, g: p - 1e3 * g, p, g)
    report = xform.health(loss, ws, batch(), steps=3, power_iterations=0, update=far)
    assert not report.healthy


def test_equinox_module_is_accepted_as_params() -> None:
    model = eqx.nn.MLP(WIDTH, 4, 8, 2, key=jax.random.key(0))
    loss = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
    assert [r.name for r in xform.health(loss, model, batch(), power_iterations=0)] == [
        "layers.0", "layers.1", "layers.2"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 3}, "more than one step needs an update"),
        ({"steps": 0}, "steps must be an integer of at least 1"),
        ({"power_iterations": -1}, "power_iterations must be an integer"),
        ({"update": 0.1}, "update has type float"),
    ],
)
def test_invalid_steps_power_iterations_and_update_raise(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(WrongArgument, match=words):
        xform.health(plain, weights(1), batch(), **options)


@pytest.mark.parametrize("loss", [3, None])
def test_noncallable_loss_raises(loss: Any) -> None:
    with pytest.raises(WrongArgument, match="not callable"):
        xform.health(loss, weights(1), batch())


def test_odd_batches() -> None:
    empty = xform.health(
        lambda ws, x: jnp.sum(x @ ws[0]), weights(1), batch()[:0], power_iterations=1
    )
    assert empty.rows[0].activation == 0
    one = xform.health(lambda ws, x: jnp.sum(x @ ws[0]), weights(1), batch()[0], power_iterations=1)
    assert one.rows[0].correlation is None


def test_a_loss_of_several_inputs() -> None:
    """The inputs may be given one by one, as to the other questions about a loss."""
    loss = lambda w, x, y: jnp.mean((jnp.tanh(x @ w) - y) ** 2)
    w, x, y = jnp.eye(4) / 2, jnp.ones((8, 4)), jnp.zeros((8, 4))
    several = xform.health(loss, w, x, y)
    one = xform.health(lambda w, batch: loss(w, *batch), w, (x, y))
    assert [row.to_dict() for row in several] == [row.to_dict() for row in one]
