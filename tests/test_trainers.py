"""Trainers of other people, unmodified, under `xform run`: each in an environment of its own."""

import pytest

from experiments.trainers import unmodified


@pytest.mark.slow
@pytest.mark.parametrize("trainer", unmodified.TRAINERS)
def test_the_losses_are_those_of_jax(trainer: str) -> None:
    if reason := unmodified.missing(trainer):
        pytest.skip(reason)
    found = unmodified.measure(trainer)
    assert found["jax"]["exit"] == 0, found["jax"]["errors"]
    assert found["xform"]["exit"] == 0, found["xform"]["errors"]
    assert len(found["jax"]["losses"]) >= unmodified.STEPS - 1
    assert unmodified.difference(found) <= unmodified.TOLERANCE
    assert found["xform"]["rows"], "the table of xform run names no derivative"


def test_a_row_of_the_table_that_xform_run_prints() -> None:
    row = unmodified.ROW.fullmatch(
        "_default_loss_fn  tunix/sft/peft_trainer.py:853  value_and_grad       2      0   23.7 MiB"
        "      8.8 MiB      0 FLOP  min_cut"
    )
    assert row is not None
    assert row["line"] == "tunix/sft/peft_trainer.py:853"
    assert (row["jax"], row["xform"], row["flops"]) == ("23.7 MiB", "8.8 MiB", "0 FLOP")


def test_an_environment_that_is_absent_is_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(unmodified, "ENVIRONMENTS", tmp_path)
    assert f"needs an environment in {tmp_path / 'keras'}" in unmodified.missing("keras_gpt")
