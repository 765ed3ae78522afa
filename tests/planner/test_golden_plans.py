"""The plans of 52 programs are those of `golden_plans.json`.

The rules, the simulation, the costs, the cuts and the slices all have a part in these numbers. If
they change on purpose, write the file again and look at the difference: `golden_plans.py`.
"""

import json

import pytest

from tests.planner.golden_plans import FILE, REPORTS, VERSION, numbers

GOLDEN = json.loads(FILE.read_text())


@pytest.mark.skipif(VERSION not in GOLDEN, reason="no numbers for this version of JAX")
@pytest.mark.parametrize("name", REPORTS)
def test_plans_are_the_stored_ones(name: str) -> None:
    assert numbers(name) == GOLDEN[VERSION][name]
