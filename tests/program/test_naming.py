"""Names of primitives that are not JAX's."""

import sys
import types

import jax
import pytest
from jax.extend.core import Primitive

from xform.program.naming import primitive_name


def test_a_primitive_has_the_name_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("a_module_of_primitives")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    first, second, nowhere = (Primitive("twice") for _ in range(3))
    module.twice_p = first
    assert primitive_name(first) == "twice@a_module_of_primitives.twice_p"
    module.twice_p = second  # as when a module is loaded again
    assert primitive_name(second) not in (primitive_name(first), primitive_name(nowhere))
    assert primitive_name(second).startswith("twice@")
    assert "a_module" not in primitive_name(second)
    assert primitive_name(jax.lax.sin_p) == "sin"
