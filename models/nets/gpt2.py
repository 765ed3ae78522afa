"""GPT-2: learned positions, LayerNorm before each part, biases, tied embeddings.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019. A part is the
attention or the MLP of a layer. Dropout is applied to the embeddings and to the output of each
part. It is not applied to the attention weights, because these are never in memory all at once.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from models.nets.block import Block
from models.nets.cache import Cache
from models.nets.decoder import Decoder, DecoderConfig
from models.nets.dense import NORMAL, embedding, looked_up
from models.nets.dropout import dropout
from models.nets.layers import Layers
from models.nets.norms import layer_norm
from models.settings import setting


@dataclasses.dataclass(frozen=True)
class GPT2Config(DecoderConfig):
    """Settings of a GPT-2."""

    dropout: float = setting(0.1, "Dropout rate in training.", least=0, most=1)


class GPT2(Decoder):
    """A GPT-2. It maps tokens `[B, T]` to next-token logits `[B, T, V]`."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs) -> None:
        c = self.config = config
        common: dict[str, Any] = {"dtype": c.dtype, "rngs": rngs}
        self.embed = embedding({"vocab": c.vocab}, c.width, **common)
        self.positions = embedding({"position": c.context}, c.width, **common)
        make = lambda rngs: Block(
            c.width,
            c.heads,
            4 * c.width,
            jax.nn.gelu,
            causal=True,
            epsilon=c.norm_epsilon,
            dropout=c.dropout,
            chunk=c.query_chunk_size,
            dtype=c.dtype,
            rngs=rngs,
            out_stddev=NORMAL * (2 * c.depth) ** -0.5,
        )
        self.layers = Layers(make, c.depth, scan=c.scan_layers, remat=c.remat, rngs=rngs)
        self.norm = layer_norm(c.width, c.norm_epsilon, **common)

    def enter(self, tokens: jax.Array, positions: jax.Array, key: jax.Array | None) -> Any:
        """Return the sum of token and position embeddings, with dropout, and no angles."""
        x = looked_up(self.embed, tokens, "vocab")
        x = x + looked_up(self.positions, positions, "position")
        return dropout(x, self.config.dropout, key), None

    def cache(self, batch: int, room: int) -> Cache:
        """Return an empty cache for `batch` sequences of up to `room` tokens."""
        c = self.config
        return Cache.empty(c.depth, batch, room, c.heads, c.width // c.heads, c.dtype)
