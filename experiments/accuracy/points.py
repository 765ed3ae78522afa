"""The points where derivatives are measured: the whole range of a type, with its extremes."""

from __future__ import annotations

import math
import zlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.accuracy.functions import Function

STEPS = 4  # the number of neighbours on each side of a point


def points(function: Function, dtype: str, count: int) -> tuple[np.ndarray, ...]:
    """Return `count` points of the domain, always the same: an array for each argument."""
    draw = np.random.default_rng(zlib.crc32(f"{function.name} {dtype}".encode()))
    info = jnp.finfo(dtype)
    fixed = _extremes(function.special, info, dtype)
    if len(function.domain) == 1:
        xs = (_within(np.concatenate([fixed, _drawn(draw, function.special, info, 4 * count)]),
                      function.domain[0], info, dtype),)  # fmt: skip
    else:
        low, high = function.domain
        a, b = (draw.choice(fixed, 4 * count) for _ in range(2))
        a = np.where(draw.random(a.shape) < 0.8, _drawn(draw, function.special, info, a.size), a)
        b = np.where(draw.random(b.shape) < 0.8, _drawn(draw, function.special, info, b.size), b)
        with np.errstate(all="ignore"):
            a = np.where((a <= low[0]) & (low[0] >= 0), low[0] + np.abs(a), a)
            b = np.where((b <= high[0]) & (high[0] >= 0), high[0] + np.abs(b), b)
            b = function.paired(draw, a, b, info)
            a, b = (x.astype(dtype).astype(float) for x in (a, b))
        ok = _ok(a, low, info) & _ok(b, high, info)
        xs = tuple(np.unique(np.stack([a[ok], b[ok]]), axis=1))
    good = np.array([function.defined(*x) for x in zip(*xs, strict=True)])
    xs = tuple(x[good] for x in xs)
    chosen = np.arange(xs[0].size)
    if chosen.size > count:
        must = np.isin(xs[0], fixed.astype(dtype).astype(float)) if len(xs) == 1 else chosen < 0
        must &= np.cumsum(must) <= count // 2
        rest = draw.permutation(chosen[~must])[: count - must.sum()]
        chosen = np.sort(np.concatenate([chosen[must], rest]))
    return tuple(x[chosen].astype(dtype) for x in xs)


def _ok(x: np.ndarray, ends: tuple[float, float], info: Any) -> np.ndarray:
    """Return which numbers in the open interval are normal or zero."""
    normal = (np.abs(x) >= float(info.smallest_normal)) & (np.abs(x) <= float(info.max))
    return (normal | (x == 0)) & (x > ends[0]) & (x < ends[1])


def _within(x: np.ndarray, ends: tuple[float, float], info: Any, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        x = np.unique(x.astype(dtype)).astype(float)
    return x[_ok(x, ends, info)]


def _extremes(special: Any, info: Any, dtype: str) -> np.ndarray:
    """Return special points and points where common functions overflow, with their neighbours."""
    most, least = float(info.max), float(info.smallest_normal)
    ends = [math.log(most), math.log2(most), math.log(least), math.log2(least), math.sqrt(most),
            math.sqrt(least), math.cbrt(most), math.cbrt(least), most, least, float(info.eps),
            1.0, 0.5, math.log(float(info.eps)), 0.0]  # fmt: skip
    x = np.array([s * e for e in ends for s in (1, -1)] + list(special)).astype(dtype)
    around = [x]
    with np.errstate(all="ignore"):
        for way in (-np.inf, np.inf):
            near = x
            for _ in range(STEPS):
                near = np.nextafter(near, np.asarray(way, dtype))
                around.append(near)
        return np.concatenate(around).astype(float)


def _drawn(draw: np.random.Generator, special: Any, info: Any, count: int) -> np.ndarray:
    """Draw numbers over all exponents, at common magnitudes, evenly spaced, and near `special`."""
    signs = draw.choice([-1.0, 1.0], count)
    wide = np.exp2(draw.uniform(info.minexp, info.maxexp, count))
    most = math.log2(math.log(float(info.max))) + 1
    middle = np.exp2(draw.uniform(-14, most, count))
    even = draw.uniform(0, 2**most, count)
    distance = np.exp2(draw.uniform(-info.nmant - 1, 0, count))
    near = draw.choice(np.asarray(special, float), count) * signs + distance * draw.choice(
        [-1, 1], count
    )
    kind = draw.choice(4, count, p=[0.3, 0.35, 0.1, 0.25])
    return np.choose(kind, [wide, middle, even, near]) * signs
