"""Each example runs, is short, and reaches its bar."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "experiments/examples"
NAMES = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
LINES = 80

# The bar of each example.
BARS: dict[str, Callable[[Any], bool]] = {
    "fine_tune": lambda r: r[0] <= 4 * 2**30 < r[1] and r[2][1] < r[2][0],
    "hessian_free": lambda r: r[1] < 0.01 * r[0] and r[1] < r[2],
    "hyperparameters": lambda r: r[0] < 1.02 * r[1],
    "implicit": lambda r: r < 1e-7,
    "long_lstm": lambda r: r[0] < 0.05 and r[1] < 1e-4,
    "meta_learning": lambda r: r[1] < 0.5 * r[0] and r[2] < 0.03,
    "neural_ode": lambda r: r[1] < 0.01 * r[0],
    "pair_attention": lambda r: r[0] <= 0.4 and r[1] < 0.2,
    "pinn": lambda r: r < 0.02,
    "reinforcement": lambda r: r < 0.05,
}


def test_each_is_short_and_has_a_bar() -> None:
    assert set(BARS) == set(NAMES)
    for name in NAMES:
        assert len((FOLDER / f"{name}.py").read_text().splitlines()) < LINES, name


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_each_example_reaches_its_bar(name: str) -> None:
    result = importlib.import_module(f"experiments.examples.{name}").main()
    assert BARS[name](result), result
