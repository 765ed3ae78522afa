"""`xform.flax.grad` and `value_and_grad`: gradients of scalar functions of Flax NNX modules.

`ModuleBoundary` converts the modules among the arguments to arrays. Each module that is
differentiated is split into two states: the Variables that its `nnx.DiffState` selects, and the
rest. xform's own transform then differentiates a `ModuleObjective`, a pure function of the selected
states.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from flax import nnx

from xform.flax.calls import accepts_nnx_calls, positional
from xform.introspection.argnums import distinct, numbers, positions
from xform.introspection.callables import function_name
from xform.modules.boundary import Function, Mode, ModuleBoundary
from xform.modules.objective import ModuleObjective, diff_states, replace_selected
from xform.transforms import reverse

Argnum = int | nnx.DiffState


@accepts_nnx_calls(n_required=1)
def value_and_grad(f: Function, argnums: Argnum | Sequence[Argnum] = 0, has_aux: bool = False,
                   holomorphic: bool = False, allow_int: bool = False, *, policy: Any = None,
                   graph: Mode = None, graph_updates: Mode = None) -> Function:  # fmt: skip
    """Return a function that computes a scalar function of modules and its gradient.

    Args:
      f: function of modules, Variables and pytrees of arrays that returns a scalar; it may change
        the state of its arguments. Without `f`, a decorator is returned.
      argnums: position or positions of the arguments to differentiate. A module is differentiated
        with respect to its `nnx.Param`s. `nnx.DiffState(position, filter)` in place of a position
        selects other Variables of the module. Arguments of arrays are differentiated as in
        `xform.value_and_grad`.
      has_aux: whether `f` returns a pair `(value, auxiliary)`.
      holomorphic: whether `f` is complex-differentiable; inputs and output must be complex.
      allow_int: whether integer inputs are allowed; their gradients have dtype float0.
      policy: which values are saved for the backward pass: a policy of `xform.policies` or
        `jax.checkpoint_policies`, or its text, such as "save_dots". None is the default of
        `xform.value_and_grad`.
      graph: whether modules may share Variables; None for NNX's setting (`nnx.set_graph_mode`).
      graph_updates: whether changes of a module's structure, such as a new Variable, are written
        back; None for NNX's setting (`nnx.set_graph_updates`). If `graph_updates` or `graph` is
        False, a module is differentiated with respect to all its Variables, and its gradient is a
        module.

    Returns:
      A function with the arguments of `f` that returns `(value, gradient)` or
      `((value, auxiliary), gradient)`, and updates the caller's modules. The gradient with respect
      to a module is an `nnx.State`, as `nnx.Optimizer` takes it. For a sequence of `argnums` the
      gradient is a tuple.

    Raises:
      WrongArgument: there is nothing to differentiate, or `f` is a bound method.
      NotScalar, WrongDtype, MissingRule: as in `xform.value_and_grad`.

    Cost: three to four times the FLOPs of `f`, plus what the policy recomputes.

    >>> from flax import nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> loss = lambda model, x: model(x).sum()
    >>> value, g = xform.flax.value_and_grad(loss)(model, jnp.ones((3, 2)))
    >>> g.bias[...].tolist()
    [3.0]
    """
    boundary = ModuleBoundary.of("value_and_grad", graph, graph_updates)
    return _gradient(boundary, f, argnums, has_aux, holomorphic, allow_int, policy)


@accepts_nnx_calls(n_required=1)
def grad(f: Function, argnums: Argnum | Sequence[Argnum] = 0, has_aux: bool = False,
         holomorphic: bool = False, allow_int: bool = False, *, policy: Any = None,
         graph: Mode = None, graph_updates: Mode = None) -> Function:  # fmt: skip
    """Return a function that computes the gradient of a scalar function of modules.

    Arguments, errors and cost are the same as for `xform.flax.value_and_grad`. Only the gradient is
    returned, or with `has_aux` a pair `(gradient, auxiliary)`.

    >>> from flax import nnx
    >>> scale = nnx.Param(jnp.float32(3.0))
    >>> float(xform.flax.grad(lambda scale: scale[...] ** 2)(scale)[...])
    6.0
    """
    boundary = ModuleBoundary.of("grad", graph, graph_updates)
    return _gradient(boundary, f, argnums, has_aux, holomorphic, allow_int, policy)


def _gradient(boundary: ModuleBoundary, f: Function, argnums: Any, has_aux: bool,
              holomorphic: bool, allow_int: bool, policy: Any) -> Function:  # fmt: skip
    """Return the function that `grad` or `value_and_grad`, whichever `boundary` names, returns."""
    caller = f"{boundary.name} of {function_name(f)}"
    is_single = not isinstance(argnums, Iterable)
    several = [argnums] if is_single else list(argnums)
    argnum_list = [x.argnum if isinstance(x, nnx.DiffState) else x for x in several]
    distinct(numbers(argnum_list, caller, "argnums"), caller, argnum_list)
    selections = diff_states(boundary, argnums, caller)
    transform = getattr(reverse, boundary.name)

    @functools.wraps(f, updated=())
    def gradient(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = positional(f, args, kwargs) if boundary.updates else (args, kwargs)
        indices = positions([x.argnum for x in selections], len(args), boundary.name)
        by_index = dict(zip(indices, selections, strict=True))
        with nnx.update_context(boundary.name):
            objective = ModuleObjective(boundary, f, args, kwargs, by_index, has_aux, caller)
            out = transform(
                objective, range(len(indices)), True, holomorphic, allow_int, policy=policy
            )(*objective.wrt)
            g, (y, aux, changes) = out if boundary.name == "grad" else (out[1], out[0][1])
            aux = boundary.leave(aux, changes)
        if not boundary.updates:
            # All gradients are converted to modules in one call, so that they share parts as the
            # arguments do.
            modules = nnx.from_tree(replace_selected(objective.array_args, indices, g))
            g = [modules[i] for i in indices]
        g = g[0] if is_single else tuple(g)
        if boundary.name == "grad":
            return (g, aux) if has_aux else g
        return ((y, aux) if has_aux else y), g

    return gradient
