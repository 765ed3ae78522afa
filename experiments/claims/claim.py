"""What one claim is: what is said, what theory predicts, what is measured, and a verdict."""

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
      claim: what is claimed, as a sentence.
      source: who claims it, or where it is derived.
      predicted: what theory predicts.
      measured: what was measured, with the ratio or the exponent.
      verdict: "holds", "holds if ...", or "wrong: ...". It is computed from what was measured.
    """

    claim: str
    source: str
    predicted: str
    measured: str
    verdict: str


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a module of claims found.

    Attributes:
      claims: its rows.
      draw: draws its plot on an empty figure of 8 by 4 inches.
    """

    claims: Sequence[Claim]
    draw: Callable[[Figure], None]


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The slope of a line through points in logarithms: `p` of `y = c * x**p`, least squares."""
    return float(np.polyfit(np.log(np.asarray(xs, float)), np.log(np.asarray(ys, float)), 1)[0])


def verdict(holds: Any, otherwise: str) -> str:
    """ "holds", or what is the case."""
    return HOLDS if holds else otherwise


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The least and the most of some numbers, as text."""
    low, high = (f"{f(values):.{digits}f}" for f in (min, max))
    return low if low == high else f"{low} to {high}"
