"""Local derivatives: the shape and norm of each block of an operation's Jacobian."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from xform._jax import cotangent_aval
from xform.adjoints.parts import Partial, Pull, norm
from xform.program.arithmetic import Value as Array
from xform.program.arrays import basis, filled, random

# The norm of a Jacobian with more entries is estimated from this number of random cotangents.
_MAX_ENTRIES = 4096
_RANDOM_COTANGENTS = 8


def partials_of(pull: Pull, ys: Sequence[Array], xs: Sequence[Array], elementwise: bool
                ) -> list[Partial]:  # fmt: skip
    """Return the local derivative of an operation with respect to each of `xs`.

    Args:
      pull: pullback from cotangents of `ys` to cotangents of `xs`.
      ys: the active outputs.
      xs: the active inputs.
      elementwise: whether each output element depends only on the input elements at the same
        position. If the shapes are equal too, one pullback of ones gives the diagonal of each
        block, and all other entries are zero.
    """
    rows, sizes = sum(y.size for y in ys), [x.size for x in xs]
    shapes = [(*(ys[0].shape if len(ys) == 1 else (rows,)), *x.shape) for x in xs]
    if any(np.iscomplexobj(v) for v in (*ys, *xs)):
        return [Partial(shape, None, None) for shape in shapes]
    avals = [cotangent_aval(jax.typeof(y)) for y in ys]
    if rows == 1 or (elementwise and all(x.shape == ys[0].shape for x in xs)):
        pairs = zip(shapes, pull([filled(aval, 1) for aval in avals]), strict=True)
        return [Partial(shape, None if shape else float(ct), norm(ct)) for shape, ct in pairs]
    if rows * max(sizes, default=0) <= _MAX_ENTRIES:
        blocks = jax.vmap(lambda *cts: pull(cts))(*basis(avals))
        pairs = zip(shapes, blocks, strict=True)
        return [Partial(shape, None, norm(block)) for shape, block in pairs]
    squares = np.zeros(len(xs))
    for cts in _random_cotangents(avals):
        squares += [norm(ct) ** 2 for ct in pull(cts)]
    estimates = np.sqrt(squares / _RANDOM_COTANGENTS).tolist()
    pairs = zip(shapes, estimates, strict=True)
    return [Partial(shape, None, estimate, exact=False) for shape, estimate in pairs]


def _random_cotangents(avals: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield normally distributed cotangents of types `avals`.

    The expected squared norm of the pulled-back cotangent is the squared norm of the Jacobian.
    """
    for key in jax.random.split(jax.random.key(0), _RANDOM_COTANGENTS):
        keys = jax.random.split(key, len(avals))
        pairs = zip(keys, avals, strict=True)
        yield [random(jax.random.normal, key, aval) for key, aval in pairs]
