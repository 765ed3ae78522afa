"""Synthetic data of a seed can be learned, and is the same each time."""

import numpy as np

from models.data.batches import batches, mixed
from models.data.synthetic import SyntheticPictures, SyntheticSeries


def test_pictures_are_those_of_their_class() -> None:
    source = SyntheticPictures(3, 400, 8, 8, classes=5)
    again = SyntheticPictures(3, 9, 8, 8, classes=5)
    np.testing.assert_array_equal(source[7]["image"], again[7]["image"])
    assert source[7]["image"].shape == (8, 8, 3)
    some = [source[i] for i in range(400)]
    images = np.stack([e["image"] for e in some]).astype(float)
    labels = np.array([e["label"] for e in some])
    assert set(labels) == set(range(5))
    means = np.stack([images[:300][labels[:300] == k].mean(0) for k in range(5)])
    distances = ((images[300:, None] - means) ** 2).sum((2, 3, 4))
    assert (distances.argmin(1) == labels[300:]).mean() > 0.95
    other = SyntheticPictures(4, 9, 8, 8, classes=5)
    assert not np.array_equal(source[7]["image"], other[7]["image"])


def test_the_next_moment_of_a_series_follows_from_those_before() -> None:
    """Two waves obey a linear recurrence of four terms, which least squares finds."""
    source = SyntheticSeries(0, 10, 200, features=2)
    series = source[3]
    assert (series.shape, series.dtype) == ((200, 2), np.float32)
    np.testing.assert_array_equal(series, SyntheticSeries(0, 4, 200, 2)[3])
    assert not np.array_equal(series, source[4])
    for x in series.T.astype(float):
        before = np.stack([x[i : i + 196] for i in range(4)], axis=1)
        weights, *_ = np.linalg.lstsq(before[:100], x[4:104], rcond=None)
        np.testing.assert_allclose(before[100:] @ weights, x[104:], atol=1e-3)


def test_they_are_batched_as_all_sources_are() -> None:
    iterator = batches(mixed([SyntheticPictures(0, 20, 4, 4, 3)], [1], seed=0), batch=6, slices=2)
    tree = next(iterator)
    assert tree["image"].shape == (2, 6, 4, 4, 3)
    assert tree["label"].shape == (2, 6)
