"""Runs on pictures: classification of pictures, or of each of their pixels."""

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
from models.data.images import generated_images, load_images
from models.data.synthetic import SyntheticMasks, SyntheticPictures
from models.errors import InputError
from models.nets.unet import UNetConfig
from models.nets.vit import ViTConfig
from models.settings import setting
from models.train.config import RunConfig, Validation
from models.train.examples import GENERATED_COUNT, ExamplesRun, means, resized

# The default height and width of generated pictures.
DEFAULT_SIZE = (32, 32)


@dataclasses.dataclass(frozen=True)
class PictureRun(ExamplesRun):
    """A run of a ResNet, a vision transformer or a U-Net."""

    on: ClassVar[str] = "pictures"
    unit: ClassVar[str] = "pictures"

    batch: int = setting(128, "Pictures per batch.", least=1, change="never")
    validation_examples: int = setting(
        1024, "Number of pictures in a validation.", least=1, change="free"
    )
    resize: tuple[int, ...] = setting(
        (),
        "Height and width, such as 32,32: picture files are resized to it, and generated pictures"
        " have it. The default is the size of the data.",
        least=1,
        change="never",
    )
    augment: bool = setting(
        False,
        "Randomly shift pictures by up to 4 pixels and mirror them; classes of pixels move with"
        " them.",
        change="never",
    )

    def __post_init__(self) -> None:
        if len(self.resize) not in (0, 2):
            raise ValueError(f"resize {self.resize} must be a height and a width")
        if self.model.classes < 2:
            raise ValueError(f"classes is {self.model.classes}, but must be at least 2")

    @property
    def _labels_pixels(self) -> bool:
        """Whether each pixel has a class, instead of each picture."""
        return isinstance(self.model, UNetConfig)

    @property
    def sides(self) -> tuple[int, ...]:
        """Height and width of pictures."""
        if isinstance(self.model, ViTConfig):
            return self.resize or (self.model.image_size, self.model.image_size)
        return self.resize or DEFAULT_SIZE

    def fit_to_data(self, fixed: Collection[str]) -> RunConfig:
        """Return the run with the classes, channels and side of its pictures."""
        if self.path() is None:
            sized = dataclasses.replace(self, resize=self.sides)
            return resized(sized, {"image_size": self.sides[0]}, fixed)
        wanted = self.sides if {"resize", "image_size"} & {*fixed} else None
        data = self._read(wanted, self.model.channels if "channels" in fixed else 3)
        *sides, channels = data.element()["image"].shape
        sizes = {"classes": data.classes, "channels": channels, "image_size": sides[0]}
        resize = self.resize if "resize" in fixed else tuple(sides)
        fitted = resized(dataclasses.replace(self, resize=resize), sizes, fixed)
        fitted.checked(data)
        return fitted

    def element(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the types of a picture and of its label."""
        self._check_sides()
        return {
            "image": jax.ShapeDtypeStruct((*self.sides, self.model.channels), jnp.uint8),
            "label": jax.ShapeDtypeStruct(self.sides if self._labels_pixels else (), jnp.int32),
        }

    def reads(self) -> jax.ShapeDtypeStruct:
        """Return the type of a picture."""
        return self.element()["image"]

    def load(self) -> Examples:
        """Load the pictures of a folder, or generate them from the seed."""
        return self.checked(self._read(self.sides, self.model.channels))

    def checked(self, data: Examples) -> Examples:
        """Return the data; `InputError` if its shapes or classes do not suit the model."""
        super().checked(data)
        if data.classes > self.model.classes:
            raise InputError(
                f"{data.name} has {data.classes} classes, but the model has {self.model.classes}:"
                f" use --classes {data.classes}"
            )
        return data

    def _read(self, sides: Any, channels: int) -> Examples:
        path = self.path()
        if path is not None:
            return load_images(
                path,
                size=sides and sides[::-1],
                channels=channels,
                validation_share=self.validation_share,
            )
        kind: type[SyntheticPictures] = SyntheticMasks if self._labels_pixels else SyntheticPictures
        height, width = self.sides
        pictures = kind(self.seed, GENERATED_COUNT, height, width, self.model.classes, channels)
        return generated_images(pictures, self.validation_share)

    def _check_sides(self) -> None:
        model, (height, width) = self.model, self.sides
        if isinstance(model, ViTConfig) and {height, width} != {model.image_size}:
            raise InputError(
                f"pictures are {height} x {width}, but the model reads {model.image_size} x"
                f" {model.image_size}: change --resize or --image-size"
            )
        if isinstance(model, UNetConfig):
            multiple = 2 ** (len(model.level_channels) - 1)
            if height % multiple or width % multiple:
                raise InputError(
                    f"pictures are {height} x {width}, but a U-Net of {len(model.level_channels)}"
                    f" levels needs multiples of {multiple}: change --resize, or give fewer"
                    " --level-channels"
                )

    def changed(self, elements: grain.MapDataset[Any]) -> Source:
        """Shift and mirror the pictures, if the run augments them."""
        return augmented(elements, self.seed) if self.augment else elements

    def validation_result(self, data: Examples, metrics: Sequence[dict[str, float]],
                          batches: Sequence[Any]) -> Validation:  # fmt: skip
        """Compute the mean loss and accuracy."""
        numbers = means(metrics)
        return Validation(
            {f"validation_{name}": value for name, value in numbers.items()},
            self.metrics_text(numbers),
        )

    def metrics_text(self, metrics: dict[str, float]) -> str:
        """Format the loss, in nats, and the accuracy."""
        return f"loss {metrics['loss']:.3f}, accuracy {metrics['accuracy']:.1%}"
