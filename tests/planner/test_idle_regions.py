"""Remat regions that change nothing: a warning names the line, and is true."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import xform
from xform import policies

WS = jax.ShapeDtypeStruct((3, 8, 8), jnp.float32)
X = jax.ShapeDtypeStruct((4, 8), jnp.float32)


def in_a_scan(layer: Callable[..., Any]) -> Callable[..., Any]:
    return lambda ws, x: jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0].sum()


def product(mark: Callable[..., Any]) -> Callable[..., Any]:
    """A region of a product, which needs only its arguments in the backward pass."""
    return in_a_scan(lambda x, w: jnp.tanh(mark(jnp.matmul)(x, w)))


def layer(mark: Callable[..., Any]) -> Callable[..., Any]:
    """A region with values that are saved without it."""
    return in_a_scan(lambda x, w: mark(lambda x, w: jnp.tanh(jnp.tanh(x @ w) @ w))(x, w))


def asked_warnings(asked: Callable[..., Any], f: Any, policy: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        asked(f, policy)
    return [str(w.message) for w in found if "changes nothing" in str(w.message)]


@pytest.fixture(params=["residuals", "memory_analysis", "jit"])
def asked(request: Any) -> Callable[..., Any]:
    def ask(f: Any, policy: Any) -> None:
        if request.param == "residuals":
            xform.residuals(f, WS, X, policy=policy)
        elif request.param == "memory_analysis":
            xform.memory_analysis(xform.grad(f, policy=policy), WS, X)
        else:
            xform.jit(lambda ws, x: xform.grad(f)(ws, x), policy).lower(WS, X)

    return ask


@pytest.mark.parametrize("mark", [jax.checkpoint, xform.remat])
def test_a_region_that_changes_nothing(asked: Any, mark: Any) -> None:
    (text,) = asked_warnings(asked, product(mark), policies.min_cut)
    line = product.__code__.co_firstlineno + 2
    assert f"test_idle_regions.py:{line}" in text


def test_a_region_that_changes_something(asked: Any) -> None:
    assert not asked_warnings(asked, layer(jax.checkpoint), policies.min_cut)


@pytest.mark.parametrize("policy", ["min_cut", "save_everything", "save_dots", "save_nothing"])
@pytest.mark.parametrize("build", [product, layer])
@pytest.mark.parametrize("saves", ["everything_saveable", "dots_saveable", "nothing_saveable"])
def test_the_warning_is_true(build: Any, saves: str, policy: str) -> None:
    mark = lambda f: jax.checkpoint(f, policy=getattr(jax.checkpoint_policies, saves))
    ask = lambda f, policy: xform.residuals(f, WS, X, policy=policy)
    warned = asked_warnings(ask, build(mark), policy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        marked, plain = (ask(build(m), policy) for m in (mark, lambda f: f))
    rows = [sorted((r.type, r.loops) for r in t if r.kind != "argument") for t in (marked, plain)]
    if warned:
        assert rows[0] == rows[1]


@pytest.mark.parametrize("policy", ["budget:1GiB", "open:min_cut", "save_nothing"])
def test_policies_under_which_no_mark_is_compared(policy: str) -> None:
    ask = lambda f, policy: xform.residuals(f, WS, X, policy=policy)
    assert not asked_warnings(ask, product(jax.checkpoint), policy)
