"""Boxes cover their rectangle, with the requested areas."""

import numpy as np
import pytest

from xform.memory.treemap import squarify


@pytest.mark.parametrize("n", [1, 2, 7, 300])
@pytest.mark.parametrize(("width", "height"), [(10, 4), (3, 9)])
def test_boxes_have_their_areas_and_do_not_overlap(n: int, width: int, height: int) -> None:
    sizes = sorted(np.random.default_rng(n).pareto(1, n) + 0.01, reverse=True)
    boxes = squarify(sizes, 1, 2, width, height)
    areas = np.array([w * h for _, _, w, h in boxes])
    np.testing.assert_allclose(areas, np.array(sizes) / sum(sizes) * width * height, rtol=1e-6)
    for x, y, w, h in boxes:
        assert x >= 1 - 1e-6
        assert y >= 2 - 1e-6
        assert x + w <= 1 + width + 1e-6
        assert y + h <= 2 + height + 1e-6
    x, y, w, h = np.array(boxes).T
    shared = lambda a, n: np.minimum(a[:, None] + n[:, None], a + n) - np.maximum(a[:, None], a)
    over = np.clip(shared(x, w), 0, None) * np.clip(shared(y, h), 0, None)
    assert np.abs(over - np.diag(areas)).max() < 1e-5


def test_equal_sizes_are_nearly_squares() -> None:
    assert max(max(w / h, h / w) for _, _, w, h in squarify([1] * 48, 0, 0, 8, 6)) < 2


def test_nothing_is_no_box() -> None:
    assert squarify([], 0, 0, 1, 1) == []
