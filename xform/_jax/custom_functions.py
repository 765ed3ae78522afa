"""The functions of `jax.custom_jvp` and `jax.custom_vjp` calls, as JAX wraps and stores them.

JAX wraps the user's function and its rules. In a jaxpr it stores functions that trace a rule when
it is first needed, and keep the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from xform._jax import ad, cotangent_aval, linear_util

# The parameters of calls that hold the rules.
RULE_PARAMS = frozenset({"jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees"})

# Whether JAX replaces symbolic zeros by arrays in the backward function of a custom_vjp, if the
# user's function takes none.
BACKWARD_FILLS_ZEROS = jax.__version_info__ >= (0, 12)


def wrap_like(function: Any, f: Callable[..., Any]) -> Any:
    """Wrap `f` as JAX wraps functions of custom rules, with the debug information of `function`."""
    return linear_util.wrap_init(f, debug_info=function.debug_info)


def call_again(function: Any, *args: Any) -> Any:
    """Call a wrapped function, which may have been called before.

    A wrapped function stores the trees of its results, and else refuses to store others.
    """
    for store in function.stores:
        if store:
            store.reset()
    return function.call_wrapped(*args)


def traced_jvp_rule(params: dict[str, Any], active: Sequence[bool]) -> Sequence[bool]:
    """Trace the rule of a custom_jvp in a jaxpr; return which outputs have a tangent.

    `params` are those of its equation, and `active` says which inputs have a tangent. JAX keeps the
    trace: whoever asks for the rule with the same active inputs gets it.
    """
    inputs = active[params["num_consts"] :]
    zeros = [params["symbolic_zeros"] and not on for on in inputs]
    *_, out_zeros = params["jvp_jaxpr_fun"].call_wrapped(*zeros)
    return [not zero for zero in out_zeros]


def trace_forward_rule(params: dict[str, Any], active: Sequence[bool]) -> None:
    """Trace the forward function of a custom_vjp in a jaxpr, as `traced_jvp_rule` does a rule."""
    params["fwd_jaxpr_thunk"].call_wrapped(*active[params["num_consts"] :])


def with_more_cotangents(bwd: Any, avals: Sequence[Any]) -> Any:
    """The backward function of a custom_vjp for more inputs, of types `avals`: without cotangents.

    `bwd` returns its cotangents as in `pull_custom_vjp`.
    """
    if not avals:
        return bwd
    none = [ad.Zero(cotangent_aval(a)) for a in avals]

    def more(*args: Any) -> Any:
        out = bwd.call_wrapped(*args)
        return ([*out[0], *none], out[1]) if _has_log(out) else [*out, *none]

    return wrap_like(bwd, more)


def pull_custom_vjp(
    bwd: Any, residuals: Sequence[Any], cts: Sequence[Any]
) -> tuple[list[Any], Any]:
    """Call the backward function of a custom_vjp; return its cotangents and its log.

    The log is a dict of the values that the user logs, or None. It is always None in 0.10.
    """
    out = bwd.call_wrapped(*residuals, *cts)
    return (list(out[0]), out[1]) if _has_log(out) else (list(out), None)


def _has_log(out: Any) -> bool:
    """Whether a backward function returned a pair of cotangents and log, as it does in 0.12."""
    return len(out) == 2 and isinstance(out[0], list | tuple)
