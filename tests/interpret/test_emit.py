"""The scopes of emitted operations. Profiles use them to tell the parts of a program apart."""

import gc
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import xform
from xform.interpret import emit
from xform.program import ir


def mlp(w: jax.Array, x: jax.Array) -> jax.Array:
    with jax.named_scope("mlp"):
        return jnp.sum(jnp.sin(jnp.exp(x @ w) @ w))


def scopes(f: object, *args: object) -> set[str]:
    """Return the scopes of all operations of the lowered program."""
    text = jax.jit(f).lower(*args).as_text(debug_info=True)  # type: ignore[arg-type]
    return set(re.findall(r'loc\("jit\([^)]*\)/([^"]*)"', text))


W, X = jnp.ones((8, 8)), jnp.ones((4, 8))


def test_backward_and_recompute() -> None:
    found = scopes(xform.grad(mlp, policy=xform.policies.save_dots), W, X)
    saved = r"xform\(saved: save_dots saves dot_general\)/(mlp/)+dot_general"
    assert any(re.fullmatch(saved, s) for s in found)
    assert not any("saved" in s and "dot_general" not in s for s in found)
    assert any(re.fullmatch(r"xform\(backward\)/xform\(recompute\)/(mlp/)+exp", s) for s in found)
    assert any(re.fullmatch(r"xform\(backward\)/(mlp/)+dot_general", s) for s in found)
    assert not any("recompute" in s and "dot_general" in s for s in found)


def test_scope_of_a_value_saved_by_name_contains_its_name() -> None:
    named = lambda w: jnp.sum(jnp.sin(checkpoint_name(jnp.exp(X @ w), "a/b")))
    found = scopes(xform.grad(named, policy=xform.policies.save_only_these_names("a/b")), W)
    assert "xform(saved: save_only_these_names:a/b saves a/b)/exp" in found


def test_tangents() -> None:
    found = scopes(lambda w: xform.linearize(lambda w: mlp(w, X), w)[1](w), W)
    assert any(s.startswith("xform(tangent)/") for s in found)
    assert not any("xform(backward)" in s for s in found)


def test_a_loop_keeps_its_scope_and_its_line() -> None:
    def loss(ws: jax.Array, x: jax.Array) -> jax.Array:
        with jax.named_scope("stack"):
            return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0])

    text = jax.jit(xform.grad(loss)).lower(jnp.ones((3, 8, 8)), X).as_text(debug_info=True)
    assert re.search(r"stack/(stack/)*while", text)
    assert re.search(r"xform\(backward\)/(stack/)+while", text)


def test_a_region_that_is_run_again() -> None:
    found = scopes(xform.grad(lambda w: xform.remat(mlp)(w, X)), W)
    assert any("xform(recompute)" in s and s.endswith("exp") for s in found)


@pytest.mark.parametrize("region", [True, False])
def test_intermediates_are_freed_after_their_last_use_outside_jit(
    region: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def layer(x: jax.Array) -> jax.Array:
        for _ in range(30):
            x = jnp.sin(x)
        return x

    x = jnp.ones(8)
    gc.collect()  # garbage of earlier tests
    alive, bind, before = [], emit.bind, len(jax.live_arrays())

    def counted(*args: Any) -> Any:
        ys = bind(*args)
        alive.append(len(jax.live_arrays()) - before)
        return ys

    monkeypatch.setattr(ir if region else emit, "bind", counted)
    if region:
        y, pull = xform.vjp(xform.remat(layer), x)
    else:
        y, pull = xform.vjp(layer, x, policy=jax.checkpoint_policies.nothing_saveable)
    assert len(alive) == 30
    assert max(alive) == 2
    alive.clear()
    (ct,) = pull(y)
    assert max(alive) <= 1 + 30 + 2  # the result, the operands of the cosines, and two more
    del ct
