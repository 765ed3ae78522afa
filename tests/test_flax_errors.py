"""`xform.flax` as decorators, and the arguments that it refuses."""

import functools
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import xform
from tests.nnx import GRAPH, MODES, TREE, Mlp, Plain, X, loss, same
from xform.errors import NotScalar, WrongArgument, WrongDtype, WrongTangent

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_decorators() -> None:
    @xform.flax.value_and_grad(argnums=1, policy=xform.policies.save_dots)
    def f(model: Mlp, x: jax.Array) -> jax.Array:
        """Its docstring."""
        return loss(model, x)

    assert (f.__name__, f.__doc__) == ("f", "Its docstring.")
    same(f(Mlp(), X), nnx.value_and_grad(loss, argnums=1)(Mlp(), X))
    assert jnp.isfinite(xform.flax.grad(has_aux=False)(loss)(Mlp(), X).leave.bias[...]).all()


def test_errors() -> None:
    model = Mlp()
    with pytest.raises(NotScalar, match=r"value_and_grad of __call__.*\n.*shape \(4, 2\)"):
        xform.flax.value_and_grad(Mlp.__call__)(model, X)
    with pytest.raises(NotScalar, match=r"returned a Variable or a module"):
        xform.flax.grad(lambda model: model.leave.bias)(model)
    nothing = r"nothing to differentiate\n(.*\n)*.*RngCount(.*\n)*.*DiffState"
    with pytest.raises(WrongArgument, match=nothing):
        xform.flax.grad(lambda rngs: rngs.uniform(()))(nnx.Rngs(0))
    with pytest.raises(WrongArgument, match="nothing to differentiate"):
        xform.flax.grad(loss, nnx.DiffState(0, nnx.Cache))(model, X)
    with pytest.raises(WrongArgument, match=r"grad of Mlp.__call__(.*\n)*.*bound to a Mlp"):
        xform.flax.grad(model.__call__)
    with pytest.raises(WrongArgument, match="bound to a Mlp"):
        xform.flax.remat(functools.partial(model.__call__, x=X))
    with pytest.raises(WrongArgument, match="not a pair"):
        xform.flax.grad(loss, has_aux=True)(model, X)
    with pytest.raises(WrongArgument, match="twice"):
        xform.flax.grad(loss, (0, -2))(model, X)
    with pytest.raises(WrongArgument, match="2 positional arguments"):
        xform.flax.grad(loss, nnx.DiffState(2, nnx.Param))(model, X)
    with pytest.raises(WrongArgument, match=r"with an nnx.DiffState in argnums"):
        xform.flax.grad(loss, nnx.DiffState(0, nnx.Param), **GRAPH)
    for door in (xform.flax.vjp, xform.flax.jvp):
        with pytest.raises(WrongArgument, match="graph_updates=True"):
            door(loss, (model, X), (model, X), graph_updates=True)
    with pytest.raises(WrongDtype, match="allow_int"):
        xform.flax.grad(loss, **TREE)(Mlp(dropout=0.5), X)
    with pytest.raises(WrongTangent):
        xform.flax.jvp(loss, (Plain(), X), (X, X))
    with pytest.raises(WrongArgument, match="polic"):
        xform.flax.remat(loss, policy="nothing")


@MODES
@pytest.mark.parametrize("argnums", [(0, 0), "a", 1.5, None, ("a",), X, nnx.StateAxes({...: 0})])
def test_invalid_argnums_raise_when_grad_is_constructed(argnums: Any, modes: Any) -> None:
    for door in (xform.flax.grad, xform.flax.value_and_grad):
        with pytest.raises(WrongArgument, match="argnums"):
            door(loss, argnums, **modes)


def test_a_module_that_is_closed_over_cannot_be_changed() -> None:
    model = Plain()
    with pytest.raises(Exception, match="trace level"):
        xform.flax.grad(lambda x: model(x).sum())(X)


def test_without_flax() -> None:
    """`import xform` works without Flax, and `xform.flax` says how to install it."""
    code = """
import sys
import xform
assert "flax" not in sys.modules
sys.modules["flax"] = None  # as if it were not installed
try:
    xform.flax
except xform.errors.XformError as e:
    print(e)
try:
    xform.nothing
except AttributeError as e:
    print(e)
"""
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ).stdout  # fmt: skip
    assert "pip install 'jax-xform[train]'" in out
    assert "has no attribute 'nothing'" in out


class _Dropped(nnx.Module):
    """A module whose random keys are integers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear, self.dropout = nnx.Linear(3, 2, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(x)).sum()


@pytest.mark.parametrize("ask", [
    lambda f, m, x: xform.grad(f)(m, x),
    lambda f, m, x: jax.jit(xform.value_and_grad(f))(m, x),
    lambda f, m, x: xform.jacrev(f)(m, x),
])  # fmt: skip
def test_a_module_with_integers_is_refused_by_name(ask) -> None:
    module, x = _Dropped(nnx.Rngs(0)), jnp.ones((4, 3))
    with pytest.raises(
        WrongDtype, match=r"(?s)of a Flax NNX module, _Dropped.*use xform.flax.grad, or"
    ):
        ask(lambda m, x: m(x), module, x)
