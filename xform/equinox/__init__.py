"""xform's transforms for functions of Equinox modules, such as `xform.equinox.filter_grad(loss)`.

The names, arguments and meaning are the same as in `equinox`. Equinox's own transforms use JAX's
automatic differentiation; these use xform's. Transforms with a backward pass take a `policy`, which
decides the values that are saved for it. In a pytree, arrays of floats or complex numbers are
differentiated. Everything else (functions, strings, integers) is held constant, and is None in
gradients and tangents.

Each transform divides its pytrees with `eqx.partition` into the part that is differentiated, `wrt`,
and the constant rest, `held`. xform's own transform gets a function of `wrt` alone.

`filter_jit` is Equinox's own with a budget for the memory of the whole compiled step.
"""

from xform.introspection.packages import require_package

with require_package("equinox", "Equinox", by="xform.equinox", brings="equinox"):
    from xform.equinox.filter_checkpoint import filter_checkpoint
    from xform.equinox.filter_grad import filter_grad, filter_value_and_grad
    from xform.equinox.filter_jacobian import filter_hessian, filter_jacfwd, filter_jacrev
    from xform.equinox.filter_jit import filter_jit
    from xform.equinox.filter_maps import filter_jvp, filter_vjp

__all__ = [
    "filter_checkpoint",
    "filter_grad",
    "filter_hessian",
    "filter_jacfwd",
    "filter_jacrev",
    "filter_jit",
    "filter_jvp",
    "filter_value_and_grad",
    "filter_vjp",
]
