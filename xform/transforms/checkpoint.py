"""`checkpoint`, also called `remat`: mark a region that is run again in the backward pass."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from xform import policies
from xform._jax import closed
from xform.callables import check_callable, function_name, written
from xform.errors import WrongArgument
from xform.recent import Recent
from xform.regions import of_region
from xform.rules.call import mark
from xform.transforms.function import as_array, numbers
from xform.transforms.planned_regions import tagged


def checkpoint(
    f: Callable[..., Any],
    *,
    prevent_cse: bool | Sequence[Any] = True,
    policy: Any = None,
    static_argnums: int | tuple[int, ...] = (),
    static_argnames: str | Iterable[str] = (),
) -> Callable[..., Any]:
    """A function like `f` whose intermediate values are recomputed when it is differentiated.

    The backward pass keeps only the arguments, and what `policy` saves. The region is marked as
    `jax.checkpoint` marks it, so that `jax.grad` honours it too; under xform's transforms the
    recompute survives the compiler on every backend, also for unrolled code on CPU, where XLA
    undoes `jax.checkpoint`.

    Args:
      f: pure function of pytrees of arrays.
      prevent_cse: whether the compiler must be kept from merging the recompute with the forward
        pass; or a sequence of trees of bools, for each argument. Inside a scan it cannot merge
        them, and nothing is emitted either way.
      policy: of `xform.policies` or `jax.checkpoint_policies`; None saves nothing. A budget bounds
        what each call saves, `budget(n, of="saved")`: a region has no peak of its own.
      static_argnums: positions of arguments that are not arrays. Each call passes these arguments
        by position.
      static_argnames: names of keyword arguments that are not arrays.

    Returns:
      A function with the arguments and value of `f`.

    Raises:
      WrongArgument: `policy` is no policy, or a budget of the peak; or a call has no positional
        argument at one of `static_argnums`.

    Cost: under reverse mode, about one more evaluation of `f`, less what the policy saves.
    Source: Griewank, "Achieving logarithmic growth of temporal and spatial complexity in reverse
    automatic differentiation", Optimization Methods and Software 1 (1992).

    >>> layer = xform.remat(jnp.sin, policy=xform.policies.save_nothing)
    >>> float(xform.grad(layer)(0.0))
    1.0
    """
    check_callable(f, "checkpoint")
    if policy is not None:
        of_region(policies.check(policy))
    names = _texts(static_argnames)
    places = numbers(static_argnums, "checkpoint", "static_argnums")
    _check_cse(prevent_cse)

    @functools.wraps(f, updated=())
    def region(*args: Any, **kwargs: Any) -> Any:
        at = _static_positions(places, f, len(args)) | _named_positions(f, names, len(args))
        static = tuple((i, args[i]) for i in sorted(at))
        static += tuple((k, kwargs[k]) for k in sorted(names & kwargs.keys()))
        dynamic = [x for i, x in enumerate(args) if i not in at]
        named = {k: x for k, x in kwargs.items() if k not in names}
        run = _held(f, static) if static else f
        leaves = jax.tree.leaves((dynamic, named))
        for x in leaves:
            as_array(x, "checkpoint")  # or an error
        traced = jax.jit(run).trace(*dynamic, **named)
        jaxpr = traced.jaxpr
        if len(closed(jaxpr)[0].invars) != len(leaves):
            # jit keeps its traces, but hides what a closure takes from another trace.
            jaxpr = jax.make_jaxpr(run)(*dynamic, **named)
        cse = prevent_cse
        if not isinstance(cse, bool):
            try:
                cse = tuple(jax.tree.leaves(jax.tree.broadcast(tuple(cse), tuple(dynamic))))
            except ValueError as error:
                raise _no_cse(prevent_cse, str(error).splitlines()[0]) from None
        by = policy
        if isinstance(policy, policies.MinCut | policies.Budget):
            jaxpr, by = tagged(jaxpr, policy)
        out = mark(jaxpr, leaves, by, cse)
        return jax.tree.unflatten(jax.tree.structure(traced.out_info), out)

    return region


def _texts(names: Any) -> set[str]:
    """Names of arguments, of one or several."""
    several = (names,) if isinstance(names, str) else names
    if isinstance(several, Iterable) and all(isinstance(name, str) for name in several):
        return set(several)
    raise WrongArgument(
        f"checkpoint with static_argnames={names!r}",
        "it is neither a name nor several",
        "",
        "give names of arguments, such as static_argnames='train' or ('train', 'mode')",
    )


def _check_cse(prevent_cse: Any) -> None:
    if not isinstance(prevent_cse, bool | Sequence):
        raise _no_cse(prevent_cse, "it is neither a bool nor a sequence")


def _no_cse(prevent_cse: Any, blocked: str) -> WrongArgument:
    return WrongArgument(
        f"checkpoint with prevent_cse={prevent_cse!r}",
        blocked,
        "",
        "give True or False, or for each argument that is not static a bool or a tree of them",
    )


Static = tuple[tuple[int | str, Any], ...]
# For each function that lives, what it is with some arguments held.
_HELD: weakref.WeakKeyDictionary[Any, Recent[Any, Any]] = weakref.WeakKeyDictionary()


def _held(f: Callable[..., Any], static: Static) -> Callable[..., Any]:
    """`f` with some arguments held; one function for one choice, so that its trace is kept."""
    key = tuple((k, type(x), x) for k, x in static)  # 1 and True are equal
    try:
        hash(key)
        cache = _HELD.setdefault(f, Recent(16))
    except TypeError:  # what cannot be found again is traced again
        return _holding(lambda: f, static)
    if key not in cache:
        cache[key] = _holding(weakref.ref(f), static)
    return cache[key]


def _holding(whose: Callable[[], Any], static: Static) -> Callable[..., Any]:
    names = {k: x for k, x in static if isinstance(k, str)}

    def held(*args: Any, **kwargs: Any) -> Any:
        full = list(args)
        for i, x in static:
            if isinstance(i, int):
                full.insert(i, x)
        return whose()(*full, **kwargs, **names)

    held.__name__ = getattr(whose(), "__name__", "held")
    return held


def _static_positions(places: Sequence[int], f: Callable[..., Any], n: int) -> set[int]:
    """The places among `n` positional arguments, from 0; refused where one is not among them."""
    if wrong := [i for i in places if not -n <= i < n]:
        raise WrongArgument(
            f"checkpoint of {function_name(f)} with static_argnums={wrong[0]}",
            f"the call has {n} positional argument{'s' * (n != 1)}",
            written(f),
            "pass static arguments by position, or name them: static_argnames='train'",
        )
    return {i % n for i in places}


def _named_positions(f: Callable[..., Any], names: set[str], n: int) -> set[int]:
    """Which of the first `n` positional arguments bear one of these names."""
    if not names:
        return set()
    return {i for i, k in enumerate(list(inspect.signature(f).parameters)[:n]) if k in names}
