"""From `--policy` to a compiled step: budgets of the whole of it, by its compiler."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import chex
import jax
import pytest

import xform
from models.errors import InputError
from models.run.train import step_memory
from models.settings import replaced
from models.train.planned import PlannedStep, plan_step, policy_of
from models.train.state import init_state
from tests.models import examples
from tests.models.micro import MODEL, run


def planned(folder: Path, policy: str, **options: Any) -> Any:
    return plan_step(run(folder, policy=policy, **options), policy_of(policy))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_budget_bounds_the_whole_step(tmp_path: Path, accumulate: int) -> None:
    usual = planned(tmp_path, "min_cut", batch=64, accumulate=accumulate)
    tight = planned(tmp_path, f"budget:{int(0.9 * usual.total_bytes)}", batch=64,
                    accumulate=accumulate)  # fmt: skip
    assert tight.plan.compiled_bytes == tight.total_bytes <= 0.9 * usual.total_bytes
    assert "the whole step, on each device:" in str(tight)


def test_a_budget_that_the_default_keeps_has_the_default(tmp_path: Path) -> None:
    usual = planned(tmp_path, "min_cut")
    ample = planned(tmp_path, f"budget:{usual.total_bytes}")
    assert ample.total_bytes == usual.total_bytes
    assert ample.plan.record == usual.plan.record


@pytest.mark.parametrize(
    ("kind", "what"), [("budget", "the lowest peak"), ("saved", "the fewest bytes of saved values")]
)
def test_a_bound_that_nothing_keeps_names_one_that_is_kept(
    tmp_path: Path, kind: str, what: str
) -> None:
    with pytest.raises(InputError) as raised:
        planned(tmp_path, f"{kind}:1KiB")
    said = str(raised.value)
    assert said.startswith(f"--policy {kind}:1KiB: {what}")
    enough = said.partition("use --policy ")[2].partition(",")[0]
    assert enough.startswith(f"{kind}:")
    assert planned(tmp_path, enough).total_bytes > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", examples.MODELS)
def test_a_policy_changes_no_number_of_any_kind(tmp_path: Path, name: str) -> None:
    """Each step is weighed without being made as it is compiled, and a plan's file is that plan."""
    usual = examples.run(tmp_path, examples.MODELS[name], batch=32, accumulate=2)
    some = examples.batches(usual, 2)

    def stepped(policy: str) -> tuple[PlannedStep, list[dict[str, Any]]]:
        config = dataclasses.replace(usual, policy=policy)
        made = plan_step(config, policy_of(policy))
        assert step_memory(config, None, None).total_bytes == made.total_bytes
        state, found = init_state(config.model, config.optim, 0), []
        for batch in some:
            state, metrics = made.step(state, batch)
            found.append(jax.device_get(metrics))
        return made, found

    default, expected = stepped("min_cut")
    assert all(metrics["grad_norm"] > 0 for metrics in expected)
    path = tmp_path / "plan.json"
    stepped("save_nothing")[0].save(path)
    bound = int(0.97 * default.total_bytes)
    for policy in ("save_nothing", "auto", f"plan:{path}", f"budget:{bound}"):
        made, found = stepped(policy)
        chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)
        if policy.startswith("budget"):
            assert made.total_bytes <= bound
        if policy.startswith("plan"):
            assert made.plan.record == xform.Plan.load(path).record


def test_the_memory_of_the_device_is_a_budget(tmp_path: Path) -> None:
    assert planned(tmp_path, "auto").total_bytes == planned(tmp_path, "min_cut").total_bytes


TEXTS = ("min_cut", "save_nothing", "saved:1kB", "save_only_these_names:a+b", "auto", "budget:1MiB",
         "open:min_cut")  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_both_settings_read_the_texts_of_policies(text: str) -> None:
    assert policy_of(text) == xform.policies.parse(text)
    if text in TEXTS[:4]:
        replaced(MODEL, {"remat": text})
    else:
        with pytest.raises(InputError, match=r"for a whole function|has no peak of its own"):
            replaced(MODEL, {"remat": text})


def test_an_unknown_policy_of_either_setting() -> None:
    for read in (lambda text: policy_of(text), lambda text: replaced(MODEL, {"remat": text})):
        with pytest.raises(InputError, match="did you mean 'save_dots'") as caught:
            read("savedots")
        assert "\n" not in str(caught.value)
        assert "budget:6GiB" in str(caught.value)
