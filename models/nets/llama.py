"""Llama 2 and 3, and Mixtral: rotary positions, RMSNorm, shared keys and values, gated perceptrons.

Sources: "Llama 2", arXiv:2307.09288; "The Llama 3 Herd of Models", arXiv:2407.21783; "Mixtral of
Experts", arXiv:2401.04088.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from models.nets.cache import Cache
from models.nets.decoder import Decoder, DecoderConfig
from models.nets.dense import NORMAL, dense, embedding
from models.nets.layers import Layers
from models.nets.mixture import Mixture
from models.nets.norms import rms_norm
from models.nets.perceptron import GatedPerceptron
from models.nets.rotary import Rotary
from models.nets.self_attention import Context, SelfAttention

PLAIN = Rotary()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """The sizes of a Llama; with experts, of a Mixtral."""

    kv_heads: int
    hidden: int
    rotary: Rotary = PLAIN
    head_width: int = 0  # width / heads if 0
    tied: bool = False
    experts: int = 0
    chosen: int = 2  # experts for each token

    def __post_init__(self) -> None:
        if not self.head_width:
            object.__setattr__(self, "head_width", self.width // self.heads)


class Block(nnx.Module):
    """Attention, and a perceptron or several, each behind a norm and added to what it read."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        c = config
        common: dict[str, Any] = {"dtype": c.dtype, "rngs": rngs}
        self.attention_norm = rms_norm(c.width, c.epsilon, **common)
        self.attention = SelfAttention(
            c.width,
            c.heads,
            c.kv_heads,
            c.head_width,
            causal=True,
            bias=False,
            chunk=c.chunk,
            **common,
        )
        self.mlp_norm = rms_norm(c.width, c.epsilon, **common)
        if c.experts:
            self.mixture = Mixture(c.width, c.hidden, c.experts, c.chosen, **common)
        else:
            self.mlp = GatedPerceptron(c.width, c.hidden, **common)
        self.mixes = bool(c.experts)

    def __call__(self, x: jax.Array, own: Any, context: Context) -> Any:
        """Map `[B, T, D]` to the same, and what is cached to what is after these tokens."""
        _, cached = own
        mixed, cached = self.attention(self.attention_norm(x), context, cached)
        x = x + mixed
        y = self.mlp_norm(x)
        y, routing = self.mixture(y) if self.mixes else (self.mlp(y), None)
        return x + y, (cached, routing)


class Llama(Decoder):
    """Tokens in, a score for every next token out."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        c = self.config = config
        common: dict[str, Any] = {"dtype": c.dtype, "rngs": rngs}
        self.embed = embedding({"vocab": c.vocab}, c.width, **common)
        make = lambda rngs: Block(c, rngs=rngs)
        self.layers = Layers(make, c.depth, scan=c.scan, remat=c.remat, rngs=rngs)
        self.norm = rms_norm(c.width, c.epsilon, **common)
        sides = {"embed": c.width}, {"vocab": c.vocab}
        self.head = None if c.tied else dense(*sides, stddev=NORMAL, **common)

    def enter(self, tokens: jax.Array, positions: jax.Array, key: jax.Array | None) -> Any:
        """A token's vector, and the angles of its position; nothing is dropped."""
        return self.embed(tokens), self.config.rotary.angles(positions, self.config.head_width)

    def cache(self, batch: int, room: int) -> Cache:
        """A cache for so many sequences of so many tokens, with nothing in it."""
        c = self.config
        return Cache.empty(c.depth, batch, room, c.kv_heads, c.head_width, c.dtype)
