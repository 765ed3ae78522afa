"""A stack of equal layers: scanned over stacked parameters, or unrolled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.nets.axes import by_token
from models.nets.policies import with_policy


class Layers(nnx.Module):
    """`depth` layers of one kind, each a module called as `x, out = layer(x, own, shared)`.

    `x` goes from layer to layer. `own` is data for this layer only, such as its random key.
    `shared` is data for all layers. `out` is an additional output.

    With `scan`, each parameter has a leading axis "layers", XLA compiles one layer, and xform plans
    one loop body. Otherwise there are `depth` modules. Both draw the same initial values. `remat`
    is the text of a policy. It makes each layer a remat region with that policy,
    independent of the policy of the whole program.
    """

    def __init__(
        self,
        make: Callable[[nnx.Rngs], nnx.Module],
        depth: int,
        *,
        scan: bool,
        remat: str | None,
        rngs: nnx.Rngs,
    ) -> None:
        keys = jax.random.split(rngs.params(), depth)

        def build(key: jax.Array) -> nnx.Module:
            return make(nnx.Rngs(params=key))

        stacked = nnx.vmap(build, transform_metadata={nnx.PARTITION_NAME: "layers"})
        self.scan, self.remat = scan, remat
        self.each: Any = stacked(keys) if scan else nnx.List([build(key) for key in keys])

    def __call__(self, x: jax.Array, own: Any = None, shared: Any = None) -> tuple[jax.Array, Any]:
        """Run the layers.

        Args:
          x: the input of the first layer.
          own: a pytree whose leaves have one entry per layer, on their first axis.
          shared: passed to every layer.

        Returns:
          The output of the last layer, and the `out` of all layers, stacked on a first axis.
        """

        def run(graphdef: nnx.GraphDef[Any]) -> Callable[..., Any]:
            # A pure function, so that the parameters are inputs, which a policy need not save.
            def layer(params: nnx.State, x: jax.Array, own: Any, shared: Any) -> Any:
                x = by_token(x)
                return nnx.merge(graphdef, params)(x, own, shared)

            return with_policy(layer, self.remat)

        if self.scan:
            graphdef, params = nnx.split(self.each)
            layer = run(graphdef)
            step = lambda x, each: layer(*each[:1], x, *each[1:], shared)
            return jax.lax.scan(step, x, (params, own))
        outs: list[Any] = []
        for i, module in enumerate(self.each):
            graphdef, params = nnx.split(module)
            x, out = run(graphdef)(params, x, jax.tree.map(lambda leaf, i=i: leaf[i], own), shared)
            outs.append(out)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)
