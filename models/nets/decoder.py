"""The base class of GPT-2 and Llama: embedded tokens, layers, a norm, and next-token logits."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.nets.axes import by_token, context_devices
from models.nets.cache import Cache
from models.nets.layers import Layers
from models.nets.loss import cross_entropy, scores
from models.nets.mixture import Routing
from models.nets.policies import check_remat
from models.nets.self_attention import Context
from models.nets.sizes import SIZE, dtype_setting
from models.settings import setting


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Settings of every decoder: sizes, and options of the computation.

    `attention.py` explains `query_chunk_size`, and `layers.py` explains `scan_layers` and `remat`.
    """

    vocab: int = setting(256, "Vocabulary size; by default that of the tokenizer.", **SIZE)
    context: int = setting(128, "Context length in tokens.", **SIZE)
    width: int = setting(128, "Width of the residual stream, or of the state.", **SIZE)
    depth: int = setting(4, "Number of layers.", **SIZE)
    heads: int = setting(4, "Number of query heads in attention.", **SIZE)
    norm_epsilon: float = setting(
        1e-5, "Constant added to the variance in each norm.", above=0, change="never"
    )
    query_chunk_size: int = setting(
        256,
        "Number of queries whose attention scores are in memory at once. If devices share each"
        " sequence, this is also the number of keys.",
        least=1,
    )
    scan_layers: bool = setting(
        True,
        "Run the layers in a loop (scan) over stacked parameters, or unrolled.",
        change="never",
    )
    remat: str | None = setting(
        None,
        "Make each layer a remat region (jax.checkpoint) with this policy, such as save_dots or"
        " saved:1MiB; by default none is.",
    )
    z_loss: float = setting(
        0.0, "Weight of the z-loss, the mean square of log(sum(exp(logits))).", least=0
    )
    dtype: str = dtype_setting()

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.heads} heads")
        check_remat(self.remat)


class Decoder(nnx.Module):
    """A decoder. Each subclass defines its input vectors and its layers."""

    config: Any
    embed: nnx.Embed
    layers: Layers
    norm: Any
    head: nnx.LinearGeneral | None = None  # None: the transposed embedding makes the logits

    @abc.abstractmethod
    def enter(
        self, tokens: jax.Array, positions: jax.Array, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return the input vectors `[B, T, D]` of the layers, and angles of rotary positions."""

    @abc.abstractmethod
    def cache(self, batch: int, room: int) -> Cache:
        """Return an empty cache for `batch` sequences of up to `room` tokens."""

    def kernel(self) -> jax.Array:
        """Return the matrix `[D, V]` that maps the last vectors to logits."""
        return self.embed.embedding[...].T if self.head is None else self.head.kernel[...]

    def read(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
        key: jax.Array | None = None,
        cache: Cache | None = None,
        ring: bool = False,
    ) -> tuple[jax.Array, Cache | None, Routing | None]:
        """Run the model on tokens, up to and including the last norm.

        Args:
          tokens: integers `[B, T]`.
          positions: `[B, T]`. If None, they count from 0, or from the number of cached tokens.
          segments: `[B, T]`, the document of each token in rows of packed documents. A token sees
            only its own document.
          key: random key of dropout; None means no dropout.
          cache: the cache of the preceding tokens, if any.
          ring: whether several devices share each sequence, whose tokens are in zigzag order.
            `positions` must be given then.

        Returns:
          The last vectors `[B, T, D]`, the cache with these tokens added, and the routing of
            experts (None without experts).
        """
        cache_positions = None if cache is None else cache.positions(tokens.shape[1])
        if positions is None:
            from_zero = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            positions = from_zero if cache_positions is None else cache_positions
        input_key, key = (None, None) if key is None else jax.random.split(key)
        x, angles = self.enter(tokens, positions, input_key)
        keys = None if key is None else jax.random.split(key, self.config.depth)
        stored = None if cache is None else (cache.keys, cache.values)
        lengths = None if cache is None else cache.lengths
        context = Context(cache_positions, angles, segments, lengths, ring)
        x, (stored, routing) = self.layers(x, (keys, stored), context)
        x = by_token(x)
        if cache is not None:
            stored_keys, stored_values = stored
            cache = Cache(stored_keys, stored_values, cache.lengths + tokens.shape[1])
        return self.norm(x), cache, routing

    def __call__(self, tokens: jax.Array, **options: Any) -> jax.Array:
        """Map integers `[B, T]` to float32 logits `[B, T, V]`. Options are passed to `read`."""
        return scores(self.read(tokens, **options)[0], self.kernel())

    def extend(self, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache | None]:
        """Return the logits of tokens that continue the cache, and the cache with them added."""
        hidden, after, _ = self.read(tokens, cache=cache)
        return scores(hidden, self.kernel()), after

    def loss(
        self,
        tokens: jax.Array,
        weights: jax.Array | None = None,
        *,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        key: jax.Array | None = None,
        chunk: int | None = 128,
        balance: float = 0.0,
        z: float = 0.0,
    ) -> jax.Array:
        """Compute the mean negative log-probability of each next token, in nats.

        Args:
          tokens: integers `[B, T + 1]`. If several devices share each sequence: `[B, 2n, t + 1]`,
            blocks of T / 2n + 1 tokens in zigzag order (`models.zigzag`).
          weights: `[B, T]`, the weight of each prediction; 1 if None.
          segments: `[B, T]`, the document of each token but the last. A token sees only its own
            document.
          positions: `[B, T]`, the positions of these tokens; None to count from 0.
          key: random key of dropout; None means no dropout.
          chunk: number of positions per sequence whose logits are in memory at once; None for all.
          balance: the weight of the load-balancing loss of experts.
          z: the weight of the z-loss, the mean square of `logsumexp(logits)`.

        Returns:
          A float32 scalar.

        Raises:
          ValueError: the blocks are for another number of devices than the current mesh has.
        """
        ring = tokens.ndim == 3
        if ring and tokens.shape[1] != 2 * context_devices():
            raise ValueError(
                f"tokens in {tokens.shape[1]} blocks are for {tokens.shape[1] // 2} devices that"
                f" share each sequence, but the mesh axis context has {context_devices()}: use"
                f" zigzag_blocks(row, {context_devices()})"
            )
        inputs, targets = (x.reshape(len(x), -1) for x in (tokens[..., :-1], tokens[..., 1:]))
        hidden, _, routing = self.read(
            inputs, segments=segments, positions=positions, key=key, ring=ring
        )
        loss = cross_entropy(hidden, self.kernel(), targets, weights, chunk=chunk, z=z)
        return loss if routing is None else loss + balance * routing.imbalance()
