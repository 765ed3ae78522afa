"""From `--policy` to a compiled step: budgets of the whole of it, by its compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from models.errors import InputError
from models.train.planned import plan_step, policy_of
from tests.models.micro import run


def planned(folder: Path, policy: str, **options: Any) -> Any:
    return plan_step(run(folder, policy=policy, **options), policy_of(policy))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_budget_bounds_the_whole_step(tmp_path: Path, accumulate: int) -> None:
    usual = planned(tmp_path, "default", batch=64, accumulate=accumulate)
    tight = planned(tmp_path, f"budget:{int(0.9 * usual.total_bytes)}", batch=64,
                    accumulate=accumulate)  # fmt: skip
    assert tight.plan.compiled_bytes == tight.total_bytes <= 0.9 * usual.total_bytes
    assert "the whole step:" in str(tight)


def test_a_budget_that_the_default_keeps_has_the_default(tmp_path: Path) -> None:
    usual = planned(tmp_path, "default")
    ample = planned(tmp_path, f"budget:{usual.total_bytes}")
    assert ample.total_bytes == usual.total_bytes
    assert ample.plan.record == usual.plan.record


@pytest.mark.parametrize(
    ("kind", "what"), [("budget", "the lowest peak"), ("saved", "the fewest bytes that wait")]
)
def test_a_bound_that_nothing_keeps_names_one_that_is_kept(
    tmp_path: Path, kind: str, what: str
) -> None:
    with pytest.raises(InputError) as raised:
        planned(tmp_path, f"{kind}:1KiB")
    said = str(raised.value)
    assert said.startswith(f"--policy {kind}:1KiB: {what}")
    enough = said.partition("give --policy ")[2].partition(",")[0]
    assert enough.startswith(f"{kind}:")
    assert planned(tmp_path, enough).total_bytes > 0


def test_the_memory_of_the_device_is_a_budget(tmp_path: Path) -> None:
    assert planned(tmp_path, "auto").total_bytes == planned(tmp_path, "default").total_bytes
