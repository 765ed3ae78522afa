"""xform's transforms in the place of JAX's, in every module: `install`, `uninstall`, `installed`.

A module that holds one of JAX's transforms under any name holds xform's instead, and so does one
that is imported later, as `jax.grad` itself is xform's. JAX's own modules, `jax._src`, keep theirs.
Libraries that look JAX's transforms up when they are called (Flax's `nnx.grad` and `nn.remat`,
Equinox's `filter_grad`, Haiku's, Optax's) are differentiated by xform with no more than that.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from xform.introspection.loaded import loaded
from xform.jacobians import jacobian as jacobians
from xform.policies import check
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
# Those to which a policy for the whole function can be given; that of a region is its own.
_PLANNED = ("grad", "value_and_grad", "vjp", "fwd_and_bwd")

THEIRS: dict[str, Transform] = {n: getattr(jax, n) for n in _OURS if hasattr(jax, n)}
# What stands in their place now.
_now = dict(THEIRS)


def install(policy: Any = None) -> contextlib.AbstractContextManager[Any]:
    """Put xform's transforms in the place of JAX's, in every module.

    From then on `jax.grad`, `value_and_grad`, `vjp`, `jvp`, `linearize`, `linear_transpose`,
    `jacfwd`, `jacrev`, `jacobian`, `hessian`, `checkpoint`, `remat` and `fwd_and_bwd` are xform's,
    also where a module has imported them by name, and where a library calls them. They take what
    JAX's take, and `policy=` too. What holds one of JAX's otherwise (a default argument, a partial,
    a decorated function) keeps it; `jax._src` does. A second call replaces the first one's policy.

    Like `jax.set_mesh`, it works as a statement of its own and in a `with` statement: at the end of
    the block every module has the transforms again that it had before the call.

    Args:
      policy: of `xform.policies` or `jax.checkpoint_policies`, for each `grad`, `value_and_grad`,
        `vjp` and `fwd_and_bwd` that is not given one; None is what each does by itself.

    Returns:
      A context manager for the `with` statement. Without one, ignore it.

    Raises:
      WrongArgument: `policy` is no policy. From then on JAX's names raise what xform's do, such as
        `BudgetInfeasible`; `python -m xform run` goes on instead. An `install` that fails changes
        no module.

    Cost: one look at each name of each module, some hundredths of a second.

    >>> with xform.install(policy=xform.policies.save_dots):
    ...     print(float(jax.grad(jnp.sin)(0.0)), xform.installed())
    1.0 True
    >>> xform.installed()
    False
    """
    before, end = dict(_now), contextlib.ExitStack()
    put(doors(policy))
    end.callback(put, before)
    return end


def uninstall() -> None:
    """Undo `install`: every module is as it was. Without an `install` nothing happens.

    >>> xform.uninstall()
    >>> jax.grad is xform.grad
    False
    """
    put(THEIRS)


def installed() -> bool:
    """Tell whether xform's transforms are in the place of JAX's now.

    >>> xform.installed()
    False
    """
    return _now != THEIRS


def doors(policy: Any = None) -> dict[str, Transform]:
    """For each of JAX's transforms, by name, a function that takes the same and calls xform's."""
    if policy is not None:
        check(policy)
    return {name: _door(name, policy) for name in THEIRS}


def _door(name: str, policy: Any) -> Transform:
    ours, theirs = _OURS[name], THEIRS[name]
    taken = inspect.signature(ours).parameters
    function, *options = inspect.signature(theirs).parameters
    dropped = [k for k in options if k not in taken]
    fixed = {"policy": policy} if policy is not None and name in _PLANNED else {}

    @functools.wraps(theirs)
    def door(*args: Any, **kwargs: Any) -> Any:
        if function in kwargs:
            args = (kwargs.pop(function), *args)
        for k in dropped:  # such as `reduce_axes`, which JAX takes if it is empty
            if k in kwargs and not kwargs[k]:
                del kwargs[k]
        return ours(*args, **fixed | kwargs)

    door.__module__ = "jax"  # by which a pickle finds it
    return door


def put(transforms: Mapping[str, Transform]) -> None:
    """Exchange the transforms that modules hold now for these, in every module or in none."""
    first = [n for n in transforms if _now[n] is THEIRS[n]]
    new = {id(_now[n]): x for n, x in transforms.items()}
    keep = {id(THEIRS[n]) for n in first}
    changes: list[tuple[dict[str, Any], str, Any]] = []
    for name, names in loaded():
        own = name.partition(".")[0] in ("xform", "jaxlib") or f"{name}.".startswith("jax._src.")
        changes += [(names, key, value) for key, value in list(names.items())
                    if id(value) in new and not (own and id(value) in keep)]  # fmt: skip
    done = 0
    try:
        for names, key, value in changes:
            names[key] = new[id(value)]
            done += 1
    except BaseException:  # an interrupt by the user is one
        for names, key, value in changes[:done]:
            names[key] = value
        raise
    _now.update(transforms)
