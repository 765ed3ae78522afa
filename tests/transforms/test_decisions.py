"""The derivatives of a step are recognized when the step is traced again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import xform
from xform.policies import min_cut
from xform.transforms.decisions import Decisions, follow

WRAPS: dict[str, Any] = {
    "plain": lambda f: f,
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "jit": lambda f: jax.jit(lambda x: f(x)),
    "checkpoint": lambda f: jax.checkpoint(lambda x: f(x)),
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_derivative_is_recognized_although_its_rules_change_a_list(wrap: str) -> None:
    log: list[str] = []

    def step(x: Any) -> Any:
        f = jax.custom_vjp(jnp.sin)
        f.defvjp(
            lambda x: (log.append("forward") or jnp.sin(x), x),
            lambda x, ct: (log.append("backward") or ct * jnp.cos(x),),
        )
        return xform.grad(lambda x: jnp.sum(WRAPS[wrap](f)(x)))(x)

    def keys() -> list[str]:
        seen: Any = {}
        with follow(Decisions(min_cut, {}, retrace=True), seen):
            jax.make_jaxpr(step)(jnp.ones(3))
        return list(seen)

    first, length = keys(), len(log)
    assert first == keys()
    assert len(log) > length  # the rules have run again
