"""A stack of equal blocks: scanned over stacked parameters, or unrolled, with remat per block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.nets.policies import with_policy


class Stack(nnx.Module):
    """`depth` blocks of one kind, applied one after another.

    Scanned, each parameter has a leading axis of size `depth` and XLA compiles one block.
    Unrolled, there are `depth` modules. Both draw the same initial values from the same key.
    """

    def __init__(
        self,
        make: Callable[[nnx.Rngs], nnx.Module],
        depth: int,
        *,
        scan: bool,
        policy: str | None,
        rngs: nnx.Rngs,
    ) -> None:
        keys = jax.random.split(rngs.params(), depth)

        def build(key: jax.Array) -> nnx.Module:
            return make(nnx.Rngs(params=key))

        self.scan = scan
        self.policy = policy
        self.blocks: Any = nnx.vmap(build)(keys) if scan else nnx.List([build(k) for k in keys])

    def __call__(self, x: jax.Array, *shared: Any) -> jax.Array:
        """Apply every block as `x = block(x, *shared)`; `x` keeps its shape and dtype."""

        def run(graphdef: nnx.GraphDef[Any]) -> Callable[..., jax.Array]:
            # The region is a pure function of (parameters, x, shared), so that a policy sees the
            # parameters as its inputs, which are kept in any case.
            def apply(params: nnx.State, x: jax.Array, *shared: Any) -> jax.Array:
                return nnx.merge(graphdef, params)(x, *shared)

            return with_policy(apply, self.policy)

        if self.scan:
            graphdef, params = nnx.split(self.blocks)
            block = run(graphdef)
            return jax.lax.scan(lambda x, p: (block(p, x, *shared), None), x, params)[0]
        for module in self.blocks:
            graphdef, params = nnx.split(module)
            x = run(graphdef)(params, x, *shared)
        return x


def stack_blocks(blocks: list[nnx.State]) -> nnx.State:
    """Join the parameters of unrolled blocks: leaves `[...]` become `[depth, ...]`."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)


def unstack_blocks(stacked: nnx.State, depth: int) -> list[nnx.State]:
    """Part the parameters of a scanned stack: leaves `[depth, ...]` become `depth` of `[...]`."""
    return [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(depth)]
