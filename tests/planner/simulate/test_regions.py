"""Remat regions of JAX: the simulation against the compiler, which may undo them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from xform.planner.simulate.liveness import simulate
from xform.program.ir import program

W = jax.ShapeDtypeStruct((6, 128, 128), jnp.float32)
X = jax.ShapeDtypeStruct((1024, 128), jnp.float32)
KEEPS_REGIONS = {"xla_disable_hlo_passes": "cse_barrier_expander"}


@jax.checkpoint
def layer(x, w):
    return x + jnp.tanh(jnp.tanh(x @ w) @ w)


def unrolled(ws, x):
    for i in range(len(ws)):
        x = layer(x, ws[i])
    return jnp.mean(x**2)


def scanned(ws, x):
    return jnp.mean(lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0] ** 2)


@pytest.mark.parametrize("options", [{}, KEEPS_REGIONS], ids=["default", "kept"])
@pytest.mark.parametrize("loss", [unrolled, scanned])
def test_the_peak_of_jaxs_gradient_is_predicted(loss, options) -> None:
    run = jax.jit(jax.grad(loss), compiler_options=options or None)
    sizes = run.lower(W, X).compile().memory_analysis()
    ends = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    prog = program(jax.make_jaxpr(jax.grad(loss))(W, X))
    simulated = simulate(prog, "cpu", keeps_regions=bool(options)).total_bytes
    assert simulated == pytest.approx(ends + sizes.temp_size_in_bytes, rel=0.05)


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_other_backends_keep_the_regions(backend: str) -> None:
    peak = lambda loss: simulate(program(jax.make_jaxpr(jax.grad(loss))(W, X)), backend).temp_bytes
    assert peak(unrolled) <= peak(everything_saved)


def everything_saved(ws, x):
    for i in range(len(ws)):
        x = layer.__wrapped__(x, ws[i])
    return jnp.mean(x**2)
