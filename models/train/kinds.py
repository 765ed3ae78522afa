"""The kinds of runs: which settings class, and so which kind of data, belongs to each model."""

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
    """Return a run of a preset, with default settings."""
    if name not in TRAINED:
        raise InputError(f"there is no preset {name!r}{nearest(str(name), TRAINED)}")
    return KINDS[type(TRAINED[name])](model=TRAINED[name], preset=name)


def of_model(model: Any) -> RunConfig:
    """Return a run of a given model configuration. Its preset is the first of the same kind."""
    kinds = {type(config): name for name, config in reversed(TRAINED.items())}
    return KINDS[type(model)](model=model, preset=kinds[type(model)])


def every_setting() -> list[RunConfig]:
    """Return a run of each kind of model. Together they have all settings."""
    first_preset = {type(config): name for name, config in reversed(TRAINED.items())}
    return [of_preset(first_preset[kind]) for kind in KINDS]


def refuse_others(run: RunConfig, names: Collection[str]) -> None:
    """Check that no setting in `names` belongs only to other kinds of models.

    Raises:
      InputError: one does. The message names a preset of each kind that has the setting.
    """
    known = {leaf.name for leaf in leaves(run)}
    for name in names:
        others = {other.preset: leaf.flag for other in every_setting() for leaf in leaves(other)
                  if leaf.name == name}  # fmt: skip
        if others and name not in known:
            flag, presets = next(iter(others.values())), " or ".join(others)
            raise InputError(
                f"{flag} is no setting of {run.preset}: use a preset such as {presets}"
            )


def read_config(text: str, where: str, base: RunConfig | None = None) -> RunConfig:
    """Read a run from a TOML document.

    Settings that the document lacks come from `base`, or from the preset that the document names.
    `where` names the document in error messages.
    """
    data: Mapping[str, Any] = parse_toml(text, where)
    if base is None or "preset" in data:
        base = of_preset(data.get("preset", "tiny"))
    return from_toml(base, data, where)
