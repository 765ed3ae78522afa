"""Traits as words."""

from xform.registry.traits import ELEMENTWISE, EXPENSIVE, PLAIN, Traits, none


def test_traits_that_differ_from_their_defaults_are_named() -> None:
    assert PLAIN.named == []
    assert ELEMENTWISE.named == ["elementwise"]
    assert EXPENSIVE.named == ["elementwise", "expensive"]
    assert Traits(foldable=False, calls="region").named == ["not foldable", "calls=region"]
    assert Traits(flops=none).named == ["own flops"]


def test_traits_are_equal_if_they_differ_only_in_functions() -> None:
    count = lambda eqn: 1.0
    for name in ("flops", "bytes", "lowered", "dependence"):
        assert Traits(**{name: count}) == PLAIN
        assert hash(Traits(**{name: count})) == hash(PLAIN)
    assert EXPENSIVE != ELEMENTWISE != PLAIN
