"""The largest batch is one with which a run begins; with one more it does not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from models.errors import InputError
from models.run.train import step_memory
from models.train.config import RunConfig
from models.train.fit import Largest, largest
from models.train.planned import plan_step, policy_of
from tests.models.micro import MODEL, run

MIB = 2**20


def narrow(folder: Path, **changes: object) -> RunConfig:
    """A run of so short windows that it has no others."""
    return run(folder, model=dataclasses.replace(MODEL, context=1), **changes)


def found(config: RunConfig, memory: str | None = None) -> Largest:
    (one,) = largest(config, policy_of(config.policy), "cpu", memory)
    return one


def test_by_the_compiler_alone(tmp_path: Path) -> None:
    config = narrow(tmp_path)
    one = found(config, "2MiB")
    assert one.proven
    for batch, fits in ((one.batch, True), (one.batch + 1, False)):
        report = step_memory(dataclasses.replace(config, batch=batch), "cpu", "2MiB")
        assert report.fits is fits
        assert not fits or report.total_bytes == one.total_bytes


@pytest.mark.slow
def test_a_budget_is_of_the_whole_step(tmp_path: Path) -> None:
    config = narrow(tmp_path, policy="budget:1MiB")
    one = found(config, "1GiB")
    assert one.batch > found(narrow(tmp_path), "1MiB").batch  # that of the default
    assert one.total_bytes <= MIB
    begun = dataclasses.replace(config, batch=one.batch)
    assert plan_step(begun, policy_of(config.policy)).total_bytes <= MIB
    report = step_memory(begun, "cpu", None)
    assert report.total_bytes <= MIB
    if not one.proven:  # eight compilations were too few to know the next
        return
    more = dataclasses.replace(config, batch=one.batch + 1)
    for refused in (lambda: plan_step(more, policy_of(config.policy)),
                    lambda: step_memory(more, "cpu", None)):  # fmt: skip
        with pytest.raises(InputError, match="--policy budget:1MiB: the lowest peak"):
            refused()


@pytest.mark.slow
def test_auto_is_a_budget_of_all_memory(tmp_path: Path) -> None:
    given = found(narrow(tmp_path, policy="budget:1MiB"), "1GiB")
    whole = found(narrow(tmp_path, policy="auto"), "1MiB")
    assert dataclasses.astuple(whole) == dataclasses.astuple(given)


def test_devices_share_it(tmp_path: Path) -> None:
    config = narrow(tmp_path, mesh="data=4,fsdp=2")
    (one,) = largest(config, policy_of("default"), "cpu:8", "1MiB")
    assert one.batch % 8 == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["default", "budget:20KiB", "auto"])
def test_no_room(tmp_path: Path, policy: str) -> None:
    assert found(narrow(tmp_path, policy=policy), "30KiB").batch == 0
