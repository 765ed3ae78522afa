"""Runs on text, pictures and series: their settings, sizes that are the data's, and learning."""

import dataclasses
import io
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from rich.console import Console

from models.data.batches import Share
from models.errors import InputError
from models.nets.presets import TRAINED
from models.settings import replaced, to_toml
from models.train.config import RunConfig
from models.train.kinds import every_setting, of_model, of_preset, read_config
from models.train.log import read_records
from models.train.loop import train
from models.train.planned import plan_step, policy_of
from models.train.start import Resume
from tests.models.data.test_batches import Numbers
from tests.models.examples import CLASSES, FEATURES, MODELS, OPTIM, SIDE, WINDOW, quiet, run

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [
        "resnet",
        "lstm",
        *[pytest.param(name, marks=SLOW) for name in ("vit", "unet", "gru", "ode")],
    ],
)
def test_each_model_kind_lowers_its_loss_and_resumes(name: str, tmp_path: Path) -> None:
    optim = dataclasses.replace(OPTIM, steps=16)
    config = run(tmp_path, MODELS[name], optim=optim, validate_every=100, save_every=100)
    shown = io.StringIO()
    train(dataclasses.replace(config, max_seconds=0), Console(file=shown))
    assert quiet(config, Resume()).step == 16
    records = read_records(config.out / "log.jsonl")
    found = [r["loss"] for r in records if "loss" in r]
    assert np.mean(found[-4:]) < 0.9 * np.mean(found[:4])
    assert f"{config.unit}_per_second" in records[1]
    assert ("validation_accuracy" in records[0]) == ("image" in str(config.batch_type()))
    assert "step 0: validation loss" in shown.getvalue()
    assert read_config((config.out / "config.toml").read_text(), "it").model == config.model


@pytest.mark.parametrize("batch", [1, 100])
def test_batches_of_one_and_of_more_than_there_is(batch: int, tmp_path: Path) -> None:
    """Of 32 pictures, each is as often in what is read as any other, but for the last time."""
    optim = dataclasses.replace(OPTIM, steps=2)
    config = run(tmp_path, batch=batch, optim=optim)
    assert quiet(config).step == 2
    data = config.load()
    data = dataclasses.replace(data, parts={**data.parts, "train": Numbers(32)})
    iterator = config.batches(data, Share(), None)
    taken = np.concatenate([next(iterator)["y"].ravel() for _ in range(96 // batch + 1)])
    counts = np.bincount(taken)
    assert (len(counts), counts.max() - counts.min()) == (32, 1)


def test_there_is_a_run_of_each_preset() -> None:
    assert {run_.on for run_ in every_setting()} == {"text", "pictures", "series"}
    for preset in TRAINED:
        one: Any = of_preset(preset)
        assert read_config(to_toml(one), "it") == one
        assert type(of_model(one.model)) is type(one)


def fitted(folder: Path, model: str, preset: str, **given: Any) -> Any:
    path = run(folder, MODELS[model]).data
    base = replaced(of_preset(preset), {"data": path, "out": str(folder / "run"), **given})
    return base.fit_to_data({"data", "out", *given})


def test_sizes_are_those_of_the_data(tmp_path: Path) -> None:
    resnet = fitted(tmp_path, "resnet", "resnet20")
    assert (resnet.model.classes, resnet.model.channels, resnet.resize) == (
        CLASSES,
        3,
        (SIDE, SIDE),
    )
    assert fitted(tmp_path, "resnet", "resnet20", classes=7).model.classes == 7
    vit = fitted(tmp_path, "resnet", "tiny-vit")
    assert (vit.model.image_size, vit.model.patch_size, vit.resize) == (SIDE, 4, (SIDE, SIDE))
    assert fitted(tmp_path, "unet", "tiny-unet").model.classes == CLASSES
    assert fitted(tmp_path, "lstm", "lstm", window=WINDOW).model.features == FEATURES
    assert fitted(tmp_path, "lstm", "ode", window=WINDOW).model.width == FEATURES
    made = replaced(of_preset("tiny-vit"), {"resize": "16,16"}).fit_to_data({"resize"})
    assert (made.model.image_size, made.resize) == (16, (16, 16))


def test_image_sizes_that_differ_from_the_data_raise(tmp_path: Path) -> None:
    """A size is asked for, and arrays have another: that is said before anything is weighed."""
    with pytest.raises(InputError, match=r"for train are uint8 \[8, 8, 3\] .* \[4, 4, 3\]"):
        fitted(tmp_path, "resnet", "resnet20", resize="4,4")
    with pytest.raises(InputError, match="pictures are 8 x 8, but the model reads 4 x 4"):
        fitted(tmp_path, "resnet", "tiny-vit", image_size=4)


def test_each_part_is_of_the_form_that_the_model_takes(tmp_path: Path) -> None:
    """A network of convolutions would take pictures of any size in silence."""
    config = run(tmp_path)
    (folder,) = map(Path, config.data)
    for part, cut in (("train", 8), ("val", 6)):
        (folder / part).mkdir()
        for name in ("images", "labels"):
            array = np.load(folder / f"{name}.npy")
            array = array[:, :cut] if name == "images" else array
            np.save(folder / part / f"{name}.npy", array)
    with pytest.raises(InputError, match=r"for validation are uint8 \[6, 8, 3\]"):
        config.load()


def widened(config: RunConfig, **changes: Any) -> RunConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))


REFUSED: dict[str, tuple[str, Any, str]] = {
    "classes": (
        "resnet", lambda c: widened(c, classes=2), "has 3 classes, but the model has 2: use",
    ),
    "side": (
        "resnet", lambda c: dataclasses.replace(c, resize=(4, 8)),
        r"are uint8 \[8, 8, 3\] and int32 \[\], but the model reads uint8 \[4, 8, 3\]",
    ),
    "masks": (
        "unet", lambda c: dataclasses.replace(c, model=MODELS["resnet"]),
        r"int32 \[8, 8\], but the model reads .* int32 \[\]",
    ),
    "square": (
        "vit", lambda c: dataclasses.replace(c, resize=(4, 8)), "pictures are 4 x 8, but the model",
    ),
    "levels": (
        "unet", lambda c: widened(c, level_channels=(1,) * 5),
        "levels needs multiples of 16: change",
    ),
    "several": (
        "lstm", lambda c: dataclasses.replace(c, data=("a", "b")), "2 times: give one path of",
    ),
    "inside": (
        "resnet", lambda c: dataclasses.replace(c, out=Path(c.data[0]) / "x"), "is inside --data",
    ),
    "features": (
        "gru", lambda c: widened(c, features=5),
        r"series of .* are float32 \[13, 2\], but the model reads float32 \[13, 5\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_data_of_another_form_is_one_line(case: str, tmp_path: Path) -> None:
    name, change, complaint = REFUSED[case]
    with pytest.raises(InputError, match=complaint) as raised:
        change(run(tmp_path, MODELS[name])).load()
    assert "\n" not in str(raised.value)


def test_settings_that_cannot_be_are_one_line() -> None:
    for preset, given, complaint in (
        ("resnet20", {"resize": "32"}, "must be a height and a width"),
        ("resnet20", {"resize": "32,x"}, "must be integers"),
        ("resnet20", {"resize": "32,0"}, "must be at least 1"),
        ("resnet20", {"stage_channels": [16, 32]}, "must have one entry per stage"),
        ("resnet20", {"classes": 1}, "must be at least 2"),
        ("tiny-vit", {"patch_size": 5}, "patch_size 5 does not divide image_size 32"),
        ("lstm", {"output_layer": False}, "give --output-layer"),
        ("resnet50", {"stage_channels": "6,8,8,8"}, "must be multiples of 4"),
        ("resnet20", {"stage_channels": "8,16,32"}, "no stage may be narrower"),
    ):
        with pytest.raises(InputError, match=complaint):
            replaced(of_preset(preset), given)


def test_a_budget_is_of_any_step(tmp_path: Path) -> None:
    config = run(tmp_path, MODELS["gru"], batch=64)
    usual = plan_step(config, policy_of("min_cut"))
    planned = plan_step(config, policy_of(f"budget:{usual.total_bytes}"))
    assert planned.plan.compiled_bytes == planned.total_bytes <= usual.total_bytes
    with pytest.raises(InputError, match=r"or lower --batch or --window$"):
        plan_step(config, policy_of("budget:1KiB"))


AUGMENTED: dict[str, Any] = {name: {"augment": True} for name in ("resnet", "unet")}


class Counted:
    """A source that notes which elements are read."""

    def __init__(self, source: Any) -> None:
        self._source, self.read = source, list[int]()

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self._source[index]


@pytest.mark.parametrize("name", ["resnet", "unet", "gru"])
def test_a_process_reads_no_more_than_its_share(name: str, tmp_path: Path) -> None:
    """Elements are read by number, so that what another process takes is never looked at."""
    config = run(tmp_path, MODELS[name], accumulate=2, **AUGMENTED.get(name, {}))
    data, steps, reads = config.load(), 5, []
    for share in (Share(), Share(0, 2), Share(1, 2)):
        counted = Counted(data.parts["train"])
        own = dataclasses.replace(data, parts={**data.parts, "train": counted})
        iterator = config.batches(own, share, None)
        taken = [next(iterator) for _ in range(steps)]
        count = steps * config.accumulate * config.batch // share.processes
        reads.append((taken, counted.read[:count]))
    (whole, every), *halves = reads
    several = np.reshape(every, (steps, config.accumulate, 2, -1))
    for number, (taken, read) in enumerate(halves):
        np.testing.assert_array_equal(several[:, :, number].ravel(), read)
        place = slice(number * config.batch // 2, (number + 1) * config.batch // 2)
        chex.assert_trees_all_equal(taken, jax.tree.map(lambda x, at=place: x[:, at], whole))


def test_health_is_of_all_layers_of_a_network_with_norms(tmp_path: Path) -> None:
    optim = dataclasses.replace(OPTIM, steps=1)
    quiet(run(tmp_path, optim=optim, health_every=1, validate_every=100))
    (record,) = read_records(tmp_path / "run" / "health.jsonl")
    rows = [row for row in record["rows"] if row["kind"] == "layer"]
    # The stem, two blocks of two convolutions, and the head.
    assert len(rows) == 6
    assert all(row["gradient"] > 0 and row["update_to_weight"] > 0 for row in rows)
