"""The sets of names that a search chooses from."""

import itertools

import pytest

from xform.names.name_set import NamedValue, NameSet, WeighedNames, explore, pareto


def costs(spared, sizes):
    """Return a function that weighs sets whose names each spare FLOPs and take bytes."""
    seen = []

    def weigh(names):
        seen.append(names)
        flops = sum(f for n, f in spared.items() if n not in names.saved | names.offloaded)
        size = sum(sizes[n] for n in names.saved)
        return WeighedNames(names, flops, sum(sizes[n] for n in names.offloaded), 100 + size)

    return weigh, seen


def explored(spared, sizes, may_offload=lambda names: not names.offloaded):
    weigh, seen = costs(spared, sizes)
    values = [NamedValue(n, size, "") for n, size in sizes.items()]
    return explore(values, weigh, may_offload), seen


def saved(weighed):
    return {frozenset(each.names.saved) for each in weighed}


def test_all_subsets_of_a_few_names_are_weighed_once() -> None:
    sizes = {"a": 1, "b": 2, "c": 4, "useless": 8}
    weighed, seen = explored({"a": 1, "b": 5, "c": 3, "useless": 0}, sizes,
                             may_offload=lambda names: False)  # fmt: skip
    subsets = {frozenset(s) for n in range(4) for s in itertools.combinations("abc", n)}
    assert subsets <= saved(weighed)
    assert len(seen) == len(set(seen))
    assert [each.work for each in weighed] == sorted(each.work for each in weighed)


def test_many_names_are_added_by_flops_per_byte() -> None:
    names = "abcdefgh"
    spared = {n: 10 * (i + 1) for i, n in enumerate(names)}
    weighed, seen = explored(spared, dict.fromkeys(names, 1), may_offload=lambda names: False)
    best = [frozenset(names[i:]) for i in range(len(names) + 1)]
    assert set(best) <= saved(weighed)
    assert len(seen) < 60
    assert saved(pareto(weighed)) == set(best)


def test_the_largest_values_of_a_set_are_offloaded() -> None:
    sizes = {"a": 1, "b": 2}
    weighed, _ = explored({"a": 1, "b": 1}, sizes, may_offload=lambda names: bool(names.offloaded))
    offloaded = {(tuple(w.names.saved), tuple(w.names.offloaded)) for w in weighed
                 if w.names.offloaded}  # fmt: skip
    assert (("a",), ("b",)) in offloaded
    assert (("b",), ("a",)) not in offloaded


def test_the_front_has_falling_bytes_and_rising_work() -> None:
    make = lambda flops, size: WeighedNames(NameSet(frozenset({f"{flops}"})), flops, 0, size)
    front = pareto([make(3, 5), make(1, 9), make(2, 9), make(4, 6), make(5, 1)])
    assert [(each.recompute_flops, each.peak) for each in front] == [
        (1, 9), (3, 5), (5, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("offloaded", [(), ("b",)])
def test_the_policy_is_one_of_jax(offloaded) -> None:
    policy = NameSet(frozenset({"a"}), frozenset(offloaded)).policy()
    assert type(policy).__module__.startswith("jax") or policy.__module__.startswith("jax")
