"""The values that cross between layers; recomputes within layers leave fewer bytes live."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from xform import policies
from xform.interpret.joint import analyze
from xform.planner.cuts.bottleneck import bottlenecks
from xform.planner.decide import schedule
from xform.planner.simulate.liveness import liveness
from xform.policies import MinCut
from xform.program.ir import trace

W = np.zeros((6, 8, 8), np.float32)
X = np.zeros((4, 8), np.float32)


def crossing(f, *args) -> list[list[str]]:
    joint = analyze(trace(lambda *xs: [f(*xs)], *args), (True,) * len(args))
    return [sorted(v.aval.str_short() for v in values) for values in bottlenecks(joint)]


def test_the_residual_stream_crosses_between_blocks() -> None:
    def loss(w, x):
        for i in range(3):
            x = x + jnp.tanh(jnp.tile(x @ w[2 * i], 4)).reshape(4, 4, 8).sum(1) @ w[2 * i + 1]
        return jnp.sum(x)

    # Before each second product its operand and `x` cross; after it, and at the start, only `x`.
    assert crossing(loss, W, X) == [["float32[4,8]"]] * 4


def test_nothing_crosses_where_there_is_no_work() -> None:
    assert crossing(lambda x: jnp.sum(jnp.sin(x) * 2), X) == []
    assert crossing(lambda w, x: jnp.sum(x @ w[0]), W, X) == [["float32[4,8]"]]


def test_value_read_by_all_layers_crosses_between_them() -> None:
    def loss(w, x):
        mask = jnp.sin(x @ w[0])
        for i in range(1, 6):
            x = jnp.sin(x @ w[i]) * mask
        return jnp.sum(x)

    alone, both = ["float32[4,8]"], ["float32[4,8]"] * 2
    assert crossing(loss, W, X) == [alone, both, both, alone]


@pytest.mark.slow
def test_the_default_starts_no_wave_of_recomputes() -> None:
    """A chain of sums: without narrow places all its values would be recomputed at once."""

    def loss(ws, x):
        for w in ws:
            h = x - jnp.mean(x, -1, keepdims=True)
            h = h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1)
            x = x + jnp.maximum(lax.dot(h, w), 0)
        return jnp.sum(x**2)

    ws, x = [np.zeros((256, 256), np.float32)] * 16, np.zeros((1024, 256), np.float32)
    joint = analyze(trace(lambda *xs: [loss(xs[:-1], xs[-1])], *ws, x), (True,) * 17)
    peak = lambda how: liveness(schedule(joint, how, backend="cpu"), "cpu").temp_bytes
    assert peak(policies.min_cut) < 0.8 * peak(MinCut())
    compiled = [
        xform.plan(loss, ws, x, policy=how).compiled_bytes
        for how in (policies.min_cut, policies.save_dots, MinCut())
    ]
    assert compiled[0] < 0.9 * min(compiled[1:])
