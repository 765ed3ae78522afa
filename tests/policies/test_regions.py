"""Policies that open remat regions: which ones, under which names, and where they are refused."""

import jax.numpy as jnp
import pytest

import xform
from xform import policies
from xform.errors import WrongArgument
from xform.planner.device import planning_for, resolve_fit


@pytest.mark.parametrize("policy", [policies.min_cut, policies.budget("1 MiB"), policies.fit(),
                                    policies.budget(8, of="saved")])  # fmt: skip
def test_open_regions_of_whole_program_policies(policy) -> None:
    opened = policies.open_regions(policy)
    assert (policy.regions, opened.regions) == ("marked", "open")
    assert repr(opened) == f"open_regions({policy!r})"
    assert policies.open_regions(opened) == opened != policy


@pytest.mark.parametrize("text", ["min_cut", "auto", "budget:8GiB", "saved:100kB"])
def test_by_name(text) -> None:
    opened = policies.parse(f"open:{text}")
    assert opened == policies.open_regions(policies.parse(text))
    if text != "auto":
        assert eval(policies.as_code(opened), {"xform": xform}) == opened


def test_the_budget_of_a_device_opens_them_too() -> None:
    assert policies.open_regions(policies.fit()).within(10, "v5e").regions == "open"


def test_auto_is_a_fit() -> None:
    assert policies.open_regions("auto") == policies.open_regions(policies.fit())


def test_where_no_memory_is_known_they_are_opened_too() -> None:
    with planning_for("cpu", "cpu"):  # an unknown kind of device
        assert resolve_fit(policies.open_regions(policies.fit())) == policies.open_regions()
        assert resolve_fit(policies.fit()) == policies.min_cut


@pytest.mark.parametrize("policy", [policies.save_dots, policies.save_only_these_names("a")])
def test_others_are_refused(policy) -> None:
    with pytest.raises(WrongArgument, match=r"one value at a time(.|\n)*use min_cut"):
        policies.open_regions(policy)


def test_a_region_opens_none() -> None:
    with pytest.raises(WrongArgument, match=r"not for one region(.|\n)*xform\.grad"):
        xform.remat(jnp.sin, policy=policies.open_regions())


def test_a_text_that_opens_no_policy() -> None:
    with pytest.raises(WrongArgument, match="no policy has the name 'most'"):
        policies.parse("open:most")
