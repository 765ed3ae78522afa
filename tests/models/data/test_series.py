"""Windows of series: what they hold, how they are scaled, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.data.series import load_series
from models.errors import InputError

RNG = np.random.default_rng(0)


def saved(folder: Path, array: Any) -> Path:
    np.save(folder / "x.npy", array)
    return folder / "x.npy"


def joined(source: Any) -> np.ndarray:
    """What consecutive windows cover, without the moments that they share."""
    return np.concatenate([source[i][:-1] for i in range(len(source))])


@pytest.mark.parametrize("shape", [(1000,), (1000, 3), (1, 1000, 3)])
def test_the_end_of_one_series_is_for_validation(shape: tuple[int, ...], tmp_path: Path) -> None:
    array = 5 + 2 * RNG.normal(size=shape)
    parts = load_series(saved(tmp_path, array), 10, validation_share=0.1).parts
    wide = array.reshape(1000, -1)
    mean, scale = wide[:900].mean(0), wide[:900].std(0)
    scaled = (wide - mean) / scale
    assert (len(parts["train"]), len(parts["validation"])) == (89, 9)
    np.testing.assert_allclose(joined(parts["train"]), scaled[:890], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(joined(parts["validation"]), scaled[900:990], rtol=1e-5, atol=1e-6)
    element = parts["train"][3]
    assert (element.shape, element.dtype) == ((11, wide.shape[1]), np.float32)
    np.testing.assert_array_equal(element[-1], parts["train"][4][0])


def test_of_several_series_some_are_for_validation(tmp_path: Path) -> None:
    array = RNG.normal(size=(20, 31, 2))
    parts = load_series(saved(tmp_path, array), 10, validation_share=0.2).parts
    assert (len(parts["train"]), len(parts["validation"])) == (16 * 3, 4 * 3)
    again = load_series(saved(tmp_path, array), 10, validation_share=0.2).parts
    np.testing.assert_array_equal(parts["train"][5], again["train"][5])
    other = load_series(saved(tmp_path, array), 10, validation_share=0.2, seed=1).parts
    assert not np.array_equal(joined(parts["validation"]), joined(other["validation"]))


def test_a_feature_that_never_changes_is_zero(tmp_path: Path) -> None:
    array = np.stack([np.full(100, 7.0), RNG.normal(size=100)], axis=1)
    parts = load_series(saved(tmp_path, array), 4).parts
    assert (joined(parts["train"])[:, 0] == 0).all()


@pytest.mark.parametrize("value", [0.1, 1e9 / 3, 1e-200])
def test_constant_features_with_rounding_noise_are_scaled_to_zero(
    value: float, tmp_path: Path
) -> None:
    array = np.stack([np.full(300, value), RNG.normal(size=300)], axis=1)
    assert array[:270].std(0)[0] > 0 or value == 1e-200
    for part in load_series(saved(tmp_path, array), 4).parts.values():
        assert (joined(part)[:, 0] == 0).all()


REFUSED: dict[str, tuple[Any, str]] = {
    "whole numbers": (np.arange(100), r"holds int64 \(100,\), but must hold floats"),
    "four axes": (np.zeros((2, 2, 2, 2)), r"but must hold floats \[moments\]"),
    "nothing": (np.zeros(0), r"holds float64 \(0,\)"),
    "short": (np.zeros(20), "the train part of .* has 9 moments, but a window of 10 needs"),
    "of no feature": (np.zeros((100, 0)), r"holds float64 \(100, 0\)"),
    "short ones": (np.zeros((20, 1, 2)), "the train part of .* has 1 moments, but a window of 10"),
    "huge": (1e200 * RNG.normal(size=100), "not finite, or too large to average"),
    "tiny": (1e-200 * RNG.normal(size=100), "too small to scale"),
    "not finite": (np.full(100, np.nan), "has numbers that are not finite"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_arrays_are_refused(case: str, tmp_path: Path) -> None:
    array, complaint = REFUSED[case]
    with pytest.raises(InputError, match=complaint):
        load_series(saved(tmp_path, array), 10)


@pytest.mark.parametrize("value", [np.inf, np.nan, 1e200])
def test_nonfinite_series_values_raise_when_their_window_is_read(
    tmp_path: Path, value: float
) -> None:
    array = RNG.normal(size=(100, 1))
    array[97] = value
    parts = load_series(saved(tmp_path, array), 4).parts
    with pytest.raises(
        InputError, match=r"x\.npy for validation: series 0 has numbers in the window from"
    ):
        joined(parts["validation"])


def test_several_arrays_in_a_file_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.zeros(3), b=np.zeros(3))
    (tmp_path / "x.npz").rename(tmp_path / "x.npy")
    with pytest.raises(InputError, match=r"holds several arrays: save each in its own \.npy file"):
        load_series(tmp_path / "x.npy", 4)
    with pytest.raises(InputError, match=r"is a folder, but series are in one \.npy file"):
        load_series(tmp_path, 4)
