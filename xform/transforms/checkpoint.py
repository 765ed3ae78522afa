"""`checkpoint`, also called `remat`: recompute a region in the backward pass.

A region is a call of a function as one equation of JAX's `checkpoint` primitive, with a policy that
says which of its values are saved.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from xform import policies
from xform._jax import jaxpr_and_consts, jit
from xform.errors import WrongArgument
from xform.introspection.argnums import numbers
from xform.introspection.callables import check_callable, definition_site, function_name
from xform.policies.regions import region_policy
from xform.rules.call import remat_region_of
from xform.storage.bounded_cache import BoundedCache
from xform.transforms.function import as_array
from xform.transforms.planned_regions import name_saved_values


def checkpoint(
    f: Callable[..., Any],
    *,
    prevent_cse: bool | Sequence[Any] = True,
    policy: Any = None,
    static_argnums: int | tuple[int, ...] = (),
    static_argnames: str | Iterable[str] = (),
) -> Callable[..., Any]:
    """Return a function like `f` whose intermediate values the backward pass recomputes.

    The backward pass saves only the arguments and the values that `policy` names. The region is
    marked in the same way as by `jax.checkpoint`, so `jax.grad` honours it too. Under xform's
    transforms no compiler undoes the recompute. With JAX 0.10.2, XLA on CPU does undo
    `jax.checkpoint` in unrolled code.

    Args:
      f: pure function of pytrees of arrays.
      prevent_cse: whether to keep the compiler from merging the recompute with the forward pass;
        or a sequence with a bool, or a tree of bools, for each argument. Inside a scan the compiler
        cannot merge them, so this option emits nothing there.
      policy: a policy of `xform.policies` or `jax.checkpoint_policies`, or its text, such as
        "save_dots"; None saves nothing. A budget must be `budget(n, of="saved")`, which limits the
        bytes that each call saves. A budget of the peak is an error, because a region has no peak
        of its own.
      static_argnums: positions of arguments that are not arrays. Each call must pass these
        arguments by position.
      static_argnames: names of keyword arguments that are not arrays.

    Returns:
      A function with the same arguments and the same value as `f`.

    Raises:
      WrongArgument: `policy` is not a policy, or is a budget of the peak; or a call has no
        positional argument at one of `static_argnums`.

    Cost: in reverse mode, about one more evaluation of `f`, less what the policy saves.
    Source: Griewank, "Achieving logarithmic growth of temporal and spatial complexity in reverse
    automatic differentiation", Optimization Methods and Software 1 (1992).

    >>> layer = xform.remat(jnp.sin, policy=xform.policies.save_nothing)
    >>> float(xform.grad(layer)(0.0))
    1.0
    """
    check_callable(f, "checkpoint")
    policy = policies.parse(policy)
    region_policy(policy)
    static_names = _name_set(static_argnames)
    static_numbers = numbers(static_argnums, "checkpoint", "static_argnums")
    _check_cse(prevent_cse)

    @functools.wraps(f, updated=())
    def region(*args: Any, **kwargs: Any) -> Any:
        static_positions = _static_positions(static_numbers, f, len(args))
        static_positions |= _named_positions(f, static_names, len(args))
        static = tuple((i, args[i]) for i in sorted(static_positions))
        static += tuple((k, kwargs[k]) for k in sorted(static_names & kwargs.keys()))
        dynamic = [x for i, x in enumerate(args) if i not in static_positions]
        keywords = {k: x for k, x in kwargs.items() if k not in static_names}
        run = _bind_static(f, static) if static else f
        leaves = jax.tree.leaves((dynamic, keywords))
        for x in leaves:
            as_array(x, "checkpoint")  # raises an error unless x is an array or a number
        traced = jit(run).trace(*dynamic, **keywords)
        jaxpr = traced.jaxpr
        if len(jaxpr_and_consts(jaxpr)[0].invars) != len(leaves):
            # The function closes over a tracer. jit adds it to the inputs of its jaxpr;
            # `make_jaxpr` returns it as a constant.
            jaxpr = jax.make_jaxpr(run)(*dynamic, **keywords)
        cse = prevent_cse
        if not isinstance(cse, bool):
            try:
                cse = tuple(jax.tree.leaves(jax.tree.broadcast(tuple(cse), tuple(dynamic))))
            except ValueError as error:
                raise _wrong_prevent_cse(prevent_cse, str(error).splitlines()[0]) from None
        jax_policy = policy
        if isinstance(policy, policies.MinCut | policies.Budget):
            jaxpr, jax_policy = name_saved_values(jaxpr, policy)
        out = remat_region_of(jaxpr, leaves, jax_policy, cse)
        return jax.tree.unflatten(jax.tree.structure(traced.out_info), out)

    return region


def _name_set(names: Any) -> set[str]:
    """Return the argument names, given as one string or as several, as a set."""
    several = (names,) if isinstance(names, str) else names
    if isinstance(several, Iterable) and all(isinstance(name, str) for name in several):
        return set(several)
    raise WrongArgument(
        f"checkpoint with static_argnames={names!r}",
        "it is neither one name nor a list of names",
        "",
        "give names of arguments, such as static_argnames='train' or ('train', 'mode')",
    )


def _check_cse(prevent_cse: Any) -> None:
    """Raise WrongArgument unless `prevent_cse` is a bool or a sequence."""
    if not isinstance(prevent_cse, bool | Sequence):
        raise _wrong_prevent_cse(prevent_cse, "it is neither a bool nor a sequence")


def _wrong_prevent_cse(prevent_cse: Any, problem: str) -> WrongArgument:
    """Return the error for a wrong `prevent_cse`."""
    return WrongArgument(
        f"checkpoint with prevent_cse={prevent_cse!r}",
        problem,
        "",
        "give True or False, or a bool or a tree of bools for each argument that is not static",
    )


# Static arguments: pairs of a position or a name, and the value.
Static = tuple[tuple[int | str, Any], ...]
# For each live function: the functions that `_bind_static` made from it, by the static arguments.
_BOUND: weakref.WeakKeyDictionary[Any, BoundedCache[Any, Any]] = weakref.WeakKeyDictionary()


def _bind_static(f: Callable[..., Any], static: Static) -> Callable[..., Any]:
    """Bind static arguments. Equal arguments give the same function, so `jit` reuses its trace."""
    key = tuple((k, type(x), x) for k, x in static)  # 1 and True are equal
    try:
        hash(key)
        cache = _BOUND.setdefault(f, BoundedCache(16))
    except TypeError:  # not hashable: such a call is traced each time
        return _bind(lambda: f, static)
    if key not in cache:
        cache[key] = _bind(weakref.ref(f), static)
    return cache[key]


def _bind(function_of: Callable[[], Any], static: Static) -> Callable[..., Any]:
    """Bind static arguments of `function_of()`, which may be a weak reference to a function."""
    names = {k: x for k, x in static if isinstance(k, str)}

    def bound(*args: Any, **kwargs: Any) -> Any:
        full = list(args)
        for i, x in static:
            if isinstance(i, int):
                full.insert(i, x)
        return function_of()(*full, **kwargs, **names)

    bound.__name__ = getattr(function_of(), "__name__", "held")
    return bound


def _static_positions(numbers: Sequence[int], f: Callable[..., Any], n: int) -> set[int]:
    """Return the positions `numbers`, some of them negative, as positions from 0 to n - 1.

    Raise WrongArgument if one is out of range for a call with n arguments.
    """
    if wrong := [i for i in numbers if not -n <= i < n]:
        raise WrongArgument(
            f"checkpoint of {function_name(f)} with static_argnums={wrong[0]}",
            f"the call has {n} positional argument{'s' * (n != 1)}",
            definition_site(f),
            "pass static arguments by position, or name them: static_argnames='train'",
        )
    return {i % n for i in numbers}


def _named_positions(f: Callable[..., Any], names: set[str], n: int) -> set[int]:
    """Return which of the first `n` positional arguments have one of these names."""
    if not names:
        return set()
    return {i for i, k in enumerate(list(inspect.signature(f).parameters)[:n]) if k in names}
