"""Generated pictures and series, for runs without data. Element i depends only on seed and i."""

from __future__ import annotations

import dataclasses
from functools import cached_property

import numpy as np

from models.data.picture import Picture


@dataclasses.dataclass(frozen=True)
class SyntheticPictures:
    """Pictures uint8 `[height, width, channels]`: the sine waves of a class, plus noise.

    Attributes:
      seed: the random seed.
      count: number of pictures.
      height, width, channels: shape of a picture.
      classes: number of classes.
    """

    seed: int
    count: int
    height: int
    width: int
    classes: int
    channels: int = 3

    @cached_property
    def _waves(self) -> np.ndarray:
        """The sine waves of each class, in [-1, 1]: `[classes, height, width, channels]`."""
        rng = np.random.default_rng(self.seed)
        y, x = (
            np.linspace(0, 2 * np.pi, side, endpoint=False) for side in (self.height, self.width)
        )
        turns = rng.integers(1, 4, (self.classes, self.channels, 2, 1, 1))
        phases = rng.uniform(0, 2 * np.pi, (self.classes, self.channels, 1, 1))
        waves = np.sin(turns[:, :, 0] * y[:, None] + turns[:, :, 1] * x + phases)
        return waves.transpose(0, 2, 3, 1)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Picture:
        rng = np.random.default_rng([self.seed, index])
        label = rng.integers(self.classes)
        noisy = 128 + 50 * self._waves[label] + rng.normal(0, 40, self._waves.shape[1:])
        return {
            "image": noisy.clip(0, 255).astype(np.uint8),
            "label": np.asarray(label, np.int32),
        }


@dataclasses.dataclass(frozen=True)
class SyntheticMasks(SyntheticPictures):
    """Pictures with one disc for each class except the first, and the class of each pixel.

    Pixels outside all discs have class 0. Each class has its own sine waves, and noise is added. A
    disc covers the discs of lower classes.
    """

    def __getitem__(self, index: int) -> Picture:
        rng = np.random.default_rng([self.seed, index])
        label = np.zeros((self.height, self.width), np.int32)
        y, x = np.ogrid[: self.height, : self.width]
        for number in range(1, self.classes):
            middle = rng.uniform(0, (self.height, self.width))
            radius = rng.uniform(1 / 8, 3 / 8) * min(self.height, self.width)
            label[(y - middle[0]) ** 2 + (x - middle[1]) ** 2 <= radius**2] = number
        rows, columns = np.indices(label.shape)
        noisy = 128 + 50 * self._waves[label, rows, columns]
        noisy += rng.normal(0, 40, noisy.shape)
        return {"image": noisy.clip(0, 255).astype(np.uint8), "label": label}


@dataclasses.dataclass(frozen=True)
class SyntheticSeries:
    """Series float32 `[length, features]`: the mean of two random sine waves for each feature.

    Attributes:
      seed: the random seed.
      count: number of series.
      length, features: shape of a series.
    """

    seed: int
    count: int
    length: int
    features: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> np.ndarray:
        length, features = self.length, self.features
        rng = np.random.default_rng([self.seed, index])
        speeds = rng.uniform(0.02, 0.3, (2, features))
        phases = rng.uniform(0, 2 * np.pi, (2, features))
        times = np.arange(length)[:, None, None]
        return np.sin(times * speeds + phases).mean(axis=1).astype(np.float32)
