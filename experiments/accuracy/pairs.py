"""Second arguments of functions of two, chosen so that derivatives are normal numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Paired = Callable[[np.random.Generator, np.ndarray, np.ndarray, Any], np.ndarray]
TURNS = tuple(k * math.pi / 2 for k in (-3, -2, -1, 1, 2, 3, 11, 64))


def _some(draw: np.random.Generator, a: np.ndarray, b: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return the new numbers at three quarters of the places, and the old ones elsewhere."""
    return np.where(draw.random(a.shape) < 0.75, new, b)


def independent(draw: np.random.Generator, a: np.ndarray, b: np.ndarray, info: Any) -> np.ndarray:
    """Return the drawn numbers."""
    return b


def near(draw: np.random.Generator, a: np.ndarray, b: np.ndarray, info: Any) -> np.ndarray:
    """Return numbers about as large as the first ones."""
    return _some(draw, a, b, a * np.exp2(draw.uniform(-12, 12, a.shape)) * _signs(draw, a))


def moderate(draw: np.random.Generator, a: np.ndarray, b: np.ndarray, info: Any) -> np.ndarray:
    """Return positive numbers between 2^-10 and 2^10."""
    return _some(draw, a, b, np.exp2(draw.uniform(-10, 10, a.shape)))


def exponents(draw: np.random.Generator, a: np.ndarray, b: np.ndarray, info: Any) -> np.ndarray:
    """Return exponents that keep the power of the first number a normal number."""
    logs = np.log(np.abs(a))
    logs = np.where(logs == 0, 1, logs)
    most = np.log(float(info.max))
    return _some(draw, a, b, draw.uniform(-most, most, a.shape) / logs)


def gamma(draw: np.random.Generator, a: np.ndarray, b: np.ndarray, info: Any) -> np.ndarray:
    """Return numbers within some standard deviations of the first ones."""
    a = np.abs(a)
    spread = draw.uniform(-8, 8, a.shape) * np.sqrt(np.minimum(a, 1e200))
    return _some(draw, a, b, np.where(a > 1, np.abs(a + spread), np.abs(b)))


def _signs(draw: np.random.Generator, a: np.ndarray) -> np.ndarray:
    return draw.choice([-1.0, 1.0], a.shape)
