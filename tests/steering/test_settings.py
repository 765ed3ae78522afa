"""Each part that steers XLA has a switch, which an experiment measures."""

import dataclasses

from experiments.steering.run import ROWS
from xform.steering.settings import Steering, steering


def test_the_experiment_measures_each_switch() -> None:
    assert {row.switch for row in ROWS} == {field.name for field in dataclasses.fields(Steering)}


def test_switches_are_restored_after_an_error() -> None:
    try:
        with Steering(draws_wait=False).used():
            assert not steering().draws_wait
            raise KeyError
    except KeyError:
        assert steering() == Steering()
