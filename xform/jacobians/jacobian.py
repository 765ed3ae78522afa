"""`xform.jacobian`: the Jacobian of a function by the cheapest order of the chain rule.

If the function can be traced, `choice` decides how to evaluate its Jacobian. Otherwise, or if the
user gives a mode, one sweep of that mode computes it: a product of the derivative and all unit
vectors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from xform._jax import jit, staging
from xform.errors import WrongArgument
from xform.introspection.argnums import nonempty_positions, numbers
from xform.introspection.callables import check_callable
from xform.jacobians.accumulate import Blocks, jacobian_by_sweep
from xform.jacobians.choice import choose
from xform.jacobians.explain import Explanation, explain_choice
from xform.policies import parse
from xform.policies.budgets import Budget, Fit
from xform.policies.sample import check_known_sizes
from xform.program.arithmetic import differentiable, float0_zeros
from xform.program.ir import seldom_collected
from xform.transforms.check import check_forward_input, check_input, check_output_types
from xform.transforms.forward import linearize
from xform.transforms.function import Tree, bind_others, function_call, trace_function
from xform.transforms.reverse import immediate_vjp

Mode = Literal["auto", "forward", "reverse"]
_MODES = ("auto", "forward", "reverse")


class JacobianTransform:
    """Return a function that computes the Jacobian of `f`, by the cheapest order of the chain rule.

    A value that every path from inputs to outputs goes through cuts the program in two. The
    Jacobian is then a matrix product: the Jacobian of the part after the value times the Jacobian
    of the part before it. The products are ordered for the fewest FLOPs, and each factor is
    computed by forward or reverse mode. Without such a value, the cheaper mode is used.
    `jacobian.explain` shows the decision. The result equals that of `jax.jacobian` up to rounding.

    Args:
      f: pure function of pytrees of arrays.
      argnums: position or positions of the arguments to differentiate.
      has_aux: whether `f` returns a pair `(output, auxiliary)`; the second is not differentiated.
      holomorphic: whether `f` is complex-differentiable; inputs must be complex.
      allow_int: whether integer inputs are allowed; their columns have dtype float0, JAX's type
        of the tangents of integers.
      mode: "auto" for the cheapest; "forward" (column by column) or "reverse" (row by row) for the
        whole Jacobian.
      chunk: how many tangents or cotangents are computed at once, which bounds memory; None: all.
      policy: which values reverse mode saves: a policy of `xform.policies` or
        `jax.checkpoint_policies`, or its text, such as "save_dots". `xform.policies.budget(bytes)`
        bounds the peak memory of the compiled Jacobian, with arguments and result: the cheapest way
        that fits is used, in chunks if necessary. `budget(bytes, of="saved")` bounds the bytes that
        reverse mode saves, so reverse mode is used.

    Returns:
      A function with the arguments of `f`. Its result has the tree of the output. In place of each
      leaf is a tree like the input, with leaves of shape `[*output, *input]` in the input's dtype.
      With `has_aux`, it returns a pair of this and the second element.

    Raises:
      WrongArgument: `mode` is unknown, or `chunk` is not positive.
      WrongDtype: an input or output is not real (not complex, if `holomorphic`).
      BudgetInfeasible: no order, mode and chunk size that was tried fits the budget.

    Cost: one trace of `f`, and two traces of the derivative of each factor unless reverse mode is
    clearly best; under a budget, a few compilations. "auto" uses reverse mode for functions that
    cannot be traced because they use values in Python (outside `jit`), for complex inputs of a
    function that is not holomorphic, and for integer inputs.
    Source: Griewank and Naumann, "Accumulating Jacobians as chained sparse matrix products",
    Mathematical Programming 95 (2003); Naumann, "Matrix-free Jacobian chaining", arXiv:2406.11862.

    >>> x = jnp.arange(2.0)
    >>> xform.jacobian(lambda x: x * x)(x).tolist()
    [[0.0, 0.0], [0.0, 2.0]]
    """

    def __call__(
        self,
        f: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        holomorphic: bool = False,
        allow_int: bool = False,
        *,
        mode: Mode = "auto",
        chunk: int | None = None,
        policy: Any = None,
    ) -> Callable[..., Any]:
        """See the docstring of the class."""
        policy = parse(policy)
        _check_options(f, argnums, mode, chunk)

        @functools.wraps(f, updated=())
        def jacobian_of(*args: Any, **kwargs: Any) -> Any:
            point = _FunctionAtPoint(f, argnums, args, kwargs, mode, holomorphic, allow_int)
            has_budget = isinstance(policy, Budget | Fit)
            if has_budget or chunk is not None:
                check_known_sizes("jacobian with a budget or chunks", (args, kwargs))
            traced = point.trace(has_aux) if mode == "auto" or has_budget else None
            if traced is None:
                sweep_mode = "reverse" if mode == "auto" else mode
                y, aux, blocks = point.by_sweep(sweep_mode, has_aux, chunk, policy)
            else:
                fun, inputs = traced
                point.check_output(fun.signature.out_avals)
                with seldom_collected(staging()):
                    run = choose(fun, mode, holomorphic, chunk, policy).run
                    # The budget holds for the compiled code, not for a run operation by operation.
                    run = jit(run) if has_budget and not staging() else run
                    ys, blocks = run(*inputs)
                y, aux = fun.outputs(ys)
            jacobian = point.assemble(y, blocks)
            return (jacobian, aux) if has_aux else jacobian

        return jacobian_of

    def explain(
        self,
        f: Callable[..., Any],
        *args: Any,
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        holomorphic: bool = False,
        mode: Mode = "auto",
        chunk: int | None = None,
        policy: Any = None,
        **kwargs: Any,
    ) -> Explanation:
        """Explain how `jacobian` evaluates the Jacobian of `f`, and what the other ways cost.

        Args:
          f: pure function of pytrees of arrays.
          *args: the arguments of `f`, as arrays or `jax.ShapeDtypeStruct`s.
          argnums: position or positions of the arguments to differentiate.
          has_aux: whether `f` returns a pair `(output, auxiliary)`; the second is not
            differentiated.
          holomorphic: whether `f` is complex-differentiable; inputs must be complex.
          mode: "auto" for the cheapest, "forward" or "reverse", as for `jacobian`.
          chunk: how many tangents or cotangents are computed at once; None: all.
          policy: which values reverse mode saves, or a budget, as for `jacobian`.
          **kwargs: keyword arguments of `f`.

        Returns:
          An `Explanation`, which can be printed.

        Raises:
          WrongArgument: `mode` is unknown, or `chunk` is not positive.
          WrongDtype: an input or output is not real (not complex, if `holomorphic`).
          BudgetInfeasible: no order, mode and chunk size that was tried fits the budget.

        Cost: one trace of `f`, and two traces of the derivative of each factor. Nothing is run.

        >>> def f(x, narrow, wide):  # from 100 numbers to 100, through 2
        ...     return jnp.sin(wide @ jnp.tanh(narrow @ jnp.cos(x)))
        >>> types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((100,), (2, 100), (100, 2))]
        >>> explanation = xform.jacobian.explain(f, *types)
        >>> explanation.order, explanation.chosen
        ('(((J5 < J4) > J3) x (J2 > J1))', 'mixed')
        >>> {name: f"{flops:,.0f}" for name, flops in explanation.flops.items()}
        {'forward': '100,200', 'reverse': '100,200', 'mixed': '40,600'}
        """
        policy = parse(policy)
        _check_options(f, argnums, mode, chunk)
        explanations: list[Explanation] = []

        def explain(*args: Any, **kwargs: Any) -> None:
            point = _FunctionAtPoint(f, argnums, args, kwargs, mode, holomorphic, False)
            call = function_call(point.f, point.primals, "jacobian.explain", has_aux)
            fun, _ = trace_function(call)
            point.check_output(fun.signature.out_avals)
            choice = choose(fun, mode, holomorphic, chunk, policy, count_flops=True)
            explanations.append(explain_choice(point.f.__name__, choice))

        jax.eval_shape(explain, *args, **kwargs)
        return explanations[0]


jacobian = JacobianTransform()


def _check_options(f: Any, argnums: Any, mode: Any, chunk: Any) -> None:
    """Raise an error if an argument of `jacobian` is invalid."""
    check_callable(f, "jacobian")
    numbers(argnums, "jacobian", "argnums")
    if mode not in _MODES:
        raise WrongArgument(
            f"jacobian with mode={mode!r}", "unknown mode", "", f"pass one of {_MODES}"
        )
    if chunk is not None and (not isinstance(chunk, int | np.integer) or chunk < 1):
        raise WrongArgument(
            f"jacobian with chunk={chunk!r}",
            "it is not a positive integer",
            "",
            "pass a positive integer, or None for all vectors at once",
        )


class _FunctionAtPoint:
    """A function and its arguments, as a function of the differentiated arguments alone.

    Attributes:
      f: the function of the differentiated arguments; all others are bound.
      primals: the differentiated arguments.
      inputs: the same, without a tuple around a single argument; the Jacobian has this tree.
      holomorphic: whether `f` is complex-differentiable.
    """

    def __init__(self, f: Any, argnums: Any, args: Sequence[Any], kwargs: dict[str, Any],
                 mode: str, holomorphic: bool, allow_int: bool):  # fmt: skip
        self.f, primals = bind_others(
            f, nonempty_positions(argnums, len(args), "jacobian"), args, kwargs
        )
        self.primals, self.holomorphic = tuple(primals), holomorphic
        self.inputs: Tree = primals[0] if isinstance(argnums, int | np.integer) else self.primals
        for leaf in jax.tree.leaves(primals):
            if mode == "forward":
                check_forward_input("jacobian", leaf, holomorphic)
            else:
                check_input("jacobian", leaf, holomorphic, allow_int)

    def check_output(self, avals: Sequence[Any]) -> None:
        """Raise an error for outputs of types that have no Jacobian."""
        check_output_types("jacobian", avals, self.holomorphic)

    def trace(self, has_aux: bool) -> Any:
        """Return the traced function and its flat inputs.

        If tracing fails outside `jit`, the result is None.
        """
        call = function_call(self.f, self.primals, "jacobian", has_aux)
        try:
            return trace_function(call)
        except Exception:
            if staging():
                raise
            return None  # an eager run of the function may work, and else it raises the error

    def by_sweep(self, mode: str, has_aux: bool, chunk: int | None, policy: Any) -> Any:
        """Return output, auxiliary output and Jacobian, by forward or reverse mode."""
        leaves, tree = jax.tree.flatten(self.primals)
        if mode == "forward":
            y, push, *aux = linearize(self.f, *self.primals, has_aux=has_aux)
            image = lambda dxs: push(*tree.unflatten(dxs))
        else:
            y, pull, *aux = immediate_vjp(self.f, *self.primals, has_aux=has_aux, policy=policy)
            out_tree = jax.tree.structure(y)
            image = lambda cts: pull(out_tree.unflatten(cts))
        ins, outs = ([jax.typeof(x) for x in xs] for xs in (leaves, jax.tree.leaves(y)))
        self.check_output(outs)
        ins = list(filter(differentiable, ins))
        linear = lambda xs: [x for x in jax.tree.leaves(image(xs)) if differentiable(jax.typeof(x))]
        return y, aux[0] if aux else (), jacobian_by_sweep(mode, linear, outs, ins, chunk)

    def assemble(self, y: Tree, jacobian: Blocks) -> Tree:
        """Return the Jacobian as a tree, with float0 blocks for integer inputs.

        The tree is that of the output, with a tree of the inputs in place of each leaf.
        """
        leaves, tree = jax.tree.flatten(self.inputs)
        ys, out_tree = jax.tree.flatten(y)
        rows: list[Tree] = []
        for output, blocks in zip(ys, jacobian, strict=True):
            remaining = iter(blocks)
            row = [next(remaining) if differentiable(jax.typeof(x)) else
                   float0_zeros((*np.shape(output), *np.shape(x))) for x in leaves]  # fmt: skip
            rows.append(tree.unflatten(row))
        return out_tree.unflatten(rows)
