"""What a model is made of: frozen descriptions, and the presets by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class MLPConfig:
    """A stack of residual blocks `width -> hidden -> width`, mapped to `outputs`.

    `policy` names the rematerialization policy of one block (see `models.policies`), `scan` loops
    over stacked parameters instead of unrolling, `dtype` is that of the computation: parameters
    are always float32.
    """

    inputs: int = 256
    width: int = 256
    hidden: int = 1024
    outputs: int = 256
    depth: int = 16
    scan: bool = True
    policy: str | None = None
    dtype: str = "f32"


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """A pre-norm decoder with rotary positions and grouped-query attention.

    `kv_heads` divides `heads`: each key and value head serves `heads / kv_heads` query heads.
    `hidden` is the width between the two matrices of a feed-forward block. `context` is the
    longest window, in tokens. `scan`, `policy` and `dtype` are as in `MLPConfig`.
    """

    vocab: int = 256
    context: int = 128
    width: int = 128
    depth: int = 4
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 384
    swiglu: bool = True
    tied: bool = True
    rope_base: float = 10_000.0
    scan: bool = True
    policy: str | None = None
    dtype: str = "f32"

    def __post_init__(self) -> None:
        if min(self.vocab, self.context, self.width, self.depth, self.heads, self.kv_heads) < 1:
            raise ValueError("every size of a model must be at least 1")
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} is not an even multiple of {self.heads} heads")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    def shape_fields(self) -> dict[str, Any]:
        """The fields that decide parameters and values; `policy` and `dtype` may change freely."""
        fields = dataclasses.asdict(self)
        return {k: v for k, v in fields.items() if k not in ("policy", "dtype")}


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
