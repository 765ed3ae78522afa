"""Health of layers during training: no cost when off, and a file of readings when on."""

import dataclasses
import io
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from models.errors import InputError
from models.settings import replaced
from models.train.display import Output
from models.train.health import diagnosis
from models.train.log import read_records
from models.train.loop import train
from models.train.start import Resume
from models.train.state import abstract_state, init_state
from models.train.step import make_step
from tests.models.micro import MODEL, OPTIM, losses, run
from xform.diagnosis import HealthHistory


def test_off_the_compiled_program_is_the_same(tmp_path: Path) -> None:
    """The StableHLO is the same; a run without health has one program, and no file."""
    one = run(tmp_path)
    args = abstract_state(MODEL, OPTIM), one.batch_type()
    plain = jax.jit(make_step(MODEL, OPTIM)).lower(*args).as_text()
    off = jax.jit(make_step(MODEL, OPTIM, health=None)).lower(*args).as_text()
    on = jax.jit(make_step(MODEL, OPTIM, health=diagnosis(one))).lower(*args).as_text()
    assert plain == off
    assert plain != on


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_reads_layers_updates_as_any_other(tmp_path: Path, accumulate: int) -> None:
    one = run(tmp_path, accumulate=accumulate)
    tokens = np.random.default_rng(0).integers(0, 99, one.batch_type().shape).astype(np.uint8)
    state = init_state(MODEL, OPTIM, 0)
    plain, metrics = jax.jit(make_step(MODEL, OPTIM))(state, tokens)
    of = diagnosis(one)
    same, more = jax.jit(make_step(MODEL, OPTIM, health=of))(state, tokens)
    read = more.pop("health")
    for a, b in zip(jax.tree.leaves((plain, metrics)), jax.tree.leaves((same, more)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)
    rows = of.with_verdicts(jax.device_get(read))
    assert {row.verdict for row in rows} == {"fine"}
    assert sum(row.kind == "layer" for row in rows) == 2 + 6 * MODEL.depth


def test_a_run_writes_its_health(tmp_path: Path) -> None:
    one = run(tmp_path, health_every=5)
    console = Output(quiet=True)
    train(dataclasses.replace(one, optim=dataclasses.replace(OPTIM, steps=6)), console)
    records = read_records(one.out / "health.jsonl")
    assert [r["step"] for r in records] == [5]
    row = records[0]["rows"][0]
    assert row["layer"] == "embed.embedding"
    assert "verdict" not in row
    assert row["update_to_weight"] > 0
    logged = [r for r in read_records(one.out / "log.jsonl") if "health" in r]
    assert [(r["step"], r["health"]) for r in logged] == [(5, [])]
    assert len([r for r in losses(one.out) if r[1] is not None]) == 6
    assert json.loads((one.out / "health.jsonl").read_text().splitlines()[0])["step"] == 5


def test_a_resumed_run_has_the_same_file(tmp_path: Path) -> None:
    quiet = Output(quiet=True)
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    base = run(tmp_path / "whole", health_every=3, save_every=5)
    train(base, quiet)
    parts = run(tmp_path / "parts", health_every=3, save_every=5)
    train(dataclasses.replace(parts, max_seconds=0), quiet)
    train(parts, quiet, Resume())
    whole, resumed = ((one.out / "health.jsonl").read_text() for one in (base, parts))
    assert [json.loads(line)["step"] for line in whole.splitlines()] == [3, 6, 9, 12]
    assert resumed == whole


def test_an_alert_is_shown_and_logged_once(tmp_path: Path) -> None:
    optim = dataclasses.replace(OPTIM, learning_rate=3.0, warmup_steps=0)
    one = run(tmp_path, health_every=2, optim=optim)
    console = Output(record=True, file=io.StringIO(), width=500)
    train(one, console)
    logged = [alert for r in read_records(one.out / "log.jsonl") for alert in r.get("health", [])]
    assert "large update" in {alert["cause"] for alert in logged}
    places = [(alert["cause"], place) for alert in logged for place in alert["places"]]
    assert len(places) == len(set(places))
    shown = [s for s in console.export_text().splitlines() if s.startswith("health: step")]
    assert len(shown) == len(logged)
    history = HealthHistory.load(one.out / "health.jsonl")
    assert [alert.cause for alert in history.alerts] == [alert["cause"] for alert in logged]


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_on_a_mesh_the_numbers_are_those_of_one_device(tmp_path: Path) -> None:
    rows = []
    for mesh in ("", "data=2,fsdp=2"):
        folder = tmp_path / (mesh or "one")
        folder.mkdir()
        one = run(folder, health_every=6, mesh=mesh)
        train(one, Output(quiet=True))
        rows.append(HealthHistory.load(one.out / "health.jsonl").layers)
    for one, spread in zip(*rows, strict=True):
        assert (one.name, one.where) == (spread.name, spread.where)
        for name in ("activation", "gradient", "update_to_weight"):
            np.testing.assert_allclose(spread.numbers.get(name, ()), one.numbers.get(name, ()),
                                       rtol=2e-2)  # fmt: skip


def test_how_often_is_no_negative_number(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--health-every is -1"):
        replaced(run(tmp_path), {"health_every": -1}, by_flag=True)
