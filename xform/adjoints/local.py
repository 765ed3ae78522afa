"""Local derivatives: how large each block of an operation's Jacobian is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.adjoints.parts import Partial, Pull, norm
from xform.arithmetic import Value as Array

# Jacobians of so many entries are formed; of larger ones the norm is estimated from as many pulls.
_FORMED = 4096
_PROBES = 8


def partials_of(pull: Pull, ys: Sequence[Array], xs: Sequence[Array], elementwise: bool
                ) -> list[Partial]:  # fmt: skip
    """The local derivative in each of `xs`.

    Args:
      pull: of cotangents of `ys`, those of `xs`.
      ys: the active outputs.
      xs: the active inputs.
      elementwise: whether an element of an output depends on one of each input, which has its
        place: where shapes are equal, one pull of ones is the diagonal, and all else is zero.
    """
    rows, sizes = sum(y.size for y in ys), [x.size for x in xs]
    shapes = [(*(ys[0].shape if len(ys) == 1 else (rows,)), *x.shape) for x in xs]
    if any(np.iscomplexobj(v) for v in (*ys, *xs)):
        return [Partial(shape, None, None) for shape in shapes]
    if rows == 1 or (elementwise and all(x.shape == ys[0].shape for x in xs)):
        pairs = zip(shapes, pull([jnp.ones_like(y) for y in ys]), strict=True)
        return [Partial(s, None if s else float(ct), norm(ct)) for s, ct in pairs]
    if rows * max(sizes, default=0) <= _FORMED:
        blocks = jax.vmap(lambda *cts: pull(cts))(*_basis(ys, rows))
        return [Partial(s, None, norm(block)) for s, block in zip(shapes, blocks, strict=True)]
    squares = np.zeros(len(xs))
    for cts in _random(ys):
        squares += [norm(ct) ** 2 for ct in pull(cts)]
    sums = np.sqrt(squares / _PROBES).tolist()
    return [Partial(s, None, q, exact=False) for s, q in zip(shapes, sums, strict=True)]


def _basis(ys: Sequence[Array], rows: int) -> list[Array]:
    """All unit cotangents, along a leading axis."""
    ends = np.cumsum([y.size for y in ys])
    eye = np.eye(rows)
    blocks = np.split(eye, ends[:-1], axis=1)
    return [jnp.asarray(block.reshape(rows, *y.shape), y.dtype)
            for block, y in zip(blocks, ys, strict=True)]  # fmt: skip


def _random(ys: Sequence[Array]) -> Iterator[list[Any]]:
    """Normal cotangents: the mean of the squares of what is pulled is the sum of all squares."""
    for key in jax.random.split(jax.random.key(0), _PROBES):
        keys = jax.random.split(key, len(ys))
        yield [jax.random.normal(k, y.shape, y.dtype) for k, y in zip(keys, ys, strict=True)]
