"""xform's transforms for functions of Flax NNX modules, such as `xform.flax.value_and_grad(loss)`.

The names, arguments and meaning are the same as in `flax.nnx`. NNX's own transforms use JAX's
automatic differentiation; these use xform's. A function may change the state of a module, such as
running statistics or random counters; a transform writes the changes to the caller's module.
`jit` is NNX's own `jit` with a budget for the memory of the whole compiled step.

Every transform has NNX's two options, and None means NNX's own setting (`nnx.set_graph_mode`,
`nnx.set_graph_updates`):

- `graph=False`: modules are trees, and a Variable that two modules share is an error;
- `graph_updates=False`, which `graph=False` implies: new values of Variables are written back, but
  changes of structure, such as a new Variable, are not.

Linen needs none of this: its `apply` is a pure function, so `xform.grad` works on it.
"""

from xform.introspection.packages import require_package

with require_package("flax", "Flax", by="xform.flax", brings="train"):
    from xform.flax.fused import fused_update
    from xform.flax.gradient import grad, value_and_grad
    from xform.flax.maps import jvp, vjp
    from xform.flax.region import remat
    from xform.flax.step import jit

__all__ = ["fused_update", "grad", "jit", "jvp", "remat", "value_and_grad", "vjp"]
