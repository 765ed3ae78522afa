"""Series of numbers, in windows for models that say what comes next."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from models.data.arrays import halves, mapped
from models.data.batches import Source
from models.data.examples import Examples
from models.data.synthetic import SyntheticSeries
from models.errors import InputError


class SeriesWindows:
    """Consecutive windows of series `[N, T, F]`; neighbours share one moment.

    Elements are float32 `[window + 1, F]`, less `mean` and divided by `scale`.
    """

    def __init__(
        self, series: np.ndarray, window: int, mean: np.ndarray, scale: np.ndarray
    ) -> None:
        self._series, self._window = series, window
        self._mean, self._scale = mean, scale
        self._each = (series.shape[1] - 1) // window

    def __len__(self) -> int:
        return len(self._series) * self._each

    def __getitem__(self, index: int) -> np.ndarray:
        number, place = divmod(index, self._each)
        start = place * self._window
        some = self._series[number, start : start + self._window + 1]
        if not np.isfinite(some).all():
            raise InputError(f"series {number} has numbers from moment {start} that are not finite")
        return ((some - self._mean) / self._scale).astype(np.float32)


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
    array = mapped(path)
    if array.dtype.kind != "f" or not 1 <= array.ndim <= 3 or not array.size:
        raise InputError(
            f"{path} holds {array.dtype} {array.shape}, and must hold floats [moments],"
            " [moments, features], or [series, moments, features]"
        )
    if array.ndim < 3:
        one = array[None, :, None] if array.ndim == 1 else array[None]
        cut = one.shape[1] - max(window + 1, int(one.shape[1] * held))
        parts = {"train": one[:, : max(cut, 0)], "validation": one[:, max(cut, 0) :]}
    else:
        numbers = halves(range(len(array)), held, seed)
        parts = {part: array[[few[i] for i in range(len(few))]] for part, few in numbers.items()}
    for part, some in parts.items():
        if some.shape[1] < window + 1:
            raise InputError(f"{path} has {some.shape[1]} moments for {part}, and windows of"
                             f" {window} need at least {window + 1}")  # fmt: skip
    axes = (0, 1)
    mean = parts["train"].mean(axes, dtype=np.float64)
    scale = parts["train"].std(axes, dtype=np.float64)
    if not np.isfinite([mean, scale]).all():
        raise InputError(f"{path} has numbers that are not finite, or too large to average")
    scale = np.where(scale > 0, scale, 1.0)  # a feature that never changes is 0
    windows: dict[str, Source] = {
        part: SeriesWindows(some, window, mean, scale) for part, some in parts.items()
    }
    return Examples(str(path), windows, lambda: [array])


def made_series(whole: SyntheticSeries, held: float) -> Examples:
    """Series that are made, each of them a window, of which a share `held` is for validation."""
    return Examples("series that are made", halves(whole, held), lambda: [repr(whole)])
