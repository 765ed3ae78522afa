"""Runs on pictures: the class of each, or of each of its pixels."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import grain
import jax
import jax.numpy as jnp

from models.data.augment import augmented
from models.data.batches import Source
from models.data.examples import Examples
from models.data.images import load_images, made_images
from models.data.synthetic import SyntheticMasks, SyntheticPictures
from models.errors import InputError
from models.nets.unet import UNetConfig
from models.nets.vit import ViTConfig
from models.settings import setting
from models.train.config import Judgement, RunConfig
from models.train.examples import MADE, ExamplesRun, means, resized

USUAL = (32, 32)


@dataclasses.dataclass(frozen=True)
class PictureRun(ExamplesRun):
    """A run of a ResNet, a vision transformer or a U-Net."""

    on: ClassVar[str] = "pictures"
    unit: ClassVar[str] = "pictures"

    batch: int = setting(128, "Pictures held at once.", least=1, change="never")
    eval_windows: int = setting(1024, "Pictures in one validation.", least=1, change="free")
    size: tuple[int, ...] = setting(
        (),
        "Height and width of pictures, to which files are brought: 32,32. Without it, as the data"
        " has.",
        least=1,
        change="never",
    )
    augment: bool = setting(
        False,
        "Move pictures by up to 4 pixels and mirror them, by chance; so, where each pixel has a"
        " class, are these.",
        change="never",
    )

    def __post_init__(self) -> None:
        if len(self.size) not in (0, 2):
            raise ValueError(f"size {self.size} is not a height and a width")
        if self.model.classes < 2:
            raise ValueError(f"classes {self.model.classes}: there is nothing to tell apart")

    @property
    def _masks(self) -> bool:
        return isinstance(self.model, UNetConfig)

    @property
    def sides(self) -> tuple[int, ...]:
        """Height and width of pictures."""
        if isinstance(self.model, ViTConfig):
            return self.size or (self.model.image, self.model.image)
        return self.size or USUAL

    def fitted(self, said: Collection[str]) -> RunConfig:
        """The run whose model has the classes, channels and side of its pictures."""
        if self.path() is None:
            sized = dataclasses.replace(self, size=self.sides)
            return resized(sized, {"image": self.sides[0]}, said)
        wanted = self.sides if {"size", "image"} & {*said} else None
        data = self._read(wanted, self.model.channels if "channels" in said else 3)
        *sides, channels = data.element()["image"].shape
        sizes = {"classes": data.classes, "channels": channels, "image": sides[0]}
        size = self.size if "size" in said else tuple(sides)
        fitted = resized(dataclasses.replace(self, size=size), sizes, said)
        fitted.checked(data)
        return fitted

    def element(self) -> dict[str, jax.ShapeDtypeStruct]:
        """A picture, and its class or that of each of its pixels."""
        self._check_sides()
        return {
            "image": jax.ShapeDtypeStruct((*self.sides, self.model.channels), jnp.uint8),
            "label": jax.ShapeDtypeStruct(self.sides if self._masks else (), jnp.int32),
        }

    def reads(self) -> jax.ShapeDtypeStruct:
        """A picture."""
        return self.element()["image"]

    def load(self) -> Examples:
        """The pictures of a folder, or those that the seed makes."""
        return self.checked(self._read(self.sides, self.model.channels))

    def checked(self, data: Examples) -> Examples:
        """The data, if its elements and their classes are what the model takes."""
        super().checked(data)
        if data.classes > self.model.classes:
            raise InputError(
                f"{data.name} has {data.classes} classes, and the model {self.model.classes}: give"
                f" --classes {data.classes}"
            )
        return data

    def _read(self, sides: Any, channels: int) -> Examples:
        path = self.path()
        if path is not None:
            return load_images(path, size=sides and sides[::-1], channels=channels, held=self.held)
        kind: type[SyntheticPictures] = SyntheticMasks if self._masks else SyntheticPictures
        height, width = self.sides
        made = kind(self.seed, MADE, height, width, self.model.classes, channels)
        return made_images(made, self.held)

    def _check_sides(self) -> None:
        model, (height, width) = self.model, self.sides
        if isinstance(model, ViTConfig) and {height, width} != {model.image}:
            raise InputError(
                f"pictures are {height} x {width}, and the model's {model.image} x {model.image}:"
                " give --size or --image"
            )
        if isinstance(model, UNetConfig):
            multiple = 2 ** (len(model.widths) - 1)
            if height % multiple or width % multiple:
                raise InputError(
                    f"pictures are {height} x {width}, and a U-Net of {len(model.widths)} levels"
                    f" takes multiples of {multiple}: give --size, or fewer --widths"
                )

    def changed(self, elements: grain.MapDataset[Any]) -> Source:
        """Pictures as they are, or moved and mirrored."""
        return augmented(elements, self.seed) if self.augment else elements

    def judgement(self, data: Examples, found: Sequence[dict[str, float]], batches: Sequence[Any]
                  ) -> Judgement:  # fmt: skip
        """The mean loss, and the share of right classes."""
        numbers = means(found)
        return Judgement(
            {f"validation_{name}": value for name, value in numbers.items()}, self.said(numbers)
        )

    def said(self, metrics: dict[str, float]) -> str:
        """Loss, in nats, and accuracy."""
        return f"loss {metrics['loss']:.3f}, accuracy {metrics['accuracy']:.1%}"
