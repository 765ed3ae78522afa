"""Effects happen once: a callback is never recomputed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from xform import policies

SEEN: list[float] = []


def printed(x):
    jax.debug.callback(lambda x: SEEN.append(float(x)), x)
    return jnp.sin(x)


def asked(x):
    """Return the result of a callback, which the derivative needs."""

    def answer(x):
        SEEN.append(float(x))
        return np.float32(2.0)

    y = jax.experimental.io_callback(
        answer, jax.ShapeDtypeStruct((), np.float32), lax.stop_gradient(x)
    )
    return y * jnp.sin(x)


def scanned(f):
    return lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=3)[0]


def chosen(f):
    return lambda x: lax.cond(x > 0, f, jnp.cos, x)


PROGRAMS = {
    "plain": (1, lambda f: f),
    "scan": (3, scanned),
    "cond": (1, chosen),
    "remat": (1, jax.remat),
    "remat of remat": (1, lambda f: jax.remat(jax.remat(f))),
    "remat of scan": (3, lambda f: jax.remat(scanned(f))),
    "scan of remat": (3, lambda f: scanned(jax.remat(f))),
    "remat of jit of cond": (1, lambda f: jax.remat(jax.jit(chosen(f)))),
}


@pytest.mark.parametrize("f", [printed, asked])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("policy", [None, policies.save_nothing])
def test_effects_happen_once(name, f, policy) -> None:
    times, wrap = PROGRAMS[name]
    SEEN.clear()
    jax.jit(xform.value_and_grad(wrap(f), policy=policy))(jnp.float32(0.5))
    jax.effects_barrier()
    assert len(SEEN) == times
