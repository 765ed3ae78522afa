"""Llama 2 and 3, Mixtral and Qwen 3: rotary positions, RMSNorm, grouped queries, gated MLPs.

Sources: "Llama 2", arXiv:2307.09288; "The Llama 3 Herd of Models", arXiv:2407.21783; "Mixtral of
Experts", arXiv:2401.04088; "Qwen3 Technical Report", arXiv:2505.09388.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from models.nets.cache import Cache
from models.nets.decoder import Decoder, DecoderConfig
from models.nets.dense import NORMAL, dense, embedding, looked_up
from models.nets.layers import Layers
from models.nets.mixture import Mixture
from models.nets.norms import rms_norm
from models.nets.perceptron import GatedPerceptron
from models.nets.rotary import Rotary, Stretch
from models.nets.self_attention import Context, SelfAttention
from models.nets.sizes import SIZE
from models.nets.tiles import by_tokens
from models.settings import setting

# Limits of a setting: a positive number that may not change in a resumed run.
POSITIVE: dict[str, Any] = {"above": 0, "change": "never"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Settings of a Llama, with experts of a Mixtral, or with `qk_norm` of a Qwen 3.

    `rotary.py` explains the positions.
    """

    kv_heads: int = setting(2, "Number of key and value heads; query heads share them.", **SIZE)
    mlp_width: int = setting(384, "Width of the hidden layer of each MLP.", **SIZE)
    head_width: int = setting(
        0, "Width of each attention head; 0 for width / heads.", least=0, change="never"
    )
    attention_window: int = setting(
        0,
        "Number of tokens that each token attends to: the last ones, itself among them; 0 for all.",
        least=0,
        change="never",
    )
    qk_norm: bool = setting(
        False,
        "Normalize each query and each key by its RMS before its position is added, as in Qwen 3.",
        change="never",
    )
    mlp_chunk_size: int = setting(
        0,
        "Number of tokens of each sequence, on each device, whose hidden values in an MLP are in"
        " memory at once; 0 for all.",
        least=0,
    )
    tie_embeddings: bool = setting(
        False, "Use the token embedding as the output matrix too.", change="never"
    )
    experts: int = setting(
        0,
        "Number of experts in each layer; 0 for one MLP without a router.",
        least=0,
        change="never",
    )
    experts_per_token: int = setting(2, "Number of experts that process each token.", **SIZE)
    balance_loss: float = setting(
        0.01,
        "Weight of the load-balancing loss, which is lowest if all experts are used equally.",
        least=0,
    )
    rope_theta: float = setting(
        10_000.0, "Base of the rotary position frequencies (RoPE theta).", above=1, change="never"
    )
    rope_factor: float = setting(
        1.0,
        "Divisor of low rotary frequencies, as in Llama 3.1; 1 for no scaling.",
        least=1,
        change="never",
    )
    rope_low_freq_factor: float = setting(
        1.0,
        "A rotary frequency is low if --rope-original-context holds fewer periods than this.",
        **POSITIVE,
    )
    rope_high_freq_factor: float = setting(
        4.0,
        "A rotary frequency is unchanged if --rope-original-context holds more periods than this.",
        **POSITIVE,
    )
    rope_original_context: int = setting(
        8192,
        "Context length of the training before low frequencies were divided by --rope-factor.",
        **SIZE,
    )

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")
        if not self.head_width:
            super().__post_init__()
        if self.each_head % 2:
            raise ValueError(f"rotary positions need an even head_width, not {self.each_head}")
        if self.mlp_chunk_size and self.experts:
            raise ValueError("mlp_chunk_size is for models without experts")
        if self.experts_per_token > self.experts > 0:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is more than experts {self.experts}"
            )

    @property
    def each_head(self) -> int:
        """The width of a head."""
        return self.head_width or self.width // self.heads

    @property
    def rotary(self) -> Rotary:
        """The rotary positions of these settings."""
        if self.rope_factor == 1:
            return Rotary(self.rope_theta)
        stretch = Stretch(
            self.rope_factor,
            self.rope_low_freq_factor,
            self.rope_high_freq_factor,
            self.rope_original_context,
        )
        return Rotary(self.rope_theta, stretch)


class Block(nnx.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`, or a mixture of experts as the MLP."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        c = config
        common: dict[str, Any] = {"dtype": c.dtype, "rngs": rngs}
        self.attention_norm = rms_norm(c.width, c.norm_epsilon, **common)
        self.attention = SelfAttention(
            c.width,
            c.heads,
            c.kv_heads,
            c.each_head,
            causal=True,
            bias=False,
            chunk=c.query_chunk_size,
            window=c.attention_window or None,
            qk_epsilon=c.norm_epsilon if c.qk_norm else None,
            **common,
        )
        self.mlp_norm = rms_norm(c.width, c.norm_epsilon, **common)
        if c.experts:
            self.mixture = Mixture(c.width, c.mlp_width, c.experts, c.experts_per_token, **common)
        else:
            self.mlp = GatedPerceptron(c.width, c.mlp_width, **common)
        self.has_mixture, self.mlp_chunk = bool(c.experts), c.mlp_chunk_size

    def __call__(self, x: jax.Array, own: Any, context: Context) -> Any:
        """Map `[B, T, D]` to the same shape, and update the cache.

        Args:
          x: the input.
          own: a pair of an unused random key, and this layer's cached keys and values or None.
          context: data about the tokens that all layers share.

        Returns:
          The output and `(cached, routing)`: the cache with these tokens added, and how the tokens
          were distributed among experts (None without experts).
        """
        _, cached = own
        mixed, cached = self.attention(self.attention_norm(x), context, cached)
        x = x + mixed
        y, routing = self.mlp_norm(x), None
        if self.has_mixture:
            y, routing = self.mixture(y)
        else:
            y = by_tokens(self.mlp, y, self.mlp_chunk)
        return x + y, (cached, routing)


class Llama(Decoder):
    """A Llama, Mixtral or Qwen 3. It maps tokens `[B, T]` to next-token logits `[B, T, V]`."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        c = self.config = config
        common: dict[str, Any] = {"dtype": c.dtype, "rngs": rngs}
        self.embed = embedding({"vocab": c.vocab}, c.width, **common)
        make = lambda rngs: Block(c, rngs=rngs)
        self.layers = Layers(make, c.depth, scan=c.scan_layers, remat=c.remat, rngs=rngs)
        self.norm = rms_norm(c.width, c.norm_epsilon, **common)
        sides = {"embed": c.width}, {"vocab": c.vocab}
        self.head = None if c.tie_embeddings else dense(*sides, stddev=NORMAL, **common)

    def enter(self, tokens: jax.Array, positions: jax.Array, key: jax.Array | None) -> Any:
        """Return the token embeddings, and the angles of the positions. There is no dropout."""
        angles = self.config.rotary.angles(positions, self.config.each_head)
        return looked_up(self.embed, tokens, "vocab"), angles

    def cache(self, batch: int, room: int) -> Cache:
        """Return an empty cache for `batch` sequences of up to `room` tokens."""
        c = self.config
        return Cache.empty(c.depth, batch, room, c.kv_heads, c.each_head, c.dtype)
