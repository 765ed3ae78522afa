"""`residuals`: what a backward pass keeps, as a table."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.tree_util import keystr

from xform.interpret.joint import Plan, analyze
from xform.interpret.node import gather
from xform.planner.residuals import Residuals, residuals_of
from xform.planner.saved import plan
from xform.policies import check, min_cut
from xform.transforms.function import Tree, as_array, call, check_callable, function, positions
from xform.transforms.reverse import Policy


def residuals(
    f: Callable[..., Any],
    *args: Tree,
    policy: Policy = None,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
) -> Residuals:
    """What `xform.vjp(f, *args, policy=policy)` keeps for its backward pass.

    Args:
      f: pure function of pytrees of arrays.
      *args: arrays, or `jax.ShapeDtypeStruct`s in pytrees; nothing is run or allocated.
      policy: of `xform.policies` or `jax.checkpoint_policies`; None is `min_cut`, as under `jit`.
      argnums: position or positions of the arguments to differentiate, as for `grad`; all others
        may be any Python object. None: every argument, as for `vjp`.
      has_aux: whether `f` returns a pair, of which only the first is differentiated.

    Returns:
      A `Residuals` table that prints and iterates over rows: type, bytes x trip count, operation,
      the user's line (inside loop bodies and calls), and why. Rows are sorted by size.
      `total_bytes` is what is kept; arguments, which are read where they are, are counted apart in
      `argument_bytes`. Bytes are over all devices, and those of a compiled function.

    Raises:
      MissingRule: a primitive in `f` has no rule.
      WrongArgument: `f` is not callable, or `argnums` or `policy` is unusable.

    Cost: one trace of `f` and its derivative.

    >>> def loss(w, x):
    ...     step = lambda h, w: (jnp.sin(h @ w), None)
    ...     return jax.lax.scan(step, x, w)[0].sum()
    >>> w = jax.ShapeDtypeStruct((12, 64, 64), jnp.float32)
    >>> x = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    >>> kept = xform.residuals(loss, w, x)
    >>> [(row.type, row.trips, row.operation, row.kind) for row in kept]
    [('float32[32,64]', 12, 'cos', 'kept'), ('float32[32,64]', 12, 'sin', 'carry'),
     ('float32[12,64,64]', 1, 'w', 'argument')]
    >>> kept.total_bytes, kept.argument_bytes
    (196608, 196608)
    """
    how, inputs, name = planned("residuals", f, args, policy, argnums, has_aux)
    by = _said(check(min_cut if policy is None else policy))
    return residuals_of(how, inputs, f"kept for the backward pass of {name}, {by}")


def _said(policy: Any) -> str:
    return getattr(policy, "__name__", repr(policy))


def planned(asked: str, f: Callable[..., Any], args: Sequence[Tree], policy: Policy,
            argnums: int | Sequence[int] | None, has_aux: bool):  # fmt: skip
    """The plan of the derivative of `f`, what its inputs are called, and what `f` is called.

    Arrays and types are traced alike where they are differentiated; nothing is run.
    """
    check_callable(f, asked)
    at = range(len(args)) if argnums is None else positions(argnums, len(args), asked)
    leaves, tree = jax.tree.flatten_with_path(args)
    # As in `grad`, the other arguments are held; but types cannot be, so they are traced.
    on = [path[0].idx in at for path, _ in leaves]
    abstract = [isinstance(x, jax.ShapeDtypeStruct) for _, x in leaves]
    traced = tuple(a or b for a, b in zip(on, abstract, strict=True))
    given = [
        x if a else as_array(x, asked)
        for (_, x), a, t in zip(leaves, abstract, traced, strict=True)
        if t
    ]
    found: list[tuple[Plan, list[str], str]] = []

    @functools.wraps(f, updated=())
    def held(*given: Any) -> Any:
        rest = iter(given)
        full = [next(rest) if t else x for (_, x), t in zip(leaves, traced, strict=True)]
        return f(*jax.tree.unflatten(tree, full))

    def run(*given: Any) -> None:
        fun, _ = function(call(held, given, asked, has_aux))
        wanted = (*(False,) * fun.n_consts, *gather(on, traced))
        active = tuple(a and w for a, w in zip(fun.active(), wanted, strict=True))
        kind = min_cut if policy is None else policy
        how = plan(analyze(fun.program, active, fun.differentiable()), kind, top=True)
        names = _names(f, len(args))
        inputs = [names[path[0].idx] + keystr(path[1:]) for path, _ in gather(leaves, traced)]
        found.append((how, [*("closed over",) * fun.n_consts, *inputs], fun.signature.name))

    jax.eval_shape(run, *given)
    return found[0]


def _names(f: Callable[..., Any], n: int) -> list[str]:
    """What a function calls its first `n` arguments."""
    try:
        bound = inspect.signature(f).bind_partial(*range(n)).arguments
    except (TypeError, ValueError):
        return [f"argument {i}" for i in range(n)]
    several = ([f"{k}[{i}]" for i in range(len(v))] if isinstance(v, tuple) else [k]
               for k, v in bound.items())  # fmt: skip
    return [name for names in several for name in names]
