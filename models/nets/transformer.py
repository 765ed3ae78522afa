"""A decoder-only transformer: pre-norm, rotary positions, grouped-query attention.

Shapes are written with B sequences, T tokens, D the width, H heads of E elements, K key and value
heads that serve G = H / K query heads each, F the feed-forward width and V the vocabulary.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from models.nets.config import DTYPES, TransformerConfig
from models.nets.stack import Stack

INIT_STDDEV = 0.02


def rotary_angles(tokens: int, head_width: int, base: float) -> jax.Array:
    """Angles `[T, E / 2]`, float32 radians, by which position t turns each pair of elements.

    Source: Su et al., "RoFormer", arXiv:2104.09864, section 3.2.
    """
    exponents = jnp.arange(0, head_width, 2, dtype=jnp.float32) / head_width
    return jnp.outer(jnp.arange(tokens, dtype=jnp.float32), base**-exponents)


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Turn the pairs (i, i + E/2) of `x` `[B, T, heads, E]` by `angles` `[T, E / 2]`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _linear(config: TransformerConfig, inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=False,
        dtype=DTYPES[config.dtype],
        kernel_init=nnx.initializers.normal(INIT_STDDEV),
        rngs=rngs,
    )


class RMSNorm(nnx.Module):
    """`scale * x / rms(x)` over the last axis, computed in float32 (arXiv:1910.07467)."""

    def __init__(self, width: int, *, epsilon: float = 1e-6) -> None:
        self.scale = nnx.Param(jnp.ones(width, jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[..., width]` to the same shape and dtype."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean_square + self.epsilon) * self.scale[...]).astype(x.dtype)


class Attention(nnx.Module):
    """Causal attention with fewer key and value heads than query heads."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        linear = functools.partial(_linear, config, rngs=rngs)
        self.query = linear(config.width, config.width)
        self.key = linear(config.width, config.kv_heads * config.head_width)
        self.value = linear(config.width, config.kv_heads * config.head_width)
        self.out = linear(config.width, config.width)

    def __call__(self, x: jax.Array, angles: jax.Array) -> jax.Array:
        """Map `[B, T, D]` to `[B, T, D]`; position t reads positions up to t."""
        c = self.config
        batch, tokens, _ = x.shape
        query = rotate(self.query(x).reshape(batch, tokens, c.heads, c.head_width), angles)
        key = rotate(self.key(x).reshape(batch, tokens, c.kv_heads, c.head_width), angles)
        value = self.value(x).reshape(batch, tokens, c.kv_heads, c.head_width)

        query = query.reshape(batch, tokens, c.kv_heads, c.heads // c.kv_heads, c.head_width)
        scores = jnp.einsum("btkge,bske->bkgts", query, key, preferred_element_type=jnp.float32)
        scores *= c.head_width**-0.5
        causal = jnp.tril(jnp.ones((tokens, tokens), dtype=bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1).astype(x.dtype)
        mixed = jnp.einsum("bkgts,bske->btkge", weights, value)
        mixed = checkpoint_name(mixed.reshape(batch, tokens, c.width), "attention_out")
        return self.out(mixed)


class FeedForward(nnx.Module):
    """`down(silu(gate(x)) * up(x))` (SwiGLU, arXiv:2002.05202) or `down(gelu(up(x)))`."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        linear = functools.partial(_linear, config, rngs=rngs)
        self.up = linear(config.width, config.hidden)
        self.gate = linear(config.width, config.hidden) if config.swiglu else None
        self.down = linear(config.hidden, config.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[B, T, D]` to `[B, T, D]` through `[B, T, F]`."""
        hidden = self.up(x)
        hidden = jax.nn.gelu(hidden) if self.gate is None else jax.nn.silu(self.gate(x)) * hidden
        return self.down(checkpoint_name(hidden, "mlp_hidden"))


class Block(nnx.Module):
    """Attention and feed-forward, each around a residual and behind an RMSNorm."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.width)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.width)
        self.mlp = FeedForward(config, rngs=rngs)

    def __call__(self, x: jax.Array, angles: jax.Array) -> jax.Array:
        """Map `[B, T, D]` to `[B, T, D]`."""
        x = x + self.attention(self.attention_norm(x), angles)
        x = checkpoint_name(x, "attention_residual")
        return checkpoint_name(x + self.mlp(self.mlp_norm(x)), "block_out")


class Transformer(nnx.Module):
    """Tokens in, a float32 score for every next token out."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        dtype = DTYPES[config.dtype]
        self.config = config
        self.embed = nnx.Embed(
            config.vocab,
            config.width,
            dtype=dtype,
            embedding_init=nnx.initializers.normal(INIT_STDDEV),
            rngs=rngs,
        )
        self.stack = Stack(
            lambda rngs: Block(config, rngs=rngs),
            config.depth,
            scan=config.scan,
            policy=config.block_policy,
            rngs=rngs,
        )
        self.norm = RMSNorm(config.width)
        self.head = None if config.tied else _linear(config, config.width, config.vocab, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map integer tokens `[B, T]` to float32 logits `[B, T, V]`."""
        c = self.config
        angles = rotary_angles(tokens.shape[-1], c.head_width, c.rope_base)
        x = self.norm(self.stack(rows(self.embed, tokens), angles))
        return (self.embed.attend(x) if self.head is None else self.head(x)).astype(jnp.float32)


def rows(embed: nnx.Embed, tokens: jax.Array) -> jax.Array:
    """The rows of an embedding for `tokens`; on explicit axes they lie as the tokens do."""
    sharding = jax.typeof(tokens).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return embed(tokens)
    table = embed.embedding[...].astype(embed.dtype)
    return table.at[tokens].get(out_sharding=P(*sharding.spec, None))


def next_token_loss(model: Transformer, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy, nats per token, of `tokens[:, 1:]` given what stands before each.

    Args:
      model: the transformer.
      tokens: integers `[B, T + 1]`.

    Returns:
      A float32 scalar.
    """
    logits = model(tokens[:, :-1])
    picked = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def parameter_count(model: nnx.Module) -> int:
    """Number of elements in all parameters; the model may be abstract."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def abstract_transformer(config: TransformerConfig) -> Transformer:
    """The model as shapes and dtypes alone: nothing is allocated, whatever its size."""
    return nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
