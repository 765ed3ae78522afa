"""Traits as words."""

from xform.registry.traits import ELEMENTWISE, EXPENSIVE, PLAIN, Traits, none


def test_traits_that_differ_from_their_defaults_are_named() -> None:
    assert PLAIN.named == []
    assert ELEMENTWISE.named == ["elementwise"]
    assert EXPENSIVE.named == ["elementwise", "expensive"]
    assert Traits(foldable=False, calls="region").named == ["not foldable", "calls=region"]
    assert Traits(flops=none).named == ["own flops"]
