"""`name`: names for values inside a function. `partials`: the gradient of a scalar at such values.

The function is traced, and `sites` finds the named values in its program. `perturb` then adds a
perturbation, which is zero, to each of them. The gradient with respect to a perturbation is the
gradient at the named value.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from xform._jax import staging
from xform.adjoints.perturb import ProgramEdit, run_edited
from xform.adjoints.sites import Site, list_uses, sites
from xform.errors import NotDifferentiable, WrongArgument
from xform.interpret.activity import path
from xform.introspection.callables import check_callable, function_name
from xform.policies import min_cut, parse, save_everything
from xform.program.arithmetic import Value
from xform.program.arrays import zeros
from xform.program.ir import seldom_collected, trace
from xform.transforms.check import check_output, check_scalar
from xform.transforms.function import Function, Tree, function_call, trace_function
from xform.transforms.inspect import FlatArguments
from xform.transforms.linear_map import Pullback
from xform.transforms.reverse import Policy, planned_vjp
from xform.transforms.seeds import pull_ones


def name(x: Any, name: str) -> Any:
    """Return `x` with a name attached, exactly as `jax.ad_checkpoint.checkpoint_name` does.

    `xform.adjoints.partials` computes the gradient at a named value. Policies can decide by name
    which values to save. The name belongs to the returned value, so use that value and not `x`.

    Args:
      x: a pytree of arrays of any shape; each leaf gets the name.
      name: any string.

    Returns:
      A pytree like `x`, with the same values.

    Raises:
      WrongArgument: `name` is not a string.

    Cost: none, because the compiler removes names.

    >>> f = lambda x: xform.adjoints.name(jnp.sin(x), "h") ** 2
    >>> float(f(0.5)) == float(jnp.sin(0.5) ** 2)
    True
    """
    untyped: Any = name
    if not isinstance(untyped, str):
        raise WrongArgument(
            f"name(x, {name!r})",
            f"the name must be a string, and it has type {type(untyped).__name__}",
            "",
            'pass the value first, then its name: name(x, "h")',
        )
    return checkpoint_name(x, name)


def partials(
    f: Callable[..., Any],
    names: Tree,
    *,
    via: str | int | None = None,
    per_use: bool = False,
    has_aux: bool = False,
    policy: Policy = None,
) -> Callable[..., Any]:
    """Return a function that computes the gradient of `f` at named values inside it.

    Values get names by `xform.adjoints.name` or `jax.ad_checkpoint.checkpoint_name`. The
    gradient at a value tells how the output changes, to first order, if something is added to that
    value. It includes all paths from the value to the output. With `via` it includes only some of
    them. With `per_use` there is one gradient for each use of the value: the gradient that the
    value would have if `stop_gradient` cut all its other uses.

    Names may be inside jitted functions, loops of known length (`scan`), branches, remat regions
    (functions under `jax.checkpoint`), `vmap`, and functions with a custom derivative. The gradient
    at a value inside a function with a custom derivative is computed from the function's body. A
    gradient that passes through the whole function follows its custom rule. If `f` itself
    differentiates a function, the backward pass may recompute a named value. The recomputed value
    then counts as one more value with that name.

    Args:
      f: pure function that returns a real scalar. Its arguments may be any Python objects. Arrays
        in them are traced, as under `jit`; everything else is passed unchanged.
      names: a name, or a pytree of names: `"h"`, `["h", "g"]`.
      via: which paths from the value to the output to include; None includes all. A string: only
        the paths that pass through a value with this name (or through several, as in a loop). A
        number: only the paths that begin with this use of the value. The uses are the operations
        that read the value, numbered from 0 in program order; the error for a wrong number lists
        them with their lines.
      per_use: whether to return the gradient along each use separately, in a dict in program order.
        A key names the use, with its number and line. The shares add up to the gradient.
      has_aux: whether `f` returns a pair whose second element is auxiliary output.
      policy: which values are saved for the backward pass: a policy of `xform.policies` or
        `jax.checkpoint_policies`, or its text, such as "save_dots" or "budget:2GiB". None saves
        under `jit` what a minimum cut chooses, and outside `jit` everything that the backward pass
        reads.

    Returns:
      A function with the arguments of `f`. It returns a tree like `names`. Each gradient has the
      shape and dtype of the value. In a loop, the gradients of all iterations are stacked along a
      leading axis; a branch that did not run gives zeros. If several values have the same name, as
      in an unrolled loop of layers, their gradients are in a list, in program order. With `has_aux`
      the result is a pair `(gradients, auxiliary)`.

    Raises:
      WrongArgument: no value has the name (the message lists similar names), or no use has the
        number (the message lists all uses).
      WrongDtype: the value is not floating-point, or the output is not real.
      NotScalar: `f` returned something other than a scalar.
      NotDifferentiable: no path of derivatives leads from the value to the output, or to `via`; or
        the value is in a loop of unknown length, or in another program that `partials` cannot
        enter.

    Cost: as much as `value_and_grad` of the computation after the named values. If `via` is a name,
    add a forward and backward pass from the named values to the values named `via`.
    Source: Griewank and Walther, "Evaluating Derivatives", 2nd edition, sections 3.2 and 3.3.

    >>> def loss(x):
    ...     h = xform.adjoints.name(jnp.sin(x), "h")
    ...     return 3.0 * h + xform.adjoints.name(h * h, "square")
    >>> g = xform.adjoints.partials(loss, ["h", "square"])(jnp.pi / 2)
    >>> [float(x) for x in g]
    [5.0, 1.0]
    >>> float(xform.adjoints.partials(loss, "h", via="square")(jnp.pi / 2))
    2.0
    >>> by_use = xform.adjoints.partials(loss, "h", per_use=True)(jnp.pi / 2)
    >>> [(use.split(",")[0], float(share)) for use, share in by_use.items()]
    [('0: mul', 3.0), ('1: mul', 2.0)]
    """
    check_callable(f, "partials")
    policy = parse(policy)
    caller = f"partials of {function_name(f)}"
    leaves, tree = _flatten_names(names, caller)
    untyped: Any = via
    if untyped is not None:
        if isinstance(untyped, bool) or not isinstance(untyped, str | int):
            raise WrongArgument(
                f"{caller} with via={via!r}",
                "`via` must be the name of a value (a string) or the number of a use (an integer)",
                "",
                "pass a name or a number, or leave `via` out for the whole gradient",
            )
        if per_use:
            raise WrongArgument(
                f"{caller} with via={via!r}, per_use=True",
                "`via` selects one use, and `per_use` returns all of them",
                "",
                "drop one of the two",
            )

    @functools.wraps(f, updated=())
    def gradients(*args: Any, **kwargs: Any) -> Any:
        arguments = FlatArguments((args, kwargs))

        def of_arrays(*arrays: Value) -> Any:
            positional, named = arguments.replace_arrays(arrays)[1]
            return f(*positional, **named)

        call = function_call(of_arrays, arguments.arrays(), caller, has_aux)
        with seldom_collected(staging()):
            fun, flat = trace_function(dataclasses.replace(call, name=function_name(f)))
            out = jax.tree.unflatten(fun.signature.out_tree, fun.signature.out_avals)
            check_scalar("partials", fun.signature.name, out)
            all_names = frozenset((*leaves, *([via] if isinstance(via, str) else ())))
            request = _Request(caller, fun, flat, all_names, policy)
            sites_of = [sites(fun.program, name, all_names, caller) for name in leaves]
            targets = [site for group in sites_of for site in group]
            by_target, aux = _gradients_at(request, targets, via, per_use)
        remaining = iter(by_target)
        groups = [[next(remaining) for _ in group] for group in sites_of]
        results = tree.unflatten([group[0] if len(group) == 1 else group for group in groups])
        return (results, aux) if has_aux else results

    return gradients


def _flatten_names(names: Tree, caller: str) -> tuple[list[str], Any]:
    """Return the names in a pytree, and its structure; raise an error if a leaf is not a string."""
    leaves, tree = jax.tree.flatten(names)
    wrong = [x for x in leaves if not isinstance(x, str)]
    if wrong or not leaves:
        raise WrongArgument(
            f"{caller} at {names!r}",
            f"a name must be a string, and {wrong[0]!r} is not" if wrong else "no name is given",
            "",
            'pass a name or a pytree of names, such as "h" or ["h", "g"]',
        )
    return leaves, tree


@dataclasses.dataclass(frozen=True)
class _Request:
    """A traced call of `f`, with the names and the policy of the request.

    Attributes:
      caller: the text with which error messages begin.
      fun: the traced function.
      args: its arguments.
      names: all names that the user gave, as `names` and as `via`.
      policy: which values are saved for the backward pass.
    """

    caller: str
    fun: Function
    args: list[Value]
    names: frozenset[str]
    policy: Policy


def _gradients_at(request: _Request, targets: Sequence[Site], via: str | int | None, per_use: bool
                  ) -> tuple[list[Any], Tree]:  # fmt: skip
    """Return the gradient (or the dict of shares) at each target, and the auxiliary output."""
    if per_use:
        uses = [(site, i) for site in targets for i in range(len(site.uses))]
        edits = [_perturb_use(key, site, i) for key, (site, i) in enumerate(uses)]
        cts, aux = _gradients(request, edits, [site for site, _ in uses], require_path=False)
        remaining = iter(cts)
        return [{f"{i}: {use.label}": next(remaining) for i, use in enumerate(site.uses)}
                for site in targets], aux  # fmt: skip
    if isinstance(via, int):
        for site in targets:
            if not 0 <= via < len(site.uses):
                raise WrongArgument(
                    f"{request.caller} at {site.name!r} with via={via}",
                    f"the value has {len(site.uses)} uses: {list_uses(site.uses)}",
                    site.where,
                    "pass the number of one of these uses, counted from 0",
                )
        edits = [_perturb_use(key, site, via) for key, site in enumerate(targets)]
        return _gradients(request, edits, targets, require_path=False)
    if via is None:
        return _gradients(request, _perturb_all(targets), targets)
    consumers = sites(request.fun.program, via, request.names, request.caller)
    return _gradients_through(request, targets, consumers, via)


def _perturb_all(targets: Sequence[Site]) -> list[ProgramEdit]:
    """Return the edits that perturb each target for all its readers."""
    return [ProgramEdit(key, s.path, s.index, "perturb") for key, s in enumerate(targets)]


def _perturb_use(key: int, site: Site, i: int) -> ProgramEdit:
    """Return the edit that perturbs a value for its use number `i` alone."""
    return ProgramEdit(key, site.path, site.uses[i].index, "read", site.index)


def _gradients(request: _Request, edits: Sequence[ProgramEdit], targets: Sequence[Site],
               require_path: bool = True) -> tuple[list[Value], Tree]:  # fmt: skip
    """Return the gradient with respect to each perturbation, and the auxiliary output.

    `edits` has one edit for each target. With `require_path`, a target from which no path of
    derivatives leads to the output causes an error.
    """
    fun, args = _function_of_perturbations(request, edits, targets, ())
    if require_path:
        _check_paths(request, fun, targets, "the output")
    y, pull, aux = _planned_vjp(fun, args, request.policy)
    check_output("partials", y, holomorphic=False)
    return list(pull_ones(pull, y)), aux


def _gradients_through(
    request: _Request, targets: Sequence[Site], consumers: Sequence[Site], via: str
) -> tuple[list[Value], Tree]:
    """Return the gradients at the targets along the paths that pass through a consumer.

    The consumers are the values named `via`. The gradients at the consumers are pulled back to the
    targets. Derivatives stop at each consumer, so a path ends at the first consumer that it
    reaches.
    """
    cts, aux = _gradients(request, _perturb_all(consumers), consumers)
    cuts = [ProgramEdit(key, s.path, s.index, "cut") for key, s in enumerate(consumers)]
    fun, args = _function_of_perturbations(request, _perturb_all(targets), targets, cuts)
    _check_paths(request, fun, targets, f"a value named {via!r}")
    _, pull, _ = _planned_vjp(fun, args, request.policy)
    return list(pull(cts)), aux


def _function_of_perturbations(
    request: _Request,
    edits: Sequence[ProgramEdit],
    targets: Sequence[Site],
    cuts: Sequence[ProgramEdit],
) -> tuple[Function, list[Value]]:
    """Return a traced function of the perturbations, and its arguments with zero perturbations.

    The arguments of `f` are constants of this function. It returns the values at the `cuts`, or the
    outputs of `f` if there are no cuts.
    """
    perturbations = [_zero_perturbation(site) for site in targets]
    n, prog = len(request.args), request.fun.program

    def outputs_or_cuts(*xs: Value) -> list[Value]:
        by_key = dict(enumerate(xs[n:]))
        outs, values = run_edited(prog, xs[:n], [*edits, *cuts], by_key, request.names)
        return [values[cut.key] for cut in cuts] if cuts else outs

    edited = trace(outputs_or_cuts, *prog.in_types, *map(jax.typeof, perturbations))
    signature = dataclasses.replace(
        request.fun.signature,
        in_tree=jax.tree.structure(tuple(perturbations)),
        primal_avals=[v.aval for v in edited.inputs[n:]],
    )
    if cuts:
        tree = jax.tree.structure([0] * len(cuts))
        signature = dataclasses.replace(signature, out_tree=tree, out_avals=list(edited.out_avals))
    rebuild_aux = (lambda _: ()) if cuts else request.fun.rebuild_aux
    return Function(signature, edited, n, rebuild_aux), [*request.args, *perturbations]


def _zero_perturbation(site: Site) -> Value:
    """Return a zero perturbation of a value, with one leading axis for each loop around it."""
    zero = zeros(site.aval)
    return jnp.broadcast_to(zero, (*site.trips, *zero.shape)) if site.trips else zero


def _planned_vjp(fun: Function, args: Sequence[Value], policy: Policy
                 ) -> tuple[Any, Pullback, Tree]:  # fmt: skip
    """Return the output, the pullback and the auxiliary output of a traced function."""
    default = min_cut if staging() else save_everything
    return planned_vjp(fun, args, default if policy is None else policy)


def _check_paths(
    request: _Request, fun: Function, targets: Sequence[Site], destination: str
) -> None:
    """Raise an error for a target from which no path of derivatives leads to the outputs of `fun`.

    `destination` says in the error what these outputs are.
    """
    has_paths = path(*fun.program_and_masks).inputs[fun.n_consts :]
    for site, has_path in zip(targets, has_paths, strict=True):
        if not has_path:
            raise NotDifferentiable(
                request.caller,
                f"no path of derivatives leads from the value named {site.name!r} to "
                f"{destination}; the value is read by: {list_uses(site.uses)}",
                site.where,
                f'use the value that name returns, h = xform.adjoints.name(h, "{site.name}"), and '
                "look for stop_gradient and integer values between",
            )
