"""Exports to MaxText and Tunix."""

import re

import pytest

from xform.errors import WrongArgument
from xform.names.name_plan import NamePlan
from xform.names.name_set import NamedValue, NameSet, WeighedNames
from xform.names.trainers import MAXTEXT_NAMES

MIB = 2**20


def plan_of(saved=(), offloaded=(), recomputed=(), everything=900):
    names = NameSet(frozenset(saved), frozenset(offloaded))
    values = tuple(NamedValue(n, MIB, "model.py:1:1 (layer)")
                   for n in (*saved, *offloaded, *recomputed))  # fmt: skip
    weighed = lambda size, flops: WeighedNames(NameSet(), flops, 0, size * MIB)
    return NamePlan("step", "budget:512MiB", "cpu", names, values, 500 * MIB, 10**9, 3, 1.0, 2.0,
                    weighed(300, 4 * 10**9), weighed(everything, 0), 512 * MIB)  # fmt: skip


def test_maxtext_has_a_setting_for_each_name() -> None:
    plan = plan_of(["query_proj"], ["mlpwi_0"], ["mlpwo", "my_own_name"])
    assert plan.maxtext() == {
        "remat_policy": "custom",
        "decoder_layer_input": "remat",
        "query_proj": "device",
        "mlpwi_0": "offload",
        "mlpwo": "remat",
    }
    assert plan_of(["decoder_layer_input"]).maxtext()["decoder_layer_input"] == "device"


def test_maxtext_makes_the_same_policy() -> None:
    """What MaxText does with the settings (`configs/types.py`, `layers/nnx_decoders.py`)."""
    plan = plan_of(["query_proj", "mlpwo"], ["mlpwi_0"], ["key_proj"])
    config = {"decoder_layer_input": "device", **dict.fromkeys(MAXTEXT_NAMES, "remat")}
    config |= plan.maxtext()
    on_device = {n for n in MAXTEXT_NAMES if config[n] == "device"}
    assert on_device == plan.names.saved
    assert {n for n in MAXTEXT_NAMES if config[n] == "offload"} == plan.names.offloaded


def test_a_name_that_maxtext_does_not_know_is_an_error() -> None:
    with pytest.raises(WrongArgument, match=r"MaxText has no setting for 'my_name', 'other'"):
        plan_of(["query_proj", "other"], ["my_name"]).maxtext()


def test_tunix_has_a_setting_only_for_a_plan_that_saves_nothing() -> None:
    assert plan_of(recomputed=["query_proj"]).tunix() == {"remat_config": "DECODER"}
    with pytest.raises(WrongArgument, match=r"DECODER: it takes 300\.0 MiB") as error:
        plan_of(["query_proj"]).tunix()
    assert "recomputes 4.0 GFLOP" in error.value.remedy
    with pytest.raises(WrongArgument, match=r"NONE: it takes 400\.0 MiB"):
        plan_of(["query_proj"], everything=400).tunix()


def test_the_code_needs_only_jax() -> None:
    for plan in (plan_of(["a"], recomputed=["b"]), plan_of(["a"], ["b"]), plan_of()):
        assert len(plan.as_code().splitlines()) <= 10
        assert re.findall(r"^import (\w+)", plan.as_code(), re.MULTILINE) == ["jax"]
        space = {"layer": lambda x: x}
        exec(plan.as_code(), space)
        assert callable(space["policy"])


def test_a_plan_prints_its_decisions() -> None:
    text = str(plan_of(["a"], ["b"], ["c"]))
    rows = [line.split()[:2] for line in text.splitlines()[2:5]]
    assert rows == [["a", "SAVE"], ["b", "OFFLOAD"], ["c", "RECOMPUTE"]]
