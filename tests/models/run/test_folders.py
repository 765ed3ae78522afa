"""Models of other people's folders: trained from, and written back."""

from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from flax import nnx

from models.__main__ import main
from models.nets import exported
from models.nets.huggingface import load, save
from models.run.trained import load_run
from models.train.log import read_records
from tests.models.micro import FLAGS, TEXT
from tests.models.nets.sizes import DECODERS, drawn, tokens


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_bytes(bytes(x % 61 for x in TEXT))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("text")
@pytest.mark.parametrize("kind", ["gpt2", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_a_folder_is_trained_and_written_back(kind: str) -> None:
    model = drawn(DECODERS[kind])
    save(model, "theirs")
    flags = ["--data", "text", "--batch", "2", "--validation-examples", "2", "--out", "run"]
    assert (
        main(
            ["train", "--from-huggingface", "theirs", "--steps", "1", "--max-seconds", "0", *flags]
        )
        == 0
    )
    assert main(["export", "--run", "run", "--to", "ours"]) == 0
    back = load("ours")
    _, model_of_run = load_run(Path("run"))
    assert back.config == model_of_run.config
    chex.assert_trees_all_equal(nnx.state(back), nnx.state(model_of_run))
    assert not np.array_equal(back(tokens()), model(tokens()))
    first = read_records(Path("run/log.jsonl"))[0]
    assert first["from"] == "theirs"


@pytest.mark.usefixtures("text")
def test_a_run_is_written_for_jax_alone(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*FLAGS, "--data", "text", "--steps", "1", "--ema-decay", "0.5", "--out", "run"]
    assert main(["train", *flags]) == 0
    given = ["export", "--run", "run", "--to", "ours", "--format", "jax"]
    assert main(given) == 0
    rows = np.zeros((3, 16), np.int32)
    _, model = load_run(Path("run"))
    expected = jax.jit(lambda tokens: model(tokens))(rows)
    np.testing.assert_array_equal(exported.load(Path("ours"))(rows), expected)
    capsys.readouterr()
    assert main(given) == 2
    assert "ours exists: name a new folder" in capsys.readouterr().err


@pytest.mark.usefixtures("text")
def test_invalid_huggingface_training_or_export_is_a_one_line_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    save(drawn(DECODERS["gpt2"]), "theirs")
    for arguments, complaint in (
        (["train", "--from-huggingface", "none"], "cannot read none"),
        (
            ["train", "--from-huggingface", "theirs", "--preset", "tiny"],
            "leave out --preset, --resume",
        ),
        (
            ["train", "--from-huggingface", "theirs", "--data", "text", "--width", "64"],
            "make another model",
        ),
        (["export", "--run", "theirs"], "no checkpoints in theirs"),
    ):
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert complaint in said
        assert said.count("\n") == 1
