"""What GPT-2 and Llama share: tokens in, layers, a norm, a score for every next token out."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.nets.axes import constrained
from models.nets.cache import Cache
from models.nets.layers import Layers
from models.nets.loss import cross_entropy, scores
from models.nets.mixture import Routing
from models.nets.policies import POLICIES
from models.nets.self_attention import Context
from models.nets.sizes import SIZE, dtype_setting
from models.settings import setting


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes, and how to compute: what a decoder of any kind has.

    `chunk` is explained in `attention.py`, `scan` and `remat` in `layers.py`.
    """

    vocab: int = setting(
        256, "Tokens that there are; without it, as many as the tokenizer has.", **SIZE
    )
    context: int = setting(128, "Tokens in a window.", **SIZE)
    width: int = setting(128, "Of the residual stream.", **SIZE)
    depth: int = setting(4, "Layers.", **SIZE)
    heads: int = setting(4, "Heads of queries.", **SIZE)
    epsilon: float = setting(1e-5, "What norms add to a variance.", above=0, change="never")
    chunk: int = setting(256, "Queries whose scores are in memory at once.", least=1)
    scan: bool = setting(True, "Loop over stacked layers, or write them out.", change="never")
    remat: str | None = setting(
        None, "What a remat region around each layer saves; none without.", choices=tuple(POLICIES)
    )
    z_loss: float = setting(0.0, "What squares of logits' sums add to a loss.", least=0)
    dtype: str = dtype_setting()

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is no multiple of {self.heads} heads")


class Decoder(nnx.Module):
    """Each kind says what its first vectors are, and what its layers are."""

    config: Any
    embed: nnx.Embed
    layers: Layers
    norm: Any
    head: nnx.LinearGeneral | None = None  # None: the embedding's transpose

    @abc.abstractmethod
    def enter(
        self, tokens: jax.Array, positions: jax.Array, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """The first vectors `[B, T, D]`, and angles of rotary positions."""

    @abc.abstractmethod
    def cache(self, batch: int, room: int) -> Cache:
        """A cache for so many sequences of so many tokens, with nothing in it."""

    def kernel(self) -> jax.Array:
        """What makes logits of the last vectors: `[D, V]`."""
        return self.embed.embedding[...].T if self.head is None else self.head.kernel[...]

    def read(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
        key: jax.Array | None = None,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache | None, Routing | None]:
        """Read tokens `[B, T]`.

        Args:
          tokens: integers.
          positions: `[B, T]`; counted from 0, or from what is cached, if None.
          segments: `[B, T]`, the document of each token where several are packed into a row: it
            sees no other.
          key: of the random numbers of dropout; None drops nothing.
          cache: what was read before, if these tokens follow on it.

        Returns:
          The last vectors `[B, T, D]`, the cache with these tokens in it, and how experts were
            chosen.
        """
        places = None if cache is None else cache.positions(tokens.shape[1])
        if positions is None:
            counted = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            positions = counted if places is None else places
        first, key = (None, None) if key is None else jax.random.split(key)
        x, angles = self.enter(tokens, positions, first)
        keys = None if key is None else jax.random.split(key, self.config.depth)
        stored = None if cache is None else (cache.keys, cache.values)
        context = Context(places, angles, segments, None if cache is None else cache.lengths)
        x, (stored, routing) = self.layers(x, (keys, stored), context)
        x = constrained(x, "batch", None, None)
        if cache is not None:
            stored_keys, stored_values = stored
            cache = Cache(stored_keys, stored_values, cache.lengths + tokens.shape[1])
        return self.norm(x), cache, routing

    def __call__(self, tokens: jax.Array, **options: Any) -> jax.Array:
        """Map integers `[B, T]` to float32 logits `[B, T, V]`; options are those of `read`."""
        return scores(self.read(tokens, **options)[0], self.kernel())

    def extend(self, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache | None]:
        """Logits of tokens that follow on those in the cache, and the cache with them in it."""
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
        """Mean negative log-probability of `tokens[:, 1:]` given what stands before each, in nats.

        Args:
          tokens: integers `[B, T + 1]`.
          weights: `[B, T]`, by which predictions count.
          segments: `[B, T]`, as for `read`, of `tokens[:, :-1]`.
          positions: `[B, T]`, as for `read`.
          key: as for `read`.
          chunk: as for `cross_entropy`.
          balance: what the imbalance of experts counts.
          z: as for `cross_entropy`.

        Returns:
          A float32 scalar.
        """
        hidden, _, routing = self.read(
            tokens[:, :-1], segments=segments, positions=positions, key=key
        )
        loss = cross_entropy(hidden, self.kernel(), tokens[:, 1:], weights, chunk=chunk, z=z)
        return loss if routing is None else loss + balance * routing.imbalance()
