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

# Since 0.12 JAX passes symbolic zeros to the stored backward function of a custom_vjp, which turns
# them into arrays if the user's function takes none.
BACKWARD_FILLS_ZEROS = jax.__version_info__ >= (0, 12)


def wrap_like(function: Any, f: Callable[..., Any]) -> Any:
    """Wrap `f` as JAX wraps functions of custom rules, with the debug information of `function`."""
    return linear_util.wrap_init(f, debug_info=function.debug_info)


def call_again(function: Any, *args: Any) -> Any:
    """Call a wrapped function, which may have been called before.

    A wrapped function stores the trees of its results once and refuses other trees, so the stores
    are emptied first.
    """
    for store in function.stores:
        if store:
            store.reset()
    return function.call_wrapped(*args)


def traced_jvp_rule(params: dict[str, Any], active: Sequence[bool]) -> Sequence[bool]:
    """Trace the rule of a custom_jvp in a jaxpr; return which outputs have a tangent.

    `params` are those of its equation, and `active` says which inputs have a tangent. JAX keeps the
    trace for later calls with the same active inputs.
    """
    inputs = active[params["num_consts"] :]
    zeros = [params["symbolic_zeros"] and not on for on in inputs]
    *_, out_zeros = params["jvp_jaxpr_fun"].call_wrapped(*zeros)
    return [not zero for zero in out_zeros]


def trace_forward_rule(params: dict[str, Any], active: Sequence[bool]) -> None:
    """Trace the forward function of a custom_vjp in a jaxpr; JAX keeps the trace."""
    params["fwd_jaxpr_thunk"].call_wrapped(*active[params["num_consts"] :])


def with_more_cotangents(bwd: Any, avals: Sequence[Any]) -> Any:
    """Return the backward function `bwd` of a custom_vjp for a call with additional inputs.

    `avals` are the types of these inputs. Their cotangents are symbolic zeros. Like `bwd`, the
    result returns cotangents, or since JAX 0.11 a pair of cotangents and log.
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

    The log is a dict of the values that the user logs, or None. Before JAX 0.11 it is always None.
    """
    out = bwd.call_wrapped(*residuals, *cts)
    return (list(out[0]), out[1]) if _has_log(out) else (list(out), None)


def _has_log(out: Any) -> bool:
    """Return whether a backward function returned a pair of cotangents and log (since 0.11)."""
    return len(out) == 2 and isinstance(out[0], list | tuple)
