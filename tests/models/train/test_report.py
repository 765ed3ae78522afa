"""The reports of a run: perplexity, utilization, memory, TensorBoard events, a trace."""

import io
import math
import re
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import pytest
from rich.console import Console

import xform
from models.errors import InputError
from models.train import report
from models.train.log import read_records
from models.train.loop import Outcome, train
from models.train.optim import OptimConfig
from models.train.profile import steps_of
from models.train.start import Resume
from models.train.step import compile_step
from tests.models.micro import MODEL, OPTIM, run

SHORT = OptimConfig(steps=3)


def quiet(config: Any, wish: Resume | None = None) -> Outcome:
    return train(config, Console(file=io.StringIO()), wish)


def test_perplexity_is_of_tokens_and_utilization_of_known_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "flops_per_second", lambda: 1e12)
    monkeypatch.setattr(report, "peak_bytes", lambda: 2**20)
    quiet(run(tmp_path, optim=SHORT))
    records = read_records(tmp_path / "run" / "log.jsonl")
    for record in records:
        if "loss" in record:
            flops = record["mfu"] * 1e12 * record["seconds"]
            # Six for each parameter and token; position embeddings have no products.
            tokens = 4 * MODEL.context
            assert flops == pytest.approx(6 * 33_000 * tokens, rel=0.2)
            assert record["peak_bytes"] == 2**20
            assert record["peak_to_plan"] > 0
        else:  # a token is a byte
            bits = math.log2(record["validation_perplexity"])
            assert bits == pytest.approx(record["validation_bits_per_byte"], rel=1e-9)


class Writer:
    """Like `tensorboardX.SummaryWriter`, but it only records."""

    made: ClassVar[list["Writer"]] = []

    def __init__(self, folder: str, purge_step: int) -> None:
        self.folder, self.purge_step = folder, purge_step
        self.scalars: list[tuple[str, float, int]] = []
        self.texts: list[tuple[str, str, int]] = []
        self.closed = False
        self.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def add_text(self, name: str, text: str, step: int) -> None:
        self.texts.append((name, text, step))

    def close(self) -> None:
        self.closed = True


def test_events_are_the_numbers_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "tensorboardX", library)
    quiet(run(tmp_path, optim=SHORT, tensorboard=True, max_seconds=0))
    quiet(run(tmp_path, optim=SHORT, tensorboard=True), Resume())
    first, second = Writer.made
    assert first.folder == str(tmp_path / "run" / "tensorboard")
    assert (first.purge_step, second.purge_step) == (0, 2)
    assert first.closed
    logged = [
        (name, value, record["step"])
        for record in read_records(tmp_path / "run" / "log.jsonl")
        for name, value in record.items()
        if name != "step"
    ]
    assert first.scalars + second.scalars == logged


def test_health_values_are_written_to_tensorboard_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[Writer]()
    monkeypatch.setattr(Writer, "made", made)
    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=Writer))
    quiet(run(tmp_path, optim=SHORT, tensorboard=True, health_every=2))
    names = {name for name, _, step in made[0].scalars if step == 2}
    assert "loss" in names
    assert "health/activation/embed.embedding" in names


def test_events_without_the_package_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(InputError, match=r'install "jax-xform\[tensorboard\]"'):
        quiet(run(tmp_path, tensorboard=True))
    assert not (tmp_path / "run").exists()


def test_steps_are_traced(tmp_path: Path) -> None:
    quiet(run(tmp_path, optim=SHORT, profile_steps="2:4"))
    (trace,) = (tmp_path / "run" / "profile").rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(trace))
    names = [event for plane in data.planes for line in plane.lines for event in line.events]
    # Their numbers are in `stats`, which Python 3.13's jaxlib 0.12 aborts at.
    assert [event.name for event in names].count("step") == 2


def test_operations_name_their_part_of_a_step() -> None:
    tokens = jax.ShapeDtypeStruct((1, 4, MODEL.context + 1), np.uint8)
    text = compile_step(MODEL, OPTIM, tokens, xform.policies.save_nothing).as_text()
    names = [name.split("/") for name in re.findall(r'op_name="([^"]*)"', text)]
    for part in ("forward", "xform(backward)", "xform(recompute)", "update"):
        assert any(part in name for name in names), part
    again = [name for name in names if "xform(recompute)" in name]
    assert all("xform(backward)" in name[: name.index("xform(recompute)")] for name in again)


@pytest.mark.parametrize("text", ["3", "3:3", "0:2", "a:b", "5:2"])
def test_steps_that_are_none_are_one_line(text: str, tmp_path: Path) -> None:
    assert steps_of("") == range(0)
    with pytest.raises(InputError, match=f"--profile-steps {text}: give two steps"):
        quiet(run(tmp_path, profile_steps=text))
    assert not (tmp_path / "run").exists()
