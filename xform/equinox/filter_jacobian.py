"""`xform.equinox.filter_jacfwd`, `filter_jacrev` and `filter_hessian`."""

from __future__ import annotations

from typing import Any

import equinox as eqx

from xform.equinox.filter_calls import Function, TransformedFunction
from xform.transforms import jacobian
from xform.transforms.function import Tree


class _Jacobian(TransformedFunction):
    """The function that `filter_jacfwd` or `filter_jacrev` returns; `_transform` is xform's."""

    _has_aux: bool = eqx.field(static=True)
    _transform: Function = eqx.field(static=True)

    def __call__(self, x: Tree, /, *args: Any, **kwargs: Any) -> Any:
        wrt, held = eqx.partition(x, eqx.is_inexact_array)
        f = lambda wrt: self._fun(eqx.combine(wrt, held), *args, **kwargs)
        return self._transform(f, has_aux=self._has_aux)(wrt)


def filter_jacfwd(fun: Function, has_aux: bool = False) -> Function:
    """Return a function that computes the Jacobian by the first argument, in forward mode.

    `fun` maps any pytree to a pytree of arrays, or with `has_aux` to a pair of that and an
    auxiliary output, which is returned too. Errors and cost are the same as for `xform.jacfwd`: one
    jvp for each element of the input.

    >>> jacobian = xform.equinox.filter_jacfwd(lambda tree: tree[0] ** 2)
    >>> jacobian((jnp.array([1.0, 2.0]), "a"))[0].tolist()
    [[2.0, 0.0], [0.0, 4.0]]
    """
    return _Jacobian(fun, has_aux, jacobian.jacfwd)


def filter_jacrev(fun: Function, has_aux: bool = False) -> Function:
    """Return a function that computes the Jacobian by the first argument, in reverse mode.

    `fun` maps any pytree to a pytree of arrays, or with `has_aux` to a pair of that and an
    auxiliary output, which is returned too. Errors and cost are the same as for `xform.jacrev`: one
    pullback for each element of the output.

    >>> xform.equinox.filter_jacrev(lambda tree: tree[0].sum())((jnp.ones(2), "a"))[0].tolist()
    [1.0, 1.0]
    """
    return _Jacobian(fun, has_aux, jacobian.jacrev)


def filter_hessian(fun: Function, has_aux: bool = False) -> Function:
    """Return a function that computes the Hessian by the first argument, forward over reverse.

    `fun` maps any pytree to a pytree of arrays, or with `has_aux` to a pair of that and an
    auxiliary output, which is returned too. Errors and cost are the same as for `xform.hessian`.

    >>> h = xform.equinox.filter_hessian(lambda tree: tree[0] ** 3)((jnp.float32(2.0), "a"))
    >>> float(h[0][0])
    12.0
    """
    return filter_jacfwd(filter_jacrev(fun, has_aux), has_aux)
