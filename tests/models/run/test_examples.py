"""The commands on pictures and series: what works, and what is refused in one line."""

from pathlib import Path

import jax
import numpy as np
import pytest

from models.__main__ import main
from models.nets import exported
from models.run.trained import load_run
from tests.models.examples import MODELS, data
from tests.models.nets.sizes import drawn


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_pictures_are_trained_and_written_for_jax(capsys: pytest.CaptureFixture[str]) -> None:
    path = data(Path(), MODELS["resnet"])
    sizes = [
        "--stem-channels",
        "4",
        "--stage-channels",
        "4,8",
        "--stage-blocks",
        "1",
        "--stage-blocks",
        "1",
        "--batch",
        "8",
    ]
    flags = [
        *sizes,
        "--steps",
        "2",
        "--validation-share",
        "0.2",
        "--out",
        "run",
        "--data",
        str(path),
    ]
    assert main(["train", "--preset", "resnet20", *flags]) == 0
    assert "8 pictures per step" in capsys.readouterr().out
    assert main(["train", "--out", "run", "--resume"]) == 0
    assert main(["export", "--run", "run", "--to", "ours", "--format", "jax"]) == 0
    run, model = load_run(Path("run"))
    images = np.random.default_rng(0).integers(0, 256, (3, *run.reads().shape), np.uint8)
    model.eval()
    expected = jax.jit(lambda x: model(x / np.float32(127.5) - 1))(images)
    said = exported.load(Path("ours"))
    np.testing.assert_allclose(said(images), expected, rtol=1e-5, atol=1e-6)
    # Of each picture by itself: by running statistics, and not by those of the batch.
    np.testing.assert_allclose(said(images[:1]), expected[:1], rtol=1e-5, atol=1e-6)
    capsys.readouterr()
    for arguments, complaint in (
        (["generate", "--run", "run"], "generate needs a model of text, but the run in run is on"),
        (["export", "--run", "run", "--to", "x"], "--format huggingface needs a model of text"),
    ):
        assert main(arguments) == 2
        said_ = capsys.readouterr().err
        assert complaint in said_
        assert said_.count("\n") == 1


def test_settings_and_data_of_another_model_kind_are_one_line_errors(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("tiny.toml").write_text('preset = "tiny"\n')
    Path("flat.toml").write_text("model = 3\n")
    for arguments, complaint in (
        (
            ["--preset", "resnet20", "--tokenizer", "bytes"],
            "--tokenizer is no setting of resnet20: use a preset such as tiny or tiny-llama",
        ),
        (
            ["--preset", "lstm", "--context", "8"],
            "no setting of lstm: use a preset such as tiny",
        ),
        (
            ["--preset", "gru", "--config", "tiny.toml"],
            "--preset is gru, but tiny.toml has the preset tiny",
        ),
        (["--config", "flat.toml"], "flat.toml has model, which is not a setting"),
        (["--augment"], "--augment is no setting of tiny: use a preset such as resnet"),
        (
            ["--mlp-width", "8"],
            "no setting of tiny: use a preset such as tiny-llama",
        ),
        (["--preset", "gru", "--data", "none.npy"], "no such file or folder: none.npy"),
        (["--preset", "vit-s", "--resize", "30,30"], "patch_size 16 does not divide image_size 30"),
        (["--preset", "unet", "--resize", "30,30", "--dry-run"], "needs multiples of 16"),
    ):
        assert main(["train", *arguments]) == 2
        said = capsys.readouterr().err
        assert complaint in said
        assert said.count("\n") == 1
    assert not Path("runs").exists()


def test_series_are_weighed_and_statistics_stay_float32(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--window", "4", "--batch", "2", "--width", "8", "--dry-run"]
    assert main(["train", "--preset", "gru", *flags]) == 0
    assert "2 x 4 moments per step" in capsys.readouterr().out
    model = drawn(MODELS["unet"])
    reads = jax.ShapeDtypeStruct((8, 8, 3), np.uint8)
    exported.save(model, Path("there"), "bfloat16", (), reads)
    kept = exported.load_file("there/params.safetensors")
    assert {x.dtype.name for name, x in kept.items() if name.split(".")[-1] in ("mean", "var")} == {
        "float32"
    }
    assert kept["head.kernel"].dtype == "bfloat16"
