"""A picture and its label."""

from __future__ import annotations

from typing import TypedDict

import numpy as np


class Picture(TypedDict):
    """A picture, uint8 `[height, width, channels]`, and its class, or the class of each pixel."""

    image: np.ndarray
    label: np.ndarray
