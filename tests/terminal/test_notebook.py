"""Every result shows itself: one line as `repr`, a text and a picture as HTML, and JSON."""

import dataclasses
import functools
import importlib
import json
import pathlib
import pkgutil
import re
import tempfile
import xml.etree.ElementTree as xml
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import xform
from xform.diagnosis import Diagnosis, HealthHistory, HealthStream
from xform.errors import MissingExtra
from xform.storage.results import FORMATS
from xform.terminal.notebook import Result
from xform.terminal.text import human_bytes

# What matplotlib writes into a picture that differs each time: ids, and the date.
UNIQUE = r"(?<=id=\")[^\"]*|(?<=#)\w*|<dc:date>[^<]*"
F32 = jax.ShapeDtypeStruct((16, 16), jnp.float32)
NUMBERS = jnp.linspace(0.5, 1.5, 8)


def loss(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)


def steps() -> Any:
    step = xform.jit(lambda w, x: w - xform.grad(loss)(w, x), "budget:1MiB")
    return step.lower(F32, F32).plan


def named() -> Any:
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(checkpoint_name(jnp.tanh(x @ w) @ w, "up")), None

    def gradient(ws: Any, x: Any, policy: Any) -> Any:
        block = jax.checkpoint(layer, policy=policy)
        return jax.grad(lambda ws: jax.lax.scan(block, x, ws)[0].sum())(ws)

    ws = jax.ShapeDtypeStruct((8, 64, 64), jnp.float32)
    x = jax.ShapeDtypeStruct((256, 64), jnp.float32)
    return xform.plan_names(gradient, ws, x, policy="budget:2MiB", free=False)


def updates() -> Any:
    fused = xform.fused_update(loss, optax.sgd(0.1))
    w = jnp.ones((16, 16))
    return fused.where(w, optax.sgd(0.1).init(w), w)


def sparse() -> Any:
    return xform.sparse.jacobian(lambda x: x[1:] * x[:-1]).prepare(NUMBERS)


def streamed() -> Any:
    diagnosis = Diagnosis(loss, jnp.eye(16), jnp.ones((2, 16)))
    with tempfile.TemporaryDirectory() as folder:
        stream = HealthStream(diagnosis, f"{folder}/health.jsonl", every=10)
        for i in (0, 10):
            value, _, readings = diagnosis.value_and_grad(jnp.eye(16), jnp.ones((2, 16)))
            stream.write(i, value, readings)
        return HealthHistory.load(f"{folder}/health.jsonl")


analysis = functools.partial(xform.memory_analysis, xform.grad(loss), F32, F32)
MAKERS: dict[str, Any] = {
    "MemoryReport": analysis,
    "Difference": lambda: analysis().diff(xform.memory_analysis(loss, F32, F32)),
    "Comparison": lambda: xform.compare(loss, F32, F32, policies=["min_cut", "save_nothing"]),
    "ResidualTable": lambda: xform.residuals(loss, F32, F32),
    "Plan": lambda: xform.plan(loss, F32, F32, policy="save_nothing"),
    "StepPlan": steps,
    "NamePlan": named,
    "Pareto": lambda: xform.pareto(loss, F32, F32, points=2, verify=False),
    "LargestBatch": lambda: xform.memory.max_batch(
        lambda w, x: x @ w, F32, F32, target="cpu", capacity="64KiB"),
    "Reason": lambda: xform.memory.why_oom(loss, F32, F32, target="cpu", capacity="1KiB"),
    "DeviceComparison": lambda: xform.memory.compare_with_device(
        xform.grad(loss), jnp.ones((16, 16)), jnp.ones((16, 16))),
    "HealthHistory": streamed,
    "Report": lambda: xform.health(loss, jnp.ones((16, 16)), jnp.ones((16, 16))),
    "ComputationalGraph": lambda: xform.adjoints.graph(lambda x: jnp.sin(x) * x, 1.0),
    "Explanation": lambda: xform.jacobian.explain(lambda x: jnp.sin(x) * x[0], NUMBERS),
    "UpdateReport": updates,
    "PatternAndColoring": sparse,
    "Pattern": lambda: sparse().pattern,
    "Coloring": lambda: sparse().coloring,
    "Spectrum": lambda: xform.curvature.hessian_spectrum(
        lambda x: jnp.sum(jnp.sin(x)), (NUMBERS,), jax.random.key(0), steps=4, samples=1),
}  # fmt: skip


@functools.cache
def made(name: str) -> Any:
    return MAKERS[name]()


def test_every_kind_of_result_is_tested() -> None:
    for module in pkgutil.walk_packages(xform.__path__, "xform."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    kinds = {cls.__name__ for cls in Result.__subclasses__() if cls.__module__.startswith("xform.")}
    assert kinds == set(MAKERS) == set(FORMATS)


@pytest.mark.parametrize("name", MAKERS)
def test_a_result_is_one_line_as_repr(name: str) -> None:
    result = made(name)
    assert isinstance(result, Result)
    assert type(result).__name__ == name
    assert re.fullmatch(r"<.{8,160}>", repr(result)), repr(result)


@pytest.mark.parametrize("name", ["Comparison", "Pareto", "Plan", "StepPlan", "NamePlan",
    "ResidualTable", "LargestBatch", "UpdateReport", "MemoryReport"])  # fmt: skip
def test_the_line_has_the_bytes(name: str) -> None:
    result = made(name)
    numbers = {
        "Comparison": lambda: max(e.report.total_bytes for e in result),
        "Pareto": lambda: max(p.peak_bytes for p in result),
        "LargestBatch": lambda: result.tried[result.size],
        "UpdateReport": lambda: max(row.gradient_bytes for row in result.rows),
        "ResidualTable": lambda: result.total_bytes,
        "MemoryReport": lambda: result.total_bytes,
    }
    size = numbers.get(name, lambda: result.compiled_bytes)()
    assert human_bytes(size) in repr(result), repr(result)


@pytest.mark.parametrize("name", MAKERS)
def test_a_result_is_json(name: str) -> None:
    data = json.loads(made(name).to_json())
    assert data
    assert isinstance(data, dict)


@pytest.mark.parametrize("name", MAKERS)
def test_a_result_is_read_from_its_file(name: str, tmp_path: pathlib.Path) -> None:
    result, path = made(name), tmp_path / "result.json"
    result.save(path)
    loaded = xform.load(path)
    assert type(loaded) is type(result)
    assert repr(loaded) == repr(result)
    without_times = {"seconds": 0.0, "compile_seconds": 0.0} if name in ("Plan", "StepPlan") else {}
    expected = dataclasses.replace(result, **without_times)
    assert str(loaded) == str(expected)
    assert loaded.to_json() == expected.to_json()
    assert re.sub(UNIQUE, "", loaded._repr_html_()) == re.sub(UNIQUE, "", expected._repr_html_())
    if name != "HealthHistory":  # its load reads the file of a stream
        assert str(type(result).load(path)) == str(expected)
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", MAKERS)
def test_a_notebook_shows_the_text_and_the_picture(name: str) -> None:
    result = made(name)
    page = xml.fromstring(f"<div>{result._repr_html_()}</div>")
    assert "".join(page[0].itertext()) == str(result)
    assert "overflow-x: auto" in page[0].get("style")
    pictures = page.findall(".//{http://www.w3.org/2000/svg}svg")
    assert len(pictures) == hasattr(result, "plot")


def test_long_lines_of_prose_are_broken_and_tables_are_not() -> None:
    class Long(Result):
        def __str__(self) -> str:
            lines = f"- {'word ' * 20}\n  remedy:  {'word ' * 20}\nname:  {'x' * 60}  {'x' * 20}"
            return f"name    {'x' * 80}\n{lines}\nshort"

    page = xml.fromstring(Long()._repr_html_())
    assert [span.text for span in page] == [f"- {'word ' * 20}", f"  remedy:  {'word ' * 20}"]
    assert page[0].get("style") == "white-space: pre-wrap"


def test_without_matplotlib_the_text_alone_is_shown() -> None:
    class Drawn(Result):
        def __str__(self) -> str:
            return "a < b\nsecond line"

        def plot(self, path: Any) -> None:
            raise MissingExtra("plot", "matplotlib is not installed", "", "install it")

    assert Drawn()._repr_html_().endswith(">a &lt; b\nsecond line</pre>")
    assert repr(Drawn()) == "<Drawn: a < b>"


def test_data_that_json_lacks() -> None:
    class Mixed(Result):
        def to_dict(self) -> dict[str, Any]:
            return {"nan": float("nan"), "array": np.arange(3), "jax": jnp.ones(2), 1: (True, None),
                    "number": np.float32(0.5), "place": pathlib.Path("a.py")}  # fmt: skip

    data = json.loads(Mixed().to_json())
    assert data == {"nan": None, "array": [0, 1, 2], "jax": [1.0, 1.0], "1": [True, None],
                    "number": 0.5, "place": "a.py"}  # fmt: skip


@pytest.mark.parametrize(("made", "text"), [
    (lambda: xform.vjp(loss, jnp.ones((4, 4)), jnp.ones((2, 4)))[1],
     "<pullback of loss: f32[] -> (f32[4,4], f32[2,4])>"),
    (lambda: xform.linearize(jnp.sin, jnp.ones(3))[1], "<pushforward of sin: f32[3] -> f32[3]>"),
    (lambda: xform.vjp(lambda xs: sum(xs), [1.0] * 7)[1],
     "<pullback of <lambda>: f32[] -> (7 arrays)>"),
])  # fmt: skip
def test_a_linear_map_shows_its_types(made: Any, text: str) -> None:
    assert repr(made()) == text
