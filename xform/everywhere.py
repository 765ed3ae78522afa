"""Replace JAX's transforms by xform's in every module: `install`, `uninstall`, `is_installed`.

A module with one of JAX's transforms under any name gets xform's instead. Modules that are imported
later get it too, because `jax.grad` itself is then xform's. JAX's own modules, `jax._src`, keep
JAX's transforms. Some libraries look up JAX's transforms when they are called (Flax's `nnx.grad`
and `nn.remat`, Equinox's `filter_grad`, Haiku's, Optax's). xform then differentiates for them, and
nothing else is needed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from xform.introspection.loaded import loaded_modules
from xform.jacobians import jacobian as jacobians
from xform.policies import parse
from xform.transforms import checkpoint, forward, jacobian, reverse

Transform = Callable[..., Any]

_OURS: dict[str, Transform] = {
    "grad": reverse.grad,
    "value_and_grad": reverse.value_and_grad,
    "vjp": reverse.vjp,
    "jvp": forward.jvp,
    "linearize": forward.linearize,
    "linear_transpose": reverse.linear_transpose,
    "jacfwd": jacobian.jacfwd,
    "jacrev": jacobian.jacrev,
    "jacobian": jacobians.jacobian,
    "hessian": jacobian.hessian,
    "checkpoint": checkpoint.checkpoint,
    "remat": checkpoint.checkpoint,
    "fwd_and_bwd": reverse.fwd_and_bwd,
}
# The transforms that take a policy for the whole function; a remat region has its own policy.
_PLANNED = ("grad", "value_and_grad", "vjp", "fwd_and_bwd")

THEIRS: dict[str, Transform] = {n: getattr(jax, n) for n in _OURS if hasattr(jax, n)}
# The transforms that modules have now instead of JAX's.
_now = dict(THEIRS)


def install(policy: Any = None) -> contextlib.AbstractContextManager[Any]:
    """Replace JAX's transforms by xform's in every module.

    After the call, `jax.grad`, `value_and_grad`, `vjp`, `jvp`, `linearize`, `linear_transpose`,
    `jacfwd`, `jacrev`, `jacobian`, `hessian`, `checkpoint`, `remat` and `fwd_and_bwd` are xform's.
    This includes names that a module imported, and calls from libraries. The transforms take JAX's
    arguments, and `policy=` too. Other references to JAX's transforms (a default argument, a
    partial, a decorated function) are not replaced, and neither are those in `jax._src`. A second
    call replaces the policy of the first.

    Like `jax.set_mesh`, it works as a plain call and in a `with` statement. At the end of the
    `with` block, every module gets back the transforms that it had before the call.

    Args:
      policy: a policy of `xform.policies` or `jax.checkpoint_policies`, for every `grad`,
        `value_and_grad`, `vjp` and `fwd_and_bwd` that is called without one. None keeps the
        default of each transform.

    Returns:
      A context manager for the `with` statement; ignore it after a plain call.

    Raises:
      WrongArgument: `policy` is not a policy; then no module is changed. After the call, JAX's
        names raise xform's errors, such as `BudgetInfeasible`. `python -m xform run` continues
        after such errors instead.

    Cost: one pass over the names of all modules, some hundredths of a second.

    >>> with xform.install(policy=xform.policies.save_dots):
    ...     print(float(jax.grad(jnp.sin)(0.0)), xform.is_installed())
    1.0 True
    >>> xform.is_installed()
    False
    """
    before, end = dict(_now), contextlib.ExitStack()
    replace_transforms(replacements(policy))
    end.callback(replace_transforms, before)
    return end


def uninstall() -> None:
    """Undo `install`: every module gets back JAX's transforms. It may be called at any time.

    >>> xform.uninstall()
    >>> jax.grad is xform.grad
    False
    """
    replace_transforms(THEIRS)


def is_installed() -> bool:
    """Tell whether xform's transforms replace JAX's now.

    >>> xform.is_installed()
    False
    """
    return _now != THEIRS


def replacements(policy: Any = None) -> dict[str, Transform]:
    """For each of JAX's transforms, by name, a function with its arguments that calls xform's."""
    policy = parse(policy)
    return {name: _replacement(name, policy) for name in THEIRS}


def _replacement(name: str, policy: Any) -> Transform:
    ours, theirs = _OURS[name], THEIRS[name]
    taken = inspect.signature(ours).parameters
    function, *options = inspect.signature(theirs).parameters
    dropped = [k for k in options if k not in taken]
    fixed = {"policy": policy} if policy is not None and name in _PLANNED else {}

    @functools.wraps(theirs)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if function in kwargs:
            args = (kwargs.pop(function), *args)
        for k in dropped:  # such as `reduce_axes`, which JAX accepts if it is empty
            if k in kwargs and not kwargs[k]:
                del kwargs[k]
        return ours(*args, **fixed | kwargs)

    replacement.__module__ = "jax"  # so that pickle finds it
    return replacement


def replace_transforms(transforms: Mapping[str, Transform]) -> None:
    """Replace the transforms that modules have now by these, in all modules or in none."""
    first = [n for n in transforms if _now[n] is THEIRS[n]]
    new = {id(_now[n]): x for n, x in transforms.items()}
    keep = {id(THEIRS[n]) for n in first}
    changes: list[tuple[dict[str, Any], str, Any]] = []
    for name, names in loaded_modules():
        own = name.partition(".")[0] in ("xform", "jaxlib") or f"{name}.".startswith("jax._src.")
        changes += [(names, key, value) for key, value in list(names.items())
                    if id(value) in new and not (own and id(value) in keep)]  # fmt: skip
    done = 0
    try:
        for names, key, value in changes:
            names[key] = new[id(value)]
            done += 1
    except BaseException:  # also for an interrupt by the user
        for names, key, value in changes[:done]:
            names[key] = value
        raise
    _now.update(transforms)
