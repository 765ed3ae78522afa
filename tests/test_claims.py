"""The table of claims: every module is in it, with its verdicts and its plot."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.claims.chains import forward, least, reverse
from experiments.claims.claim import HOLDS, exponent, verdict
from experiments.claims.run import HERE, MODULES, PLOTS, measured

SHARED = {"__init__", "claim", "programs", "run"}


def test_every_module_is_run() -> None:
    assert {path.stem for path in HERE.glob("*.py")} - SHARED == set(MODULES)


def test_every_measured_claim_has_a_readme_row_a_verdict_and_a_plot() -> None:
    readme = (HERE / "README.md").read_text()
    results = json.loads((HERE / "results.json").read_text())
    assert set(results) <= set(MODULES)
    for name, found in results.items():
        assert Path(PLOTS / f"{name}.png").is_file(), name
        for claim in found["claims"]:
            assert claim["claim"].replace("|", "\\|") in readme
            assert claim["verdict"].startswith((HOLDS, "wrong"))


def test_exponents_and_verdicts() -> None:
    xs = np.array([1.0, 2.0, 4.0, 8.0])
    assert exponent(xs, 3 * xs**1.5) == pytest.approx(1.5)
    assert verdict(1 < 2, "wrong") == HOLDS != verdict(1 > 2, "wrong")


def test_chains_by_hand() -> None:
    """The example of Cormen et al., "Introduction to Algorithms", section 15.2."""
    sizes = [30, 35, 15, 5, 10, 20, 25]
    assert least(sizes) == 15_125
    assert forward([10, 512, 8, 512, 10]) == reverse([10, 512, 8, 512, 10]) == 133_120
    assert least([10, 512, 8, 512, 10]) == 82_720


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        "gradient_cost",
        "jacobian_cost",
        "every_k",
        "hand_written",
        "worked_graphs",
        "remedies",
        "inner_values",
        "hand_written_networks",
        "column_by_column",
        "residual_paths",
        "one_pass",
        "hessian_uses",
    ],
)
def test_claims_that_theory_proves_hold(name: str) -> None:
    first, *_ = measured(name, quick=True).claims
    assert first.verdict.startswith(HOLDS), first
