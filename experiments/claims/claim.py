"""The parts of one claim: its text, the prediction of theory, the measurement, and the verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

HOLDS, WRONG = "holds", "wrong"


@dataclasses.dataclass(frozen=True)
class Claim:
    """One row of the table.

    Attributes:
      claim: the claim, as a sentence.
      source: who makes it, or where it is derived.
      predicted: the prediction of theory.
      measured: the measurement, with the ratio or the exponent.
      verdict: "holds", "holds if ...", or "wrong: ...", computed from the measurement.
    """

    claim: str
    source: str
    predicted: str
    measured: str
    verdict: str


@dataclasses.dataclass(frozen=True)
class Finding:
    """The results of one module of claims.

    Attributes:
      claims: its rows.
      draw: draws its plot on an empty figure of 8 by 4 inches.
    """

    claims: Sequence[Claim]
    draw: Callable[[Figure], None]


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the exponent `p` of `y = c * x**p`, by least squares in logarithms."""
    return float(np.polyfit(np.log(np.asarray(xs, float)), np.log(np.asarray(ys, float)), 1)[0])


def verdict(holds: Any, otherwise: str) -> str:
    """Return "holds", or the other text if the claim does not hold."""
    return HOLDS if holds else otherwise


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the smallest and the largest of some numbers, as text."""
    low, high = (f"{f(values):.{digits}f}" for f in (min, max))
    return low if low == high else f"{low} to {high}"
