"""`partials`: the gradient of a scalar function at values inside it, whole or edge by edge."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xform._jax import staging, zeros
from xform.adjoints.perturb import Mark, run
from xform.adjoints.sites import Site, listed, sites
from xform.arithmetic import Value
from xform.callables import check_callable, function_name
from xform.errors import NotDifferentiable, WrongArgument
from xform.interpret.activity import path
from xform.ir import seldom_collected, trace
from xform.policies import check, min_cut, save_everything
from xform.transforms.check import check_output, check_scalar
from xform.transforms.function import Function, Tree, call, function
from xform.transforms.inspect import Arguments
from xform.transforms.linear_map import Pullback
from xform.transforms.reverse import Policy, planned_vjp


def partials(
    f: Callable[..., Any],
    names: Tree,
    *,
    via: str | int | None = None,
    shares: bool = False,
    has_aux: bool = False,
    policy: Policy = None,
) -> Callable[..., Any]:
    """The gradient of a scalar function at named values inside it.

    Values get names by `xform.name` or `jax.ad_checkpoint.checkpoint_name`. The gradient at a value
    is what the output changes by, to first order, if something is added to the value there: along
    all paths from it, or along one edge of the graph, as if all others were cut by `stop_gradient`.

    Names are found in jitted functions, loops of known length (`scan`), branches, remat regions,
    `vmap`, and in functions with a derivative of their own, where the gradient is that of the
    function's body, and what comes from outside is the user's rule. Where `f` itself differentiates
    a function, a named value may be made again for the backward pass: that is one more value.

    Args:
      f: pure function that returns a real scalar. Its arguments may be any Python objects: arrays
        among them are traced, as under `jit`, and all else is held as it is.
      names: a name, or a pytree of names: `"h"`, `["h", "g"]`.
      via: one edge only. A name: along all paths that pass through a value of that name, the next
        one, where a loop makes several. A number: along the use of that number, of the equations
        that read the value, in program order; an error lists them with their lines.
      shares: the gradient along each use: a dict in program order from what reads the value, with
        its number and line, to its share. The shares add up to the gradient.
      has_aux: whether `f` returns a pair, of which the second is passed through.
      policy: what is kept for the backward pass, as for `grad`.

    Returns:
      A function with the arguments of `f`. It returns a tree like `names`. Each gradient has shape
      and dtype of the value; in a loop, all trips are stacked along a leading axis (zeros, or
      nothing added, where a branch did not run). Where several values have one name, as in an
      unrolled loop of layers: a list of their gradients, in program order. With `has_aux` the
      result is a pair `(gradients, auxiliary)`.

    Raises:
      WrongArgument: no value has the name (those like it are shown), or no use has the number (all
        uses are).
      WrongDtype: the value is no float, or the output is not real.
      NotScalar: `f` returned something other than a scalar.
      NotDifferentiable: no path leads from the value to the output, or to `via`; or it is in a loop
        of unknown length or another program that no perturbation enters.

    Cost: that of `value_and_grad` of what lies behind the named values, with no FLOP more; with
    a name for `via`, that and once more the way from the values to those.
    Source: Griewank and Walther, "Evaluating Derivatives", 2nd edition, sections 3.2 and 3.3.

    >>> def loss(x):
    ...     h = xform.name(jnp.sin(x), "h")
    ...     return 3.0 * h + xform.name(h * h, "square")
    >>> g = xform.partials(loss, ["h", "square"])(jnp.pi / 2)
    >>> [float(x) for x in g]
    [5.0, 1.0]
    >>> float(xform.partials(loss, "h", via="square")(jnp.pi / 2))
    2.0
    >>> by_use = xform.partials(loss, "h", shares=True)(jnp.pi / 2)
    >>> [(use.split(",")[0], float(share)) for use, share in by_use.items()]
    [('0: mul', 3.0), ('1: mul', 2.0)]
    """
    check_callable(f, "partials")
    check(policy)
    asked = f"partials of {function_name(f)}"
    leaves, tree = _names(names, asked)
    one: Any = via
    if one is not None and (shares or isinstance(one, bool) or not isinstance(one, str | int)):
        raise WrongArgument(
            f"{asked} with via={via!r}{', shares=True' * shares}",
            "`via` is the name of a consumer or the number of a use, and `shares` asks for all",
            "",
            "give one of the two",
        )

    @functools.wraps(f, updated=())
    def gradients(*args: Any, **kwargs: Any) -> Any:
        arguments = Arguments((args, kwargs))

        def of_arrays(*arrays: Value) -> Any:
            positional, named = arguments.filled(arrays)[1]
            return f(*positional, **named)

        at = call(of_arrays, arguments.arrays(), asked, has_aux)
        with seldom_collected(staging()):
            fun, flat = function(dataclasses.replace(at, name=function_name(f)))
            out = jax.tree.unflatten(fun.signature.out_tree, fun.signature.out_avals)
            check_scalar("partials", fun.signature.name, out)
            of = _Asked(asked, fun, flat, frozenset((*leaves, *_text(via))), policy)
            found = [sites(fun.program, n, of.names, asked) for n in leaves]
            by_site, aux = _answer(of, [s for group in found for s in group], via, shares)
        rest = iter(by_site)
        groups = [[next(rest) for _ in group] for group in found]
        results = tree.unflatten([g[0] if len(g) == 1 else g for g in groups])
        return (results, aux) if has_aux else results

    return gradients


def _names(names: Tree, asked: str) -> tuple[list[str], Any]:
    leaves, tree = jax.tree.flatten(names)
    wrong = [x for x in leaves if not isinstance(x, str)]
    if wrong or not leaves:
        raise WrongArgument(
            f"{asked} at {names!r}",
            f"{wrong[0]!r} is no name" if wrong else "it names no value",
            "",
            'give a name or several, such as "h" or ["h", "g"]',
        )
    return leaves, tree


def _text(via: str | int | None) -> tuple[str, ...]:
    return (via,) if isinstance(via, str) else ()


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A traced call, and what is asked of it."""

    asked: str
    fun: Function
    args: list[Value]
    names: frozenset[str]
    policy: Policy


def _answer(of: _Asked, found: Sequence[Site], via: str | int | None, shares: bool
            ) -> tuple[list[Any], Tree]:  # fmt: skip
    """For each site its gradient, or its shares; and the auxiliary output."""
    if shares:
        marks = [_use(k, s, i) for k, (s, i) in enumerate(_every_use(found))]
        cts, aux = _gradients(of, marks, [s for s, _ in _every_use(found)], needed=False)
        rest = iter(cts)
        return [{f"{i}: {use.label}": next(rest) for i, use in enumerate(s.uses)}
                for s in found], aux  # fmt: skip
    if isinstance(via, int):
        for s in found:
            if not 0 <= via < len(s.uses):
                raise WrongArgument(
                    f"{of.asked} at {s.name!r} with via={via}",
                    f"the value has {len(s.uses)} uses: {listed(s.uses)}",
                    s.where,
                    "give the number of one of them, from 0",
                )
        return _gradients(of, [_use(k, s, via) for k, s in enumerate(found)], found, needed=False)
    if via is None:
        return _gradients(of, _perturbed(found), found)
    return _through(of, found, sites(of.fun.program, via, of.names, of.asked), via)


def _every_use(found: Sequence[Site]) -> list[tuple[Site, int]]:
    return [(s, i) for s in found for i in range(len(s.uses))]


def _perturbed(found: Sequence[Site]) -> list[Mark]:
    return [Mark(k, s.path, s.index, "perturb") for k, s in enumerate(found)]


def _use(key: int, site: Site, i: int) -> Mark:
    return Mark(key, site.path, site.uses[i].index, "read", site.index)


def _gradients(of: _Asked, marks: Sequence[Mark], at: Sequence[Site], needed: bool = True
               ) -> tuple[list[Value], Tree]:  # fmt: skip
    """The gradient in each perturbation; where it is `needed`, a path has to lead from each."""
    fun, args = _perturbable(of, marks, at, ())
    if needed:
        _check_paths(of, fun, at, "the output")
    y, pull, aux = _pulled(fun, args, of.policy)
    check_output("partials", y, holomorphic=False)
    return list(pull(lax.full_like(y, 1))), aux


def _through(of: _Asked, found: Sequence[Site], consumers: Sequence[Site], via: str
             ) -> tuple[list[Value], Tree]:  # fmt: skip
    """The gradients along the paths through the next consumer: its own, pulled back to each."""
    cts, aux = _gradients(of, _perturbed(consumers), consumers)
    caught = [Mark(k, s.path, s.index, "cut") for k, s in enumerate(consumers)]
    fun, args = _perturbable(of, _perturbed(found), found, caught)
    _check_paths(of, fun, found, f"a value named {via!r}")
    _, pull, _ = _pulled(fun, args, of.policy)
    return list(pull(cts)), aux


def _perturbable(of: _Asked, marks: Sequence[Mark], at: Sequence[Site], caught: Sequence[Mark]
                 ) -> tuple[Function, list[Value]]:  # fmt: skip
    """The function of perturbations alone, at zero: its output, or the values that are caught."""
    by = [_zeros(s) for s in at]
    n, prog = len(of.args), of.fun.program

    def flat(*xs: Value) -> list[Value]:
        outs, values = run(prog, xs[:n], [*marks, *caught], dict(enumerate(xs[n:])), of.names)
        return [values[m.key] for m in caught] if caught else outs

    new = trace(flat, *prog.in_types, *map(jax.typeof, by))
    of_by = dataclasses.replace(
        of.fun.signature,
        in_tree=jax.tree.structure(tuple(by)),
        primal_avals=[v.aval for v in new.inputs[n:]],
    )
    if caught:
        tree = jax.tree.structure([0] * len(caught))
        of_by = dataclasses.replace(of_by, out_tree=tree, out_avals=list(new.out_avals))
    rebuild = (lambda _: ()) if caught else of.fun.rebuild_aux
    return Function(of_by, new, n, rebuild), [*of.args, *by]


def _zeros(site: Site) -> Value:
    """The perturbation of a value, of one for each trip of the loops around it."""
    zero = zeros(site.aval)
    return jnp.broadcast_to(zero, (*site.trips, *zero.shape)) if site.trips else zero


def _pulled(fun: Function, args: Sequence[Value], policy: Policy) -> tuple[Any, Pullback, Tree]:
    usual = min_cut if staging() else save_everything
    return planned_vjp(fun, args, usual if policy is None else check(policy))


def _check_paths(of: _Asked, fun: Function, at: Sequence[Site], to: str) -> None:
    reached = path(*fun.ends).inputs[fun.n_consts :]
    for site, on in zip(at, reached, strict=True):
        if not on:
            raise NotDifferentiable(
                of.asked,
                f"no path of derivatives leads from the value named {site.name!r} to {to}; read "
                f"by: {listed(site.uses)}",
                site.where,
                f'use what is returned, h = xform.name(h, "{site.name}"), and look for '
                "stop_gradient and integers on the way",
            )
