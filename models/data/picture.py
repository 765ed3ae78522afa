"""A picture and its label."""

from __future__ import annotations

from typing import TypedDict

import numpy as np


class Picture(TypedDict):
    """A picture, uint8 `[height, width, channels]`, and its label.

    The label is int32: the class `[]`, or the class of each pixel `[height, width]`.
    """

    image: np.ndarray
    label: np.ndarray
