"""A scan's carry that is offloaded by name, compiled for devices that have a host."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import xform
from xform import policies
from xform.memory.targets import missing, parse_target

TRIPS = 16
WS = jax.ShapeDtypeStruct((TRIPS, 1024, 1024), jnp.bfloat16)
X = jax.ShapeDtypeStruct((8192, 1024), jnp.bfloat16)
STACKED = TRIPS * 8192 * 1024 * 2
SENT = policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["carry"],
    offload_src="device",
    offload_dst="pinned_host",
)


def layer(x, w):
    x = checkpoint_name(x, "carry")
    return jnp.sin(jnp.tanh(x @ w) @ w.T) + x


@pytest.mark.slow
@pytest.mark.parametrize("target", ["gpu:h100", "tpu:v5e:1x1"])
def test_a_named_carry_waits_on_the_host(target: str) -> None:
    if absent := missing(parse_target(target)):
        pytest.skip(f"needs {', '.join(absent)}")

    def report(policy):
        marked = jax.checkpoint(layer, policy=policy)
        loss = lambda ws, x: jnp.sum(lax.scan(lambda x, w: (marked(x, w), None), x, ws)[0] ** 2)
        return xform.memory_analysis(xform.grad(loss), WS, X, target=target)

    kept, sent = report(None), report(SENT)
    assert (kept.host_bytes, sent.host_bytes) == (0, STACKED)
    assert sent.temp_bytes is not None
    assert kept.temp_bytes is not None
    assert sent.temp_bytes < STACKED / 2 < STACKED < kept.temp_bytes
