"""Which gathered arrays may be parts of others."""

from __future__ import annotations

import pytest

from xform.steps.gathers import may_be_part

# Experts' weights for eight devices, as XLA gathers them: 4 experts of 2048 x 5632.
WEIGHTS = (32, 256, 5632)


@pytest.mark.parametrize("sizes", [WEIGHTS, (256, 5632), (8, 256, 5632), (32, 64, 5632)])
def test_may_be_part_accepts_an_array_and_its_slices(sizes: tuple[int, ...]) -> None:
    assert may_be_part(tuple(sorted(sizes)), WEIGHTS)


@pytest.mark.parametrize("sizes", [(4, 2048, 5632), (4, 8, 256, 5632), (256, 180224)])
def test_an_array_in_another_shape_is_a_part(sizes: tuple[int, ...]) -> None:
    assert may_be_part(sizes, WEIGHTS)


@pytest.mark.parametrize("sizes", [(4, 4096, 5632), (2048, 22528), (32, 2048), (7,)])
def test_other_arrays_are_not(sizes: tuple[int, ...]) -> None:
    assert not may_be_part(sizes, WEIGHTS)


def test_numbers() -> None:
    assert may_be_part((), ())
    assert may_be_part((), (5,))
