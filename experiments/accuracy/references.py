"""True values from mpmath, stored in files because they take longest to compute."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from mpmath import mp

from experiments.accuracy.functions import Formula, Function
from xform.storage.files import atomic_write

BITS = 200


@dataclasses.dataclass(frozen=True)
class Exact:
    """Numbers (high + low) 2^exponent, with high in [1/2, 1) and low below its last place.

    NaN where the function has no value.
    """

    high: np.ndarray
    low: np.ndarray
    exponent: np.ndarray

    def rounded(self) -> np.ndarray:
        with np.errstate(over="ignore"):
            return np.ldexp(self.high, self.exponent)

    def normal(self, dtype: str) -> np.ndarray:
        """Return where the number is a normal number of the type."""
        info, size = jnp.finfo(dtype), np.abs(self.rounded())
        return (size >= float(info.smallest_normal)) & (size <= float(info.max))

    def errors(self, got: np.ndarray, dtype: str) -> np.ndarray:
        """Return the distances from these numbers, in units in their last place.

        A distance is at most half of the number's binade: then no digit is right.
        """
        digits = jnp.finfo(dtype).nmant + 1
        with np.errstate(all="ignore"):
            off = np.abs(np.ldexp(got.astype(float), -self.exponent) - self.high - self.low)
        off = np.where(np.isfinite(off), off, 1.0)
        return np.minimum(np.ldexp(off, digits), 2.0 ** (digits - 1))


def exact(formula: Formula, xs: Sequence[np.ndarray]) -> Exact:
    """Compute a formula at points."""
    rows = [_split(formula, x) for x in zip(*(x.astype(float) for x in xs), strict=True)]
    high, low, exponent = zip(*rows, strict=True)
    return Exact(np.array(high), np.array(low), np.array(exponent))


def _split(formula: Formula, x: Sequence[float]) -> tuple[float, float, int]:
    with mp.workprec(BITS):
        try:
            y = formula(*map(mp.mpf, x))
        except (ArithmeticError, ValueError, mp.NoConvergence):
            return math.nan, math.nan, 0
        if isinstance(y, mp.mpc) or not mp.isfinite(y):
            return math.nan, math.nan, 0
        fraction, exponent = mp.frexp(y)
        if abs(exponent) > 20_000:  # too large or small for every type
            return math.nan, math.nan, 0
        high = float(fraction)
        return high, float(fraction - high), int(exponent)


def references(
    function: Function, dtype: str, xs: Sequence[np.ndarray], folder: Path | None
) -> dict[tuple[int, ...], Exact]:
    """Return the value `()` and the derivatives of a function at points, read from a cache file."""
    wanted = {(): function.value, **function.derivatives}
    key = hashlib.sha256(b"".join(x.tobytes() for x in xs)).hexdigest()[:12]
    found: dict[tuple[int, ...], Exact] = {}
    for order, formula in wanted.items():
        name = f"{function.name} {dtype} {''.join(map(str, order))} {key}.npz".replace(" ", "-")
        path = folder and folder / name
        if path and path.exists():
            held = np.load(path)
            found[order] = Exact(held["high"], held["low"], held["exponent"])
            continue
        found[order] = exact(formula, xs)
        if path:
            with atomic_write(path) as partial, partial.open("wb") as file:
                np.savez(file, **dataclasses.asdict(found[order]))
    return found
