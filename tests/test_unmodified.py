"""`experiments.unmodified` on a program of ours, in a file like other people's."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import xform
from experiments import report
from experiments.report import known
from experiments.unmodified import picture, tables
from experiments.unmodified.measure import agreement, size, sizes, within
from experiments.unmodified.results import AGREEMENT, add
from experiments.unmodified.sources import definitions, module
from experiments.unmodified.ways import HALF, JAX, LEAST, XFORM, budget, ours

SCRIPT = """
import no_such_package
import jax.numpy as jnp
LAYERS = 6
data = no_such_package.load()
def layer(w, x):
    return x + jnp.tanh(jnp.sin(x @ w)) * 2
def loss(w, x):
    for _ in range(LAYERS):
        x = layer(w, x)
    return jnp.mean(x**2)
"""
ARGS = (jnp.ones((64, 64)) / 64, jnp.ones((256, 64)))


@pytest.fixture
def loss(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return definitions(tmp_path / "train.py", "LAYERS", "layer", "loss").loss


def test_definitions_load_from_a_script_that_cannot_be_imported(tmp_path: Path, loss) -> None:
    assert loss.__globals__["LAYERS"] == 6
    assert "data" not in loss.__globals__
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        module(tmp_path / "train.py")


def test_definitions_of_a_notebook(tmp_path: Path) -> None:
    text, code = ({"cell_type": kind, "source": [line]}
                  for kind, line in (("markdown", "x ="), ("code", "x = 3")))  # fmt: skip
    (tmp_path / "book.ipynb").write_text(json.dumps({"cells": [text, code]}))
    assert definitions(tmp_path / "book.ipynb", "x").x == 3


def test_sizes_equal_the_compilers_and_known_sizes_are_skipped(loss) -> None:
    known = {"jax.grad": {"temp": 7}}
    found = dict(sizes(loss, ARGS, "cpu", known, ["jax.grad", "dots_saveable", "default"]))
    assert list(found) == ["dots_saveable", "default"]
    for name, way in (("dots_saveable", JAX), ("default", XFORM)):
        made = jax.jit(way[name](loss)).lower(*ARGS).compile().memory_analysis()
        assert found[name]["temp"] == made.temp_size_in_bytes


def test_budgets(loss) -> None:
    of = {way: {"temp": 10, "total": 100} for way in JAX} | {"nothing_saveable": {"total": 60}}
    assert budget(LEAST, of) == 60
    assert budget(HALF, of) == 95
    roomy = size(ours(None), loss, ARGS, "cpu")
    assert roomy["kept"] == xform.residuals(loss, *ARGS).total_bytes
    assert within(2 * roomy["total"], loss, ARGS, "cpu")["temp"] == roomy["temp"]


def test_no_plan_within_the_arguments(loss) -> None:
    assert within(1000, loss, ARGS, "cpu")["floor"] > sum(x.nbytes for x in ARGS)


def test_agreement_tells_a_difference(loss, monkeypatch: pytest.MonkeyPatch) -> None:
    found = agreement(loss, ARGS, 3)
    assert found["loss"] == pytest.approx(float(loss(*ARGS)))
    assert found["loss difference"] == 0
    assert found["gradient difference"] < 1e-6
    wrong = lambda f: lambda *args: jax.tree.map(lambda x: 1.5 * x, jax.value_and_grad(f)(*args))
    monkeypatch.setitem(XFORM, "default", wrong)
    found = agreement(loss, ARGS, 3)
    assert found["loss difference"] == pytest.approx(0.5)
    assert found["gradient difference"] == pytest.approx(0.5)


def test_gradients_without_elements_are_equal() -> None:
    args = {"w": jnp.ones(3), "none": jnp.ones((3, 0))}
    found = agreement(lambda p: jnp.sum(p["w"] ** 2) + jnp.sum(p["none"]), (args,), 3)
    assert found["gradient difference"] == 0


def test_results_tables_and_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    add(path, "ours", "cpu", {"jax.grad": {"temp": 2**21, "total": 2**22, "flops": 100}})
    add(path, "ours", "cpu", {"default": {"temp": 2**20, "total": 2**21, "flops": 103,
                                              "live": 9, "kept": 10}})  # fmt: skip
    add(path, "ours", "cpu", {HALF: {"budget": 1, "floor": 3 * 2**20}})
    add(path, "ours", AGREEMENT, {"loss difference": 0.0, "gradient difference": 2e-7,
                                   "time": (0.9, 0.8, 1.1)})  # fmt: skip
    markers = ("sizes", "steps")
    (tmp_path / "README.md").write_text("\n".join(f"<!-- {m} -->\n<!-- /{m} -->" for m in markers))
    monkeypatch.setattr(report, "_WRITES", True)
    tables.write(tmp_path, known(path))
    text = (tmp_path / "README.md").read_text()
    assert (
        "| ours | cpu | 2 |  |  |  | 0.50 |  |  | 3.0% | 0.90 |  |  | no plan below 0.50 |  |"
        in text
    )
    assert "| ours | 0e+00 | 2e-07 | 0.90 | 0.80 to 1.10 |" in text
    picture.draw(tmp_path / "bytes.png", known(path))
    assert (tmp_path / "bytes.png").stat().st_size > 0
