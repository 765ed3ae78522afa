"""Whether Python can inspect values while a derivative is taken: print, branches, numbers."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, verdict


def halved(x: jax.Array) -> jax.Array:
    """Halve a number until it is below 1. The number of iterations depends on the value."""
    while x > 1:
        x = x / 2
    return jnp.sin(x)


def printed(x: jax.Array) -> jax.Array:
    """Print a number between operations."""
    y = x * x
    print(f"y = {y:.3f}")
    return jnp.sin(y)


def chosen(x: jax.Array) -> jax.Array:
    """Use a Python branch, and an index computed from a value."""
    place = int(x.sum()) % 3
    return x[place] ** 2 if x[0] > 0 else x.sum()


def works(grad: Any, f: Any, x: Any) -> bool | None:
    """Return whether a gradient equals finite differences in float64; None if it is refused."""
    x = np.asarray(x, np.float64)
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            got = np.asarray(grad(f)(jnp.asarray(x)))
        except (TypeError, jax.errors.JAXTypeError):
            return None
        eps = 1e-6
        want = np.zeros_like(x)
        for i in np.ndindex(x.shape):
            d = np.zeros_like(x)
            d[i] = eps
            want[i] = (f(jnp.asarray(x + d)) - f(jnp.asarray(x - d))) / (2 * eps)
    return bool(np.allclose(got, want, rtol=1e-6))


def measure(quick: bool) -> Finding:
    """Measure programs with Python code between operations, differentiated outside jit."""
    with jax.enable_x64():
        square = xform.grad(lambda x: jnp.sum(x**2))(jnp.array([1.0, 2.0]))
        cases: dict[str, tuple[Any, Any]] = {
            "while on a value": (halved, 5.3),
            "print of a value": (printed, 0.7),
            "if, int() of a value": (chosen, [0.5, 1.2, 2.9]),
        }
        rows = {name: [works(g, f, x) for g in (xform.grad, jax.grad)]
                for name, (f, x) in cases.items()}  # fmt: skip
    right = [name for name, (ours, _) in rows.items() if ours]
    refused = [name for name, (_, theirs) in rows.items() if theirs is None]
    return Finding(
        [
            Claim(
                "The gradient of x² at [1, 2], as an array, is [2, 4]",
                "tutorials of define-by-run libraries",
                "[2, 4]",
                str(np.asarray(square).tolist()),
                verdict(np.array_equal(square, [2.0, 4.0]), "wrong"),
            ),
            Claim(
                "Print, pdb and Python's control flow work between operations",
                "PyTorch's tutorials; Paszke et al., arXiv:1912.01703",
                "outside jit there are values; under jit there are none",
                f"right for {', '.join(right)}"
                + (f"; jax.grad refuses {', '.join(refused)}" if refused else ""),
                verdict(len(right) == len(rows), "holds for some"),
            ),
        ],
        lambda figure: draw(figure, rows),
    )


def draw(figure: Figure, rows: dict[str, list[bool | None]]) -> None:
    """Draw the table."""
    axes = figure.subplots()
    axes.axis("off")
    words = {True: "equals finite differences", False: "wrong", None: "refused"}
    cells = [[name, *(words[w] for w in found)] for name, found in rows.items()]
    table = axes.table([["", "xform.grad", "jax.grad"], *cells], loc="center", cellLoc="left")
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    table.scale(1, 1.6)
