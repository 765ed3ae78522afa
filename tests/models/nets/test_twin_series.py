"""LSTM and GRU against `torch.nn`, and a neural ODE against Diffrax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.nets import names
from models.nets.ode import ODEConfig
from models.nets.presets import build
from models.nets.recurrent import RecurrentConfig
from models.nets.weights import fill
from tests.models.nets.twins import CLOSE, drawn, torch, weights

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_recurrent(kind: str) -> None:
    module = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[kind]
    twin = drawn(module(3, 5, num_layers=2, batch_first=True))
    ours = fill(build(RecurrentConfig(kind, 3, 5, depth=2)), names.RECURRENT, weights(twin))
    x = jax.random.normal(jax.random.key(0), (4, 11, 3))
    with torch.no_grad():
        expected = twin(torch.tensor(np.asarray(x)))[0].numpy()
    np.testing.assert_allclose(ours(x), expected, **CLOSE)


def test_ode() -> None:
    diffrax = pytest.importorskip("diffrax")
    ours = build(ODEConfig(6, 8, integration_steps=20, integration_time=2.0))
    x = jax.random.normal(jax.random.key(0), (4, 6))

    def by_diffrax(x: jax.Array) -> jax.Array:
        term = diffrax.ODETerm(lambda t, x, _: ours.field(t, x))
        control = diffrax.PIDController(rtol=1e-6, atol=1e-6)
        end = diffrax.SaveAt(t1=True)
        return diffrax.diffeqsolve(
            term, diffrax.Dopri5(), 0.0, 2.0, None, x, saveat=end, stepsize_controller=control
        ).ys[0]

    np.testing.assert_allclose(ours(x), by_diffrax(x), rtol=1e-5, atol=1e-5)
    square = lambda f: lambda x: jnp.sum(f(x) ** 2)
    found, expected = (jax.jit(jax.grad(square(f)))(x) for f in (ours, by_diffrax))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
