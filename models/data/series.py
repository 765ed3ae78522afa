"""Series of numbers, in windows for models that say what comes next."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from models.data.arrays import halves, mapped
from models.data.batches import Source
from models.data.examples import Examples
from models.data.files import readable
from models.data.synthetic import SyntheticSeries
from models.errors import InputError


class SeriesWindows:
    """Consecutive windows of series `[N, T, F]`; neighbours share one moment.

    Elements are float32 `[window + 1, F]`, less `mean` and divided by `scale`. `name` is
    that of the data, in errors.
    """

    def __init__(
        self, series: np.ndarray, window: int, mean: np.ndarray, scale: np.ndarray, name: str
    ) -> None:
        self._series, self._window, self._name = series, window, name
        self._mean, self._scale = mean, scale
        self._each = (series.shape[1] - 1) // window

    def __len__(self) -> int:
        return len(self._series) * self._each

    def __getitem__(self, index: int) -> np.ndarray:
        number, place = divmod(index, self._each)
        start = place * self._window
        some = self._series[number, start : start + self._window + 1]
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = ((some - self._mean) / self._scale).astype(np.float32)
        if not np.isfinite(scaled).all():
            raise InputError(f"{self._name}: series {number} has numbers from moment {start} that"
                             " are not finite, or too large")  # fmt: skip
        return scaled


def load_series(path: Path, window: int, *, held: float = 0.05, seed: int = 0
                ) -> Examples:  # fmt: skip
    """The series in a `.npy` file, in windows and in two parts.

    Of one series the end is for validation; of several some, drawn by a seed. All are scaled by the
    mean and the deviation of each feature in `train`.

    Args:
      path: an array of floats: `[T]`, `[T, F]`, or `[N, T, F]`.
      window: moments that a model reads at once.
      held: the share for validation.
      seed: of the draw.

    Raises:
      InputError: it is no such array, too short, or not finite.
    """
    array = _floats(path)
    every = {1: array[None, ..., None], 2: array[None]}.get(array.ndim, array)
    if len(every) == 1:
        cut = max(every.shape[1] - max(window + 1, int(every.shape[1] * held)), 0)
        parts = {"train": every[:, :cut], "validation": every[:, cut:]}
    else:
        numbers = halves(range(len(every)), held, seed)
        parts = {part: every[[few[i] for i in range(len(few))]] for part, few in numbers.items()}
    for part, some in parts.items():
        if some.shape[1] < window + 1:
            raise InputError(f"{path} has {some.shape[1]} moments for {part}, and windows of"
                             f" {window} need at least {window + 1}")  # fmt: skip
    mean, scale = _scales(parts["train"], path)
    windows: dict[str, Source] = {
        part: SeriesWindows(some, window, mean, scale, f"{path} for {part}")
        for part, some in parts.items()
    }
    return Examples(str(path), windows, lambda: [array])


def features(path: Path) -> int:
    """How many features each moment of a file has; raises as `load_series` does."""
    array = _floats(path)
    return 1 if array.ndim == 1 else array.shape[-1]


def _floats(path: Path) -> np.ndarray:
    with readable():
        if path.is_dir():
            raise InputError(
                f"{path} is a folder, and series are in one .npy file: name it, or give a --preset"
                " of models of text or pictures"
            )
    array = mapped(path)
    if array.dtype.kind != "f" or not 1 <= array.ndim <= 3 or not array.size:
        raise InputError(
            f"{path} holds {array.dtype} {array.shape}, and must hold floats [moments],"
            " [moments, features], or [series, moments, features]"
        )
    return array


def _scales(some: np.ndarray, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """What is taken from each feature, and what it is divided by, in float64."""
    axes = (0, 1)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = some.mean(axes, dtype=np.float64)
        scale = some.std(axes, dtype=np.float64)
    if not np.isfinite([mean, scale]).all():
        raise InputError(f"{path} has numbers that are not finite, or too large to average")
    # A feature that never changes is 0: what rounding leaves of its deviation is no scale.
    constant = some.min(axes) == some.max(axes)
    mean, scale = np.where(constant, some[0, 0], mean), np.where(constant, 1.0, scale)
    if not scale.all():
        raise InputError(f"{path} has numbers that are too small to scale")
    return mean, scale


def made_series(whole: SyntheticSeries, held: float) -> Examples:
    """Series that are made, each of them a window, of which a share `held` is for validation."""
    return Examples("series that are made", halves(whole, held), lambda: [repr(whole)])
