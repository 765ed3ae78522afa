"""Pictures and series made by a seed: element i is a function of the seed and i alone."""

from __future__ import annotations

import numpy as np

from models.data.images import Picture


class SyntheticPictures:
    """Pictures uint8 `[size, size, channels]` of noise, and of waves that are those of a class."""

    def __init__(self, seed: int, count: int, size: int, classes: int, channels: int = 3) -> None:
        self._seed, self._count, self._classes = seed, count, classes
        rng = np.random.default_rng(seed)
        places = np.linspace(0, 2 * np.pi, size, endpoint=False)
        turns = rng.integers(1, 4, (classes, channels, 2, 1, 1))
        phases = rng.uniform(0, 2 * np.pi, (classes, channels, 1, 1))
        waves = np.sin(turns[:, :, 0] * places[:, None] + turns[:, :, 1] * places + phases)
        self._waves = waves.transpose(0, 2, 3, 1)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Picture:
        rng = np.random.default_rng([self._seed, index])
        label = rng.integers(self._classes)
        noisy = 128 + 50 * self._waves[label] + rng.normal(0, 40, self._waves.shape[1:])
        return {
            "image": noisy.clip(0, 255).astype(np.uint8),
            "label": np.asarray(label, np.int32),
        }


class SyntheticSeries:
    """Series float32 `[length, features]`: of each feature two waves of random speed and phase."""

    def __init__(self, seed: int, count: int, length: int, features: int) -> None:
        self._seed, self._count, self._shape = seed, count, (length, features)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> np.ndarray:
        length, features = self._shape
        rng = np.random.default_rng([self._seed, index])
        speeds = rng.uniform(0.02, 0.3, (2, features))
        phases = rng.uniform(0, 2 * np.pi, (2, features))
        moments = np.arange(length)[:, None, None]
        return np.sin(moments * speeds + phases).mean(axis=1).astype(np.float32)
