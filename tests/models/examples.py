"""Small runs on images and on time series, for the tests of this folder."""

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from models.data.synthetic import SyntheticMasks, SyntheticPictures, SyntheticSeries
from models.nets.ode import ODEConfig
from models.nets.recurrent import RecurrentConfig
from models.nets.resnet import ResNetConfig
from models.nets.unet import UNetConfig
from models.nets.vit import ViTConfig
from models.train.config import RunConfig
from models.train.kinds import of_model
from models.train.loop import Outcome, train
from models.train.optim import OptimConfig
from models.train.start import Resume

SIDE, CLASSES, FEATURES, WINDOW = 8, 3, 2, 12
RESNET = ResNetConfig(4, (4, 8), (1, 1), CLASSES, bottleneck=False, small_pictures=True)
MODELS: dict[str, Any] = {
    "resnet": RESNET,
    "vit": ViTConfig(SIDE, 4, 16, 2, 2, 32, CLASSES),
    "unet": UNetConfig(3, (4, 6), CLASSES),
    "lstm": RecurrentConfig("lstm", FEATURES, 8, output_layer=True),
    "gru": RecurrentConfig("gru", FEATURES, 8, output_layer=True),
    "ode": ODEConfig(FEATURES, 8, 3),
}
OPTIM = OptimConfig(steps=6, warmup_steps=2, learning_rate=1e-2)


def data(folder: Path, model: Any) -> Path:
    """Write forty images or ten series to disk, for a model."""
    if isinstance(model, RecurrentConfig | ODEConfig):
        path = folder / "series.npy"
        made = SyntheticSeries(0, 10, 61, FEATURES)
        np.save(path, np.stack([made[i] for i in range(10)]))
        return path
    path = folder / "pictures"
    path.mkdir(exist_ok=True)
    kind = SyntheticMasks if isinstance(model, UNetConfig) else SyntheticPictures
    pictures = [kind(0, 40, SIDE, SIDE, CLASSES)[i] for i in range(40)]
    for name in ("image", "label"):
        np.save(path / f"{name}s.npy", np.stack([picture[name] for picture in pictures]))
    return path


def run(folder: Path, model: Any = RESNET, **changes: Any) -> RunConfig:
    """Return a run of six steps in `folder`, on data that is written there."""
    base: dict[str, Any] = {"optim": OPTIM, "out": folder / "run", "batch": 8}
    base |= {"data": (str(data(folder, model)),), "validate_every": 3, "save_every": 2}
    one: Any = of_model(model)
    known = {field.name for field in dataclasses.fields(one)}
    if "resize" in known:
        base["resize"] = (SIDE, SIDE)
    if "window" in known:
        base["window"] = WINDOW
    return dataclasses.replace(
        one, **(base | {"validation_examples": 8, "validation_share": 0.2} | changes)
    )


def quiet(config: RunConfig, wish: Resume | None = None) -> Outcome:
    """Train without output."""
    return train(config, Console(file=io.StringIO()), wish)


def batches(config: RunConfig, steps: int) -> list[Any]:
    """Return random batches of a run."""
    rng = np.random.default_rng(0)

    def draw(x: Any) -> np.ndarray:
        if x.dtype == np.float32:
            return rng.normal(size=x.shape).astype(np.float32)
        return rng.integers(0, 256 if x.dtype == np.uint8 else CLASSES, x.shape).astype(x.dtype)

    types: Any = config.batch_type()
    if isinstance(types, dict):
        return [{name: draw(x) for name, x in types.items()} for _ in range(steps)]
    return [draw(types) for _ in range(steps)]
