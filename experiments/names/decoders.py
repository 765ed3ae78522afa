"""Decoders of `models/` with MaxText's names on their projections, and a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import xform
from models.nets.gpt2 import GPT2, GPT2Config
from models.nets.llama import Llama, LlamaConfig

WIDTH, BATCH, LENGTH = 256, 8, 256
DEPTH = 8  # scanned layers
UNROLLED_DEPTH = 3
SIZES: dict[str, Any] = {
    "vocab": 512, "context": LENGTH, "width": WIDTH, "heads": 4,
}  # fmt: skip
TOKENS = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)
# Makes a gradient whose remat regions have a policy.
Gradient = Callable[..., Any]


class Model(NamedTuple):
    """A program with named values in its remat regions.

    Attributes:
      gradient: the gradient, with the policy of the regions as its keyword argument `policy`.
      args: the types of its other arguments.
      unrolled: whether its layers are unrolled.
      site: the same gradient as a site would write it, without any transform of xform; None if
        `gradient` is that.
    """

    gradient: Gradient
    args: tuple[Any, ...]
    unrolled: bool
    site: Gradient | None = None


class Named(nnx.Module):
    """A module whose result has a name."""

    def __init__(self, inner: Any, name: str) -> None:
        self.inner, self.name = inner, name

    def __call__(self, x: jax.Array) -> jax.Array:
        return checkpoint_name(self.inner(x), self.name)


def with_names(layer: Any) -> None:
    """Give the projections of a layer the names that MaxText gives them."""
    attention, mlp = layer.attention, layer.mlp
    for part in ("query", "key", "value", "out"):
        setattr(attention, part, Named(getattr(attention, part), f"{part}_proj"))
    inputs = ("gate", "up") if hasattr(mlp, "gate") else ("up",)
    for i, part in enumerate(inputs):
        setattr(mlp, part, Named(getattr(mlp, part), f"mlpwi_{i}" if len(inputs) > 1 else "mlpwi"))


def decoder(kind: type, config: Callable[..., Any], unrolled: bool) -> Model:
    """Return a decoder of `models/`. Its layers are remat regions that the model marks itself."""

    def made(policy: Any) -> tuple[Callable[..., Any], Any]:
        def build() -> Any:
            depth = UNROLLED_DEPTH if unrolled else DEPTH
            options = {"remat": policy, "scan_layers": not unrolled, "depth": depth}
            model = kind(config(**options), rngs=nnx.Rngs(0))
            for layer in model.layers.each if unrolled else [model.layers.each]:
                with_names(layer)
            return model

        graphdef, params = nnx.split(nnx.eval_shape(build))
        loss = lambda params, tokens: nnx.merge(graphdef, params).loss(tokens, chunk=None)
        return loss, params

    marked, params = made("save_nothing")

    def gradient(params: Any, tokens: Any, policy: Any) -> Any:
        return jax.grad(xform.passes.RegionPolicy(policy)(marked))(params, tokens)

    def site(params: Any, tokens: Any, policy: Any) -> Any:
        return jax.grad(made(policy)[0])(params, tokens)

    return Model(gradient, (params, TOKENS), unrolled, site)


def gpt2() -> Model:
    """Return GPT-2, scanned."""
    return decoder(GPT2, lambda **options: GPT2Config(**SIZES, **options), unrolled=False)


def llama() -> Model:
    """Return Llama with grouped queries, unrolled."""
    return decoder(
        Llama,
        lambda **options: LlamaConfig(**SIZES, kv_heads=2, mlp_width=768, **options),
        unrolled=True,
    )


EXPERTS, HIDDEN = 4, 512


def expert_layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    """Run each token `[T, D]` through one of four gated MLPs."""
    scores = jax.nn.softmax(x @ w["router"])
    chosen = jnp.argmax(scores, -1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=EXPERTS).astype(jnp.int32)
    rows = checkpoint_name(x[order], "moe_x_sorted")
    gate = checkpoint_name(jax.lax.ragged_dot(rows, w["gate"], sizes), "moe_mlpwi_0")
    up = checkpoint_name(jax.lax.ragged_dot(rows, w["up"], sizes), "moe_mlpwi_1")
    rows = jax.lax.ragged_dot(jax.nn.silu(gate) * up, w["down"], sizes)
    out = checkpoint_name(rows, "moe_mlpwo")[jnp.argsort(order)]
    return x + out * jnp.max(scores, -1, keepdims=True), None


def experts() -> Model:
    """Return a mixture of experts, scanned."""

    def gradient(ws: Any, x: Any, policy: Any) -> Any:
        layer = jax.checkpoint(expert_layer, policy=policy)
        return jax.grad(lambda ws: jnp.mean(jax.lax.scan(layer, x, ws)[0] ** 2))(ws)

    type_of = lambda *shape: jax.ShapeDtypeStruct((DEPTH, *shape), jnp.float32)
    ws = {
        "router": type_of(WIDTH, EXPERTS),
        "gate": type_of(EXPERTS, WIDTH, HIDDEN),
        "up": type_of(EXPERTS, WIDTH, HIDDEN),
        "down": type_of(EXPERTS, HIDDEN, WIDTH),
    }
    x = jax.ShapeDtypeStruct((4 * BATCH * LENGTH, WIDTH), jnp.float32)
    return Model(gradient, (ws, x), unrolled=False)
