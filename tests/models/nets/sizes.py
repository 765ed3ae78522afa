"""Models that compile in a second, for the tests of this folder."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.nets.gpt2 import GPT2Config
from models.nets.llama import LlamaConfig
from models.nets.presets import abstract

SIZES: dict[str, Any] = {"vocab": 61, "context": 24, "width": 32, "depth": 2, "heads": 4}
# Of the waves of 8 elements, turned by these: one stays, one is slowed, two are blends or slow.
LLAMA3 = {"rope_theta": 500.0, "rope_factor": 4.0, "rope_original_context": 64}
DECODERS: dict[str, Any] = {
    "gpt2": GPT2Config(**SIZES, query_chunk_size=5),
    "llama": LlamaConfig(**SIZES, kv_heads=2, mlp_width=48, **LLAMA3, query_chunk_size=5),
    "qwen3": LlamaConfig(
        **SIZES, kv_heads=2, head_width=10, mlp_width=48, qk_norm=True, query_chunk_size=5
    ),
    "mixtral": LlamaConfig(**SIZES, kv_heads=2, mlp_width=48, experts=4, query_chunk_size=5),
}


def tokens(rows: int = 2, length: int = 17) -> jax.Array:
    """Random tokens."""
    return jax.random.randint(jax.random.key(1), (rows, length), 0, SIZES["vocab"])


def drawn(config: Any) -> Any:
    """Return a model with random weights, norms, biases and variances, made without compiling."""
    generator = np.random.default_rng(0)
    graphdef, state = nnx.split(abstract(config))

    def draw(path: Any, x: Any) -> jax.Array:
        wide = generator.normal(size=x.shape) * 0.2
        return jnp.asarray(
            1 + abs(wide) if "scale" in str(path) or "var" in str(path) else wide, x.dtype
        )

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(draw, state))
