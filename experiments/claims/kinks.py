"""Derivatives at points that have none: kinks and ties."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, verdict

CASES: dict[str, tuple[Callable[[Any], Any], list[float], str]] = {
    "relu(0)": (lambda x: jax.nn.relu(x).sum(), [0.0], "relu(x).sum()"),
    "abs(0)": (lambda x: jnp.abs(x).sum(), [0.0], "abs(x).sum()"),
    "max of a tie": (jnp.max, [1.0, 1.0, 0.0], "amax(x)"),
    "maximum(x, y), a tie": (lambda x: jnp.maximum(x[0], x[1]), [1.0, 1.0], "maximum(x[0], x[1])"),
    "min of a tie": (jnp.min, [0.0, 0.0, 1.0], "amin(x)"),
    "largest of sort, a tie": (lambda x: jnp.sort(x)[-1], [1.0, 1.0, 0.0], "sort(x).values[-1]"),
    "clip at its bound": (lambda x: jnp.clip(x, 0.0, 1.0).sum(), [0.0], "clamp(x, 0.0, 1.0).sum()"),
    "sqrt(0)": (lambda x: jnp.sqrt(x).sum(), [0.0], "sqrt(x).sum()"),
    "norm of 0": (jnp.linalg.norm, [0.0, 0.0], "linalg.norm(x)"),
}


def of_torch(text: str, at: list[float]) -> Any:
    """Return PyTorch's derivative, if PyTorch is installed."""
    torch: Any = importlib.import_module("torch")
    x = torch.tensor(at, dtype=torch.float64, requires_grad=True)
    value = eval(text, {**vars(torch), "x": x})
    return torch.autograd.grad(value, x)[0].numpy()


def shown(values: Any) -> str:
    """Return numbers as short text."""
    return " ".join(f"{v:.3g}" for v in np.ravel(values))


def measure(quick: bool) -> Finding:
    """Measure each case with xform, with JAX, and with PyTorch if it is installed."""
    there = importlib.util.find_spec("torch") is not None
    rows: list[list[str]] = []
    with jax.enable_x64():
        for name, (f, at, text) in CASES.items():
            x = jnp.asarray(at, jnp.float64)
            theirs = shown(of_torch(text, at)) if there else "not installed"
            rows.append([name, shown(xform.grad(f)(x)), shown(jax.grad(f)(x)), theirs])
    as_jax = [row[1] == row[2] for row in rows]
    apart = [f"{row[0]} ({row[1]}, PyTorch {row[3]})" for row in rows if there and row[1] != row[3]]
    relu = rows[0][1]
    return Finding(
        [
            Claim(
                "The derivative of relu at 0 is 0",
                "convention; Bertoin et al., arXiv:2106.12915",
                "any number from 0 to 1 is a subgradient",
                f"{relu} by xform, {rows[0][2]} by JAX, {rows[0][3]} by PyTorch",
                verdict(relu == "0", "wrong"),
            ),
            Claim(
                "At ties of max, min and sort and at the kinks of abs, clip, sqrt and norm, xform"
                " gives what JAX gives",
                "xform's README: nothing breaks",
                "the same number in every case",
                f"{sum(as_jax)} of {len(rows)} equal; of PyTorch "
                + (
                    "others: " + "; ".join(apart)
                    if apart
                    else "all equal"
                    if there
                    else "nothing is known here: it is not installed"
                ),
                verdict(all(as_jax), "wrong"),
            ),
        ],
        lambda figure: draw(figure, rows),
    )


def draw(figure: Figure, rows: list[list[str]]) -> None:
    """Draw the table."""
    axes = figure.subplots()
    axes.axis("off")
    table = axes.table([["", "xform", "JAX", "PyTorch"], *rows], loc="center", cellLoc="left")
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    table.scale(1, 1.3)
