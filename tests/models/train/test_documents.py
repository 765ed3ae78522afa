"""Training on documents in tokens: packed, mixed, and taken up in mid-epoch bit for bit."""

import dataclasses
import io
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from models.data.documents import documents
from models.errors import InputError
from models.nets.presets import build
from models.settings import parse_toml
from models.train.loop import Outcome, train
from models.train.start import Resume
from models.train.step import make_loss
from tests.models.micro import MODEL, losses, run

WORDS = ["sum", "of", "a", "gradient", "is", "the", "plan", "memory", "cut", "loop"]


def texts(folder: Path, name: str, count: int) -> str:
    path = folder / f"{name}.jsonl"
    rng = np.random.default_rng(len(name))
    lines = [{"text": " ".join(rng.choice(WORDS, rng.integers(3, 30)))} for _ in range(count)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def config(folder: Path, **changes: Any) -> Any:
    data = f"{texts(folder, 'one', 60)}=3", f"{texts(folder, 'three', 40)}=1"
    model = dataclasses.replace(MODEL, vocab=300)
    return run(folder, data=data, tokenizer="bpe:300", model=model, **changes)


def quiet(config: Any, wish: Resume | None = None) -> Outcome:
    return train(config, Console(file=io.StringIO()), wish)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    quiet(config(folder))
    return folder


def test_training_lowers_and_logs_bits_per_byte(whole: Path) -> None:
    records = losses(whole / "run")
    bits = [bits for *_, bits in records if bits is not None]
    nats = [loss for _, loss, _ in records if loss is not None]
    assert bits[-1] < bits[0]
    # A token is several bytes: of each there are fewer bits than of a token.
    assert bits[0] < 0.7 * nats[0] / np.log(2)
    assert (whole / "run/tokenizer.json").exists()


def test_stopped_run_resumes_with_bitwise_equal_losses(whole: Path, tmp_path: Path) -> None:
    assert quiet(config(tmp_path, max_seconds=0)).step == 1
    # What was prepared stays: the text itself may go.
    for path in tmp_path.glob("*.jsonl"):
        path.write_text("")
    resumed = quiet(config(tmp_path), Resume())
    assert resumed.step == 12
    records = losses(tmp_path / "run")
    assert records.pop(2)[2] is not None  # the validation where it stopped
    assert records == losses(whole / "run")


def test_another_text_or_share_is_another_run(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "run", tmp_path / "run")
    same = config(tmp_path)
    one, three = same.data
    for data in ((one, three.replace("=1", "=2")), (three, one)):
        other = dataclasses.replace(same, data=data)
        with pytest.raises(InputError, match=r"is of another run: data \w+ is now \w+"):
            quiet(other, Resume())


def test_vocabulary_smaller_than_the_tokenizer_raises_and_names_vocab(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"of 2\d\d tokens, but the model has 256: use --vocab 2"):
        quiet(dataclasses.replace(config(tmp_path), tokenizer="bpe:290", model=MODEL))


def test_a_list_in_toml(whole: Path) -> None:
    said = parse_toml((whole / "run/config.toml").read_text(), "there")
    assert [Path(data).name for data in said["data"]] == ["one.jsonl=3", "three.jsonl=1"]
    assert len(list(documents(Path(said["data"][0].removesuffix("=3"))))) == 60


def test_a_row_of_two_documents_has_the_loss_of_both() -> None:
    """By the loss of plain rows, which hold one document each."""
    params = nnx.state(build(MODEL))
    judge = make_loss(MODEL, training=False)
    loss = jax.jit(lambda params, rows: judge(params, nnx.State({}), rows)[0])
    rows = np.random.default_rng(0).integers(0, 256, (2, 8), dtype=np.uint8)
    packed = rows.reshape(1, 16).astype(np.int32)
    packed[:, 8] = ~packed[:, 8]
    np.testing.assert_allclose(loss(params, packed), loss(params, rows), rtol=1e-6)
    joined = loss(params, rows.reshape(1, 16))
    assert abs(float(joined) - float(loss(params, packed))) > 1e-4


def test_a_mesh_of_devices_has_the_same_losses(whole: Path, tmp_path: Path) -> None:
    quiet(config(tmp_path, mesh="data=2,fsdp=2,tensor=2"))
    found, expected = losses(tmp_path / "run"), losses(whole / "run")
    assert [r[0] for r in found] == [r[0] for r in expected]
    numbers = [[x for _, *pair in records for x in pair if x] for records in (found, expected)]
    np.testing.assert_allclose(*numbers, atol=1e-5, rtol=0)
