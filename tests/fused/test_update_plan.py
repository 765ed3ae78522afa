"""A backward loop with updates waits for the readers of the parameters that it overwrites."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

import xform
from xform.fused.fused_step import trace_step
from xform.fused.layer_loop import BackwardLoop
from xform.fused.update_plan import plan_updates


def loop_of(loss: Any) -> BackwardLoop:
    """Return the backward loop of a step with SGD."""
    w, optimizer = jnp.ones((3, 8, 8)), optax.sgd(0.1)
    gradient = functools.partial(xform.value_and_grad(loss), x=jnp.ones((2, 8)))
    step = trace_step(gradient, optimizer, w, optimizer.init(w), has_aux=False).step
    (loop,) = plan_updates(step).loops
    return loop


def layers(w: Any, x: Any) -> Any:
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)
    return jnp.sum(h**2)


def test_the_forward_loop_needs_no_wait() -> None:
    """The backward loop depends on the forward loop, whose stacks a wait would keep alive."""
    assert loop_of(layers).first == ()


def test_another_reader_of_the_parameters_is_waited_for() -> None:
    loop = loop_of(lambda w, x: layers(w, x) + jax.lax.stop_gradient(jnp.sum(jnp.sin(w))))
    assert loop.first
    assert not any(v in loop.scan.invars for v in loop.first)
