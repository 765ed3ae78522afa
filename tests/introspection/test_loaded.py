"""Searching `sys.modules` runs no code and never fails, whatever its entries."""

import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive

import xform
from tests.odd_modules import ODD, put
from xform import commands
from xform.introspection import modules
from xform.introspection.loaded import loaded_modules, names_of
from xform.program import naming


def test_names_are_those_of_ordinary_modules() -> None:
    found = dict(loaded_modules())
    ordinary = {n: m for n, m in sys.modules.items() if type(m) is types.ModuleType}
    assert ordinary.keys() <= found.keys()
    assert all(found[name] is vars(module) for name, module in ordinary.items())
    assert names_of(Path) == vars(Path)


@pytest.mark.parametrize("name", ODD)
def test_an_odd_entry(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(name, tmp_path, monkeypatch)
    monkeypatch.setitem(sys.modules, 3, object())  # type: ignore[arg-type]
    grad = jax.grad
    # Every function of the library that searches the modules.
    with xform.install():
        assert jax.grad is not grad
    assert jax.grad is grad
    program = tmp_path / "program.py"
    program.write_text("import jax\nprint(float(jax.grad(lambda x: x * x)(3.0)))\n")
    assert commands.main(["run", str(program)]) == 0
    assert jax.grad is grad
    prim = Primitive("odd")
    assert naming.primitive_name(prim).startswith("odd@")
    f = lambda x: 2 * x
    f.__module__, f.__qualname__ = "odd", "f"
    assert not naming.is_importable(f)
    assert "with a rule" in commands.run(["rules", "--foreign"])
    monkeypatch.setitem(sys.modules, "equinox", sys.modules["odd"])
    assert modules.take_static_out_of_modules(f, (1.0,), modules.is_inexact_array) == (f, (1.0,))
    assert modules.arguments_for_jit(f, (1.0,), {}) == (f, (1.0,), {})
    assert xform.grad(f)(jnp.array(3.0)) == 2.0
