"""Replace JAX's transforms by xform's in every module: `install`, `uninstall`, `is_installed`.

`install` looks for JAX's transforms in the names of all loaded modules, under any name, and puts
xform's in their place. Modules that are imported later get xform's too, because `jax.grad` itself
is then xform's. JAX's own modules, `jax._src`, keep JAX's transforms. Libraries that look up JAX's
transforms when they are called, such as Flax (`nnx.grad`), Equinox (`filter_grad`), Haiku and
Optax, are then differentiated by xform too.
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
from xform.policies.budgets import bounds_peak
from xform.steps.replacement import planning_jit
from xform.steps.step_plan import StepPlan
from xform.transforms import checkpoint, forward, jacobian, reverse
from xform.transforms.recorded import in_step

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

# JAX's transforms, as far as this version of JAX has them. `jit` is replaced only for a budget.
THEIRS: dict[str, Transform] = {n: getattr(jax, n) for n in (*_OURS, "jit") if hasattr(jax, n)}
# For each name in `THEIRS`, the transform that modules have at present: JAX's, or a replacement.
_current = dict(THEIRS)


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
      policy: a policy of `xform.policies` or `jax.checkpoint_policies`, or its text, such as
        "save_dots", for every `grad`, `value_and_grad`, `vjp` and `fwd_and_bwd` that is called
        without one. None keeps the default of each transform. A budget of the peak, or "auto",
        bounds each step as a whole: `jax.jit` is then `xform.jit` with that budget, for each
        outermost jitted function that takes a derivative. Outside of jitted functions, the budget
        is for each derivative.

    Returns:
      A context manager for the `with` statement; ignore it after a plain call.

    Raises:
      WrongArgument: `policy` is not a policy; then no module is changed.

    After the call, JAX's names raise xform's errors, such as `BudgetInfeasible`. (`python -m xform
    run` calls JAX's transform after such an error instead.)

    Cost: some hundredths of a second, to look through the names of all modules.

    >>> with xform.install(policy=xform.policies.save_dots):
    ...     print(float(jax.grad(jnp.sin)(0.0)), xform.is_installed())
    1.0 True
    >>> xform.is_installed()
    False
    """
    before, with_block = dict(_current), contextlib.ExitStack()
    replace_transforms(replacements(policy))
    with_block.callback(replace_transforms, before)
    return with_block


def uninstall() -> None:
    """Undo `install`: every module gets back JAX's transforms. It may be called at any time.

    >>> xform.uninstall()
    >>> jax.grad is xform.grad
    False
    """
    replace_transforms(THEIRS)


def is_installed() -> bool:
    """Return whether xform's transforms replace JAX's now.

    >>> xform.is_installed()
    False
    """
    return _current != THEIRS


def replacements(
    policy: Any = None, notify: Callable[[StepPlan], None] = lambda plan: None
) -> dict[str, Transform]:
    """Return, for each of JAX's transforms by name, a function that takes its place.

    It takes the arguments of JAX's transform and calls xform's. `policy` is the policy of calls
    without one; None keeps the default of each transform. If `policy` bounds whole steps, `notify`
    is called with the plan of each step.

    Raises:
      WrongArgument: `policy` is not a policy.
    """
    policy = parse(policy)
    ours = {name: _replacement(name, policy) for name in THEIRS if name in _OURS}
    if not bounds_peak(policy):
        return ours | {"jit": THEIRS["jit"]}
    return ours | {"jit": planning_jit(policy, notify)}


def _replacement(name: str, policy: Any) -> Transform:
    """Return the function that takes the place of JAX's transform `name`."""
    ours, theirs = _OURS[name], THEIRS[name]
    our_parameters = inspect.signature(ours).parameters
    function_parameter, *their_options = inspect.signature(theirs).parameters
    dropped = [k for k in their_options if k not in our_parameters]
    default = {"policy": policy} if policy is not None and name in _PLANNED else {}

    @functools.wraps(theirs)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if function_parameter in kwargs:
            args = (kwargs.pop(function_parameter), *args)
        for k in dropped:  # such as `reduce_axes`, which JAX accepts if it is empty
            if k in kwargs and not kwargs[k]:
                del kwargs[k]
        in_planned_step = bounds_peak(policy) and in_step()  # its plan covers this derivative
        return ours(*args, **kwargs if in_planned_step else default | kwargs)

    replacement.__module__ = "jax"  # so that pickle finds it
    return replacement


def replace_transforms(transforms: Mapping[str, Transform]) -> None:
    """Replace the transforms that modules have at present by `transforms`, a mapping by name.

    If this fails, no module is changed. Modules of JAX's internals and of xform keep JAX's own.
    """
    new = {id(_current[name]): transform for name, transform in transforms.items()}
    originals = {id(THEIRS[name]) for name in transforms if _current[name] is THEIRS[name]}
    changes: list[tuple[dict[str, Any], str, Any]] = []
    for module, names in loaded_modules():
        package = module.partition(".")[0]
        keeps_originals = package in ("xform", "jaxlib") or f"{module}.".startswith("jax._src.")
        changes += [
            (names, key, value)
            for key, value in list(names.items())
            if new.get(id(value), value) is not value
            and not (keeps_originals and id(value) in originals)
        ]
    changed = 0
    try:
        for names, key, value in changes:
            names[key] = new[id(value)]
            changed += 1
    except BaseException:  # also an interrupt by the user
        for names, key, value in changes[:changed]:
            names[key] = value
        raise
    _current.update(transforms)
