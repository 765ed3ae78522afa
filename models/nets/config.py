"""What a model is made of: frozen descriptions, and the presets by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from models.nets.policies import POLICIES
from models.settings import setting

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
SIZE: dict[str, Any] = {"least": 1, "most": 2**31 - 1, "change": "never"}


@dataclasses.dataclass(frozen=True)
class MLPConfig:
    """A stack of residual blocks `width -> hidden -> width`, mapped to `outputs`.

    `block_policy` names the policy of a remat region around each block (see `policies.py`), `scan`
    loops over stacked parameters instead of unrolling, `dtype` is that of the computation:
    parameters are always float32.
    """

    inputs: int = 256
    width: int = 256
    hidden: int = 1024
    outputs: int = 256
    depth: int = 16
    scan: bool = True
    block_policy: str | None = None
    dtype: str = "f32"


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """A pre-norm decoder with rotary positions and grouped-query attention.

    `kv_heads` divides `heads`: each key and value head serves `heads / kv_heads` query heads.
    `hidden` is the width between the two matrices of a feed-forward block. `context` is the
    longest window, in tokens. `scan`, `block_policy` and `dtype` are as in `MLPConfig`.
    """

    vocab: int = setting(256, "Tokens that there are.", **SIZE)
    context: int = setting(128, "Tokens in a window.", **SIZE)
    width: int = setting(128, "Of the residual stream.", **SIZE)
    depth: int = setting(4, "Blocks.", **SIZE)
    heads: int = setting(4, "Query heads.", **SIZE)
    kv_heads: int = setting(2, "Key and value heads.", **SIZE)
    hidden: int = setting(384, "Of the feed-forward blocks.", **SIZE)
    swiglu: bool = setting(True, "SwiGLU, or GELU.", change="never")
    tied: bool = setting(True, "Scores by the embedding itself.", change="never")
    rope_base: float = setting(10_000.0, "Of the rotary positions.", above=1, change="never")
    scan: bool = setting(True, "Loop over stacked layers, or write them out.", change="never")
    block_policy: str | None = setting(
        None, "What a remat region around each block saves; none without.", choices=tuple(POLICIES)
    )
    dtype: str = setting("f32", "Of the computation; parameters stay f32.", choices=tuple(DTYPES))

    def __post_init__(self) -> None:
        sizes = (self.vocab, self.context, self.width, self.depth, self.heads, self.kv_heads)
        if min(sizes) < 1:
            raise ValueError("every size of a model must be at least 1")
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} is not an even multiple of {self.heads} heads")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")

    @property
    def head_width(self) -> int:
        return self.width // self.heads


# The sizes of the larger ones are those that their authors published.
PRESETS: dict[str, TransformerConfig] = {
    "tiny": TransformerConfig(),
    "small": TransformerConfig(
        context=512, width=384, depth=8, heads=6, kv_heads=2, hidden=1024, tied=True
    ),
    "gpt2-124m": TransformerConfig(
        vocab=50257, context=1024, width=768, depth=12, heads=12, kv_heads=12, hidden=3072,
        swiglu=False,
    ),
    "gpt2-1.5b": TransformerConfig(
        vocab=50257, context=1024, width=1600, depth=48, heads=25, kv_heads=25, hidden=6400,
        swiglu=False,
    ),
    "tinyllama-1.1b": TransformerConfig(
        vocab=32000, context=2048, width=2048, depth=22, heads=32, kv_heads=4, hidden=5632,
        tied=False,
    ),
    "llama2-7b": TransformerConfig(
        vocab=32000, context=4096, width=4096, depth=32, heads=32, kv_heads=32, hidden=11008,
        tied=False,
    ),
    "llama3-8b": TransformerConfig(
        vocab=128256, context=8192, width=4096, depth=32, heads=32, kv_heads=8, hidden=14336,
        tied=False, rope_base=500_000.0,
    ),
}  # fmt: skip
