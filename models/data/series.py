"""Time series in windows, for models that predict the next moment.

A moment is one time step of a series: a vector of features. A series is an array
`[moments, features]`, and a window is `window + 1` consecutive moments of it.
"""

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
    """Consecutive windows of series `[N, T, F]`. Neighbours share one moment.

    Elements are `(series - mean) / scale`, float32 `[window + 1, F]`. `name` names the data in
    error messages.
    """

    def __init__(
        self, series: np.ndarray, window: int, mean: np.ndarray, scale: np.ndarray, name: str
    ) -> None:
        self._series, self._window, self._name = series, window, name
        self._mean, self._scale = mean, scale
        self._windows_per_series = (series.shape[1] - 1) // window

    def __len__(self) -> int:
        return len(self._series) * self._windows_per_series

    def __getitem__(self, index: int) -> np.ndarray:
        number, place = divmod(index, self._windows_per_series)
        start = place * self._window
        moments = self._series[number, start : start + self._window + 1]
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = ((moments - self._mean) / self._scale).astype(np.float32)
        if not np.isfinite(scaled).all():
            raise InputError(f"{self._name}: series {number} has numbers in the window from moment"
                             f" {start} that are not finite, or too large: replace them"
                             )  # fmt: skip
        return scaled


def load_series(path: Path, window: int, *, validation_share: float = 0.05, seed: int = 0
                ) -> Examples:  # fmt: skip
    """Load the series of a `.npy` file as windows in two parts.

    If there is one series, its last moments are for validation. If there are several, some of them
    are for validation, drawn at random. Each feature is scaled to mean 0 and standard deviation 1
    over the part `train`.

    Args:
      path: an array of floats: `[T]`, `[T, F]` or `[N, T, F]`.
      window: number of moments that the model reads at once.
      validation_share: the share for validation.
      seed: the seed of the random split.

    Raises:
      InputError: the file is not such an array, or its series are too short or not finite.
    """
    array = _floats(path)
    all_series = {1: array[None, ..., None], 2: array[None]}.get(array.ndim, array)
    if len(all_series) == 1:
        cut = max(
            all_series.shape[1] - max(window + 1, int(all_series.shape[1] * validation_share)), 0
        )
        parts = {"train": all_series[:, :cut], "validation": all_series[:, cut:]}
    else:
        indices = halves(range(len(all_series)), validation_share, seed)
        parts = {
            part: all_series[[chosen[i] for i in range(len(chosen))]]
            for part, chosen in indices.items()
        }
    for part, series in parts.items():
        if series.shape[1] < window + 1:
            raise InputError(f"the {part} part of {path} has {series.shape[1]} moments, but a"
                             f" window of {window} needs at least {window + 1}")  # fmt: skip
    mean, scale = _scales(parts["train"], path)
    windows: dict[str, Source] = {
        part: SeriesWindows(series, window, mean, scale, f"{path} for {part}")
        for part, series in parts.items()
    }
    return Examples(str(path), windows, lambda: [array])


def features(path: Path) -> int:
    """Return the number of features of the series in a `.npy` file.

    Raises:
      InputError: the file is not an array of floats `[T]`, `[T, F]` or `[N, T, F]`.
    """
    array = _floats(path)
    return 1 if array.ndim == 1 else array.shape[-1]


def _floats(path: Path) -> np.ndarray:
    """Map the array of floats in a `.npy` file into memory, after a check of its shape."""
    with readable():
        if path.is_dir():
            raise InputError(
                f"{path} is a folder, but series are in one .npy file: name the file, or use a"
                " --preset for text or pictures"
            )
    array = mapped(path)
    if array.dtype.kind != "f" or not 1 <= array.ndim <= 3 or not array.size:
        raise InputError(
            f"{path} holds {array.dtype} {array.shape}, but must hold floats [moments],"
            " [moments, features] or [series, moments, features]"
        )
    return array


def _scales(series: np.ndarray, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the standard deviation of each feature, float64 `[F]`.

    The deviation of a constant feature is set to 1.
    """
    axes = (0, 1)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = series.mean(axes, dtype=np.float64)
        scale = series.std(axes, dtype=np.float64)
    if not np.isfinite([mean, scale]).all():
        raise InputError(
            f"{path} has numbers that are not finite, or too large to average: replace them"
        )
    # A constant feature becomes 0. Its computed deviation is only rounding error.
    constant = series.min(axes) == series.max(axes)
    mean, scale = np.where(constant, series[0, 0], mean), np.where(constant, 1.0, scale)
    if not scale.all():
        raise InputError(f"{path} has numbers that are too small to scale: use larger units")
    return mean, scale


def generated_series(whole: SyntheticSeries, validation_share: float) -> Examples:
    """Split generated series, each of them one window, into training and validation parts."""
    return Examples("generated series", halves(whole, validation_share), lambda: [repr(whole)])
