"""The kinds of runs: which models are trained on what, by preset, by model and from a file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from models.errors import InputError
from models.nets.gpt2 import GPT2Config
from models.nets.llama import LlamaConfig
from models.nets.ode import ODEConfig
from models.nets.presets import TRAINED
from models.nets.recurrent import RecurrentConfig
from models.nets.resnet import ResNetConfig
from models.nets.unet import UNetConfig
from models.nets.vit import ViTConfig
from models.settings import from_toml, leaves, nearest, parse_toml
from models.train.config import RunConfig
from models.train.pictures import PictureRun
from models.train.series import SeriesRun
from models.train.text import TextRun

KINDS: dict[type[Any], type[RunConfig]] = {
    GPT2Config: TextRun,
    LlamaConfig: TextRun,
    ResNetConfig: PictureRun,
    ViTConfig: PictureRun,
    UNetConfig: PictureRun,
    RecurrentConfig: SeriesRun,
    ODEConfig: SeriesRun,
}


def of_preset(name: Any) -> RunConfig:
    """A run of a preset, with the defaults of all else."""
    if name not in TRAINED:
        raise InputError(f"there is no preset {name!r}{nearest(str(name), TRAINED)}")
    return KINDS[type(TRAINED[name])](model=TRAINED[name], preset=name)


def of_model(model: Any) -> RunConfig:
    """A run of a model of any size; its preset is the smallest of its kind."""
    kinds = {type(config): name for name, config in reversed(TRAINED.items())}
    return KINDS[type(model)](model=model, preset=kinds[type(model)])


def every_setting() -> list[RunConfig]:
    """A run of each kind of model: among them they have all settings that there are."""
    first = {type(config): name for name, config in reversed(TRAINED.items())}
    return [of_preset(first[kind]) for kind in KINDS]


def refuse_others(run: RunConfig, names: Collection[str]) -> None:
    """Refuse settings that only runs on something else have.

    Raises:
      InputError: there is one among `names`.
    """
    known = {leaf.name for leaf in leaves(run)}
    for other in every_setting():
        for leaf in leaves(other):
            if other.on != run.on and leaf.name in names and leaf.name not in known:
                raise InputError(
                    f"{leaf.flag} is of models that are trained on {other.on}, and {run.preset} is"
                    f" trained on {run.on}"
                )


def read_config(text: str, where: str, base: RunConfig | None = None) -> RunConfig:
    """A run as a TOML document says, on `base`, or on the preset that it names."""
    data: Mapping[str, Any] = parse_toml(text, where)
    if base is None or "preset" in data:
        base = of_preset(data.get("preset", "tiny"))
    return from_toml(base, data, where)
