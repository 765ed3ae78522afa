"""Find the user's function in a wrapper of JAX, to tell whether two wrappers are equivalent."""

from __future__ import annotations

from typing import Any

# JAX's functions that wrap a user's function, by qualified name: the variable of their closure that
# holds the wrapped function.
_WRAPPERS = {
    "_memoize.<locals>.memoized": "fn",
    "DynamicJaxprTrace.process_custom_jvp_call.<locals>.jvp_jaxpr_thunk": "jvp",
    "DynamicJaxprTrace.process_custom_vjp_call.<locals>.fwd_jaxpr_from_zeros": "fwd",
    "DynamicJaxprTrace.process_custom_vjp_call.<locals>.out_trees_": "out_trees",
    "lift_jvp.<locals>.jvp": "jvp_jaxpr_fun",
    "lift_fwd.<locals>.fwd": "fwd_jaxpr_thunk",
    "transformation_with_aux2.<locals>.<lambda>": "out_store",
    # Here the result is the whole closure, without the tracers that it holds for messages.
    "linear_call.<locals>.transpose_thunk": "",
}


def innermost(f: Any) -> Any:
    """Return the user's function inside all wrappers of JAX; `f` itself if it is not a wrapper."""
    while (inner := unwrapped(f)) is not f:
        f = inner
    return f


def unwrapped(f: Any) -> Any:
    """Return the user's function inside a wrapper of JAX; `f` itself if it is not a wrapper.

    JAX wraps the rules of custom functions in new objects at each trace or bind. Two wrappers of
    the same function are equivalent if they drop the same number of constants from the arguments,
    and transform the other arguments in the same way. So the result contains this number and the
    transforms, if there are any. Equal results mean equivalent functions.
    """
    if not (getattr(f, "__module__", "") or "").startswith("jax."):
        return f
    if type(f).__name__ == "WrappedFun":
        transforms = [(g, args) for g, args in f.transforms
                      if g.__name__ != "_handle_consts_in_bwd" or any(args)]  # fmt: skip
        return (f.f, tuple(transforms), f.params) if transforms or f.params else f.f
    if getattr(f, "__qualname__", "") not in _WRAPPERS or not f.__closure__:
        return f
    cells = zip(f.__code__.co_freevars, f.__closure__, strict=True)
    closure = {name: cell.cell_contents for name, cell in cells}
    if not _WRAPPERS[f.__qualname__]:
        return tuple(v for k, v in closure.items() if k not in ("residual_args", "linear_args"))
    inner, skipped = closure[_WRAPPERS[f.__qualname__]], closure.get("num_consts", 0)
    return (skipped, inner) if skipped else inner
