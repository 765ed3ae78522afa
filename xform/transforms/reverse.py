"""`vjp`, `grad`, `value_and_grad`, `fwd_and_bwd`, `linear_transpose`: reverse-mode derivatives.

Under `jit`, or with a policy, the function is traced, and a planner decides which values the
forward pass saves and which the backward pass recomputes. Outside `jit`, without a policy, each
operation is differentiated as it happens (`transforms/eager.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform._jax import custom_jvp_call_p, is_batched, jit, staging
from xform.interpret import emit
from xform.interpret.ahead import ahead_of_time
from xform.interpret.joint import analyze
from xform.interpret.linear import check_linear
from xform.introspection.argnums import numbers, positions
from xform.introspection.callables import check_callable, record_transform
from xform.passes.builder import map_nested_programs
from xform.passes.inline import inline_bodies
from xform.passes.structured import called_body
from xform.planner.decide import schedule
from xform.planner.plan.plan import Plan
from xform.planner.planning import current_planner, default_policy
from xform.policies import parse
from xform.policies.budgets import Budget, Fit
from xform.program.arithmetic import Value
from xform.program.arrays import zeros
from xform.program.ir import Mask, Program, seldom_collected
from xform.program.source import user_stacklevel
from xform.rules.user_rules import calls_backward
from xform.transforms import eager
from xform.transforms.check import check_input, check_inputs, check_output, check_scalar
from xform.transforms.compiling import compiler_for
from xform.transforms.function import (
    Function,
    FunctionCall,
    Tree,
    bind_others,
    function_call,
    trace_function,
)
from xform.transforms.linear_map import LinearRunner, PlannedRunner, Pullback
from xform.transforms.prefix import flags
from xform.transforms.pulled_later import PulledLater
from xform.transforms.recorded import defer
from xform.transforms.residuals import Primals
from xform.transforms.seeds import pull_ones

Policy = Any


def vjp(
    f: Callable[..., Any],
    *primals: Tree,
    has_aux: bool = False,
    saveable_args: Any = True,
    in_nzs: Any = None,
    policy: Policy = None,
) -> Any:
    """Evaluate `f` and return the function that pulls cotangents back through it.

    For `f : R^n -> R^m` at `x` this returns `y = f(x)` and `pull`, with `pull(ct) = J(x)^T ct`.
    For complex numbers this is the plain transpose, as in JAX.

    Args:
      f: pure function of pytrees of arrays.
      *primals: the point; float or complex leaves of any shape are differentiated, integer leaves
        receive cotangents of dtype float0.
      has_aux: whether `f` returns a pair `(output, auxiliary)`; the second is not differentiated.
      saveable_args: a bool, or a tree of bools that is a prefix of `primals`. Where it is False,
        `pull` does not hold the argument: `pull.args_res` has `NotSaveable()` in its place, and the
        caller must assign the argument before calling `pull`.
      in_nzs: a bool, or a tree of bools that is a prefix of `primals`: which arguments are
        differentiated; None for all. The others receive zeros.
      policy: which values to save for `pull`: a policy of `xform.policies` or
        `jax.checkpoint_policies`, or its text, such as "save_dots", or "auto", which fits the
        device's memory, as `xform.policies.fit()`. None is `min_cut` if `f` is traced. If `f` runs
        operation by operation, None saves everything that `pull` reads.

    Returns:
      `y` and `pull` (and the auxiliary output, with `has_aux`). `pull` is a pytree of residuals. It
      takes a cotangent like `y` and returns a tuple of cotangents like `primals`. It has the
      attributes of the object that `jax.vjp` returns: `args_res` and `opaque_residuals` are the
      arrays that it reads, `out_nzs` says which outputs depend on the arguments, and `with_refs`
      accumulates cotangents into mutable references that the caller passes.

    Raises:
      MissingRule: a primitive in `f` has no rule.
      WrongArgument: `saveable_args` or `in_nzs` is not a tree of bools that is a prefix of
        `primals`.
      WrongCotangent: the cotangent given to `pull` does not match `y`.

    Cost: one evaluation of `f`, and for each call of `pull` two to three times the FLOPs of `f`,
    plus what the policy recomputes.
    Source: Griewank and Walther, "Evaluating Derivatives", 2nd edition, chapter 3.

    >>> y, pull = xform.vjp(lambda x: x * x, 3.0)
    >>> float(pull(1.0)[0])
    6.0
    """
    at = function_call(f, primals, "vjp", has_aux, in_nzs)
    saveable = flags(saveable_args, at.in_tree, "vjp", "saveable_args")
    return _vjp(at, parse(policy), saveable, later=True)


def immediate_vjp(f: Callable[..., Any], *primals: Tree, has_aux: bool = False,
                  policy: Policy = None) -> Any:  # fmt: skip
    """Do the same as `vjp`, for a transform of xform that calls the pullback at once."""
    return _vjp(function_call(f, primals, "vjp", has_aux), parse(policy))


def _vjp(
    at: FunctionCall, policy: Policy, saveable: Mask | None = None, later: bool = False
) -> Any:
    """Return the results of `vjp` for a call.

    `saveable` has a bool for each leaf; None for all. `later` says whether the user calls the
    pullback, and not xform at once.
    """
    saveable = saveable or (True,) * len(at.args)
    if policy is None and not staging():
        y, pull, aux = eager.vjp(at, saveable, later)
    else:
        policy = default_policy() if policy is None else policy
        # Outside jit, a call of a jitted function is not inlined, so it runs compiled. Under a Plan
        # it is inlined, because Plans are made for the inlined program.
        inline = staging() or isinstance(policy, Plan)
        fun, args = trace_function(at, inline)
        y, pull, aux = planned_vjp(fun, args, policy, saveable, at.caller, later)
    return (y, pull, aux) if at.has_aux else (y, pull)


def planned_vjp(fun: Function, args: Sequence[Value], policy: Policy, saveable: Mask | None = None,
                caller: str = "vjp", later: bool = False
                ) -> tuple[Tree, Pullback, Tree]:  # fmt: skip
    """Plan a traced function under a policy; return its output, pullback and auxiliary output.

    `args` are the inputs of its program. `saveable` says which primals the pullback may hold; None
    for all. `caller` is the transform that the user called. `later` says whether the user calls the
    pullback, and not xform at once.
    """
    later = later and calls_backward(fun.program)
    per_example = isinstance(policy, Budget | Fit) and policy.batch_size is None
    if per_example and any(map(is_batched, args)):
        warnings.warn(
            f"under vmap, {policy!r} limits the bytes of one example. To limit those of a batch of "
            f"n, pass {'fit' if isinstance(policy, Fit) else 'budget'}(..., batch_size=n)",
            stacklevel=user_stacklevel(),
        )
    with seldom_collected(staging()):
        compiler = compiler_for(fun, args, policy, caller) if staging() else None
        with ahead_of_time() if later else contextlib.nullcontext():
            chosen = current_planner()(fun.problem, policy, compiler)
            deferred = defer(fun, policy, chosen, args)
        if deferred is None:
            outs, saved = emit.forward(chosen.schedule, args)
            runner = PlannedRunner(fun, chosen.schedule, push=False)
            arrays = runner.arrays(saved, args)
        else:
            outs, runner, arrays = deferred
    y, aux = fun.outputs(outs)
    run = PulledLater(fun, runner, args) if later else runner
    return y, _pullback(fun, run, arrays, args, saveable), aux


def _pullback(fun: Function, runner: LinearRunner, arrays: Any, args: Sequence[Value],
              saveable: Mask | None = None) -> Pullback:  # fmt: skip
    """Return the pullback at the inputs `args`, from the arrays of its runner."""
    primals = args[fun.n_consts :]
    known_primals = Primals(primals, saveable or (True,) * len(primals))
    return Pullback(fun.signature, runner, arrays, known_primals)


def value_and_grad(
    f: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    policy: Policy = None,
) -> Callable[..., Any]:
    """Return a function that computes the value of a scalar function and its gradient.

    Args:
      f: pure function of pytrees of arrays that returns a scalar.
      argnums: position or positions of the arguments to differentiate; all others, and keyword
        arguments, are held constant and may be any Python object.
      has_aux: whether `f` returns a pair `(output, auxiliary)`; the second is not differentiated.
      holomorphic: whether `f` is complex-differentiable; inputs and output must be complex.
      allow_int: whether to accept integer inputs; their gradients have dtype float0.
      policy: which values to save for the backward pass: a policy of `xform.policies` or
        `jax.checkpoint_policies`, or its text, such as "save_dots" or "auto". None is `min_cut` if
        `f` is traced, as under `jit`. If `f` runs operation by operation, None saves everything
        that the backward pass reads.

    Returns:
      A function with the arguments of `f`, which returns `(value, gradient)`, or
      `((value, auxiliary), gradient)` with `has_aux`. The gradient has the tree, shapes and dtypes
      of the argument. If `argnums` is a sequence, it is a tuple of such gradients.

    Raises:
      NotScalar: `f` returned something other than a scalar.
      WrongDtype: an input is an integer, without `allow_int`, or an output is not real.
      MissingRule: a primitive in `f` has no rule.

    Cost: three to four times the FLOPs of `f`, plus what the policy recomputes.
    Source: Griewank and Walther, "Evaluating Derivatives", 2nd edition, chapter 3.

    >>> value, g = xform.value_and_grad(lambda x: x * x)(3.0)
    >>> float(value), float(g)
    (9.0, 6.0)
    """
    policy = parse(policy)
    return _value_and_grad("value_and_grad", f, argnums, has_aux, holomorphic, allow_int, policy)


def grad(
    f: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    policy: Policy = None,
) -> Callable[..., Any]:
    """Return a function that computes the gradient of a scalar function.

    The arguments, errors and cost are the same as for `value_and_grad`. The gradient has the tree,
    shapes and dtypes of the argument, or is a tuple if `argnums` is a sequence. With `has_aux` the
    function returns a pair `(gradient, auxiliary)`.

    Raises:
      NotScalar: `f` returned something other than a scalar.
      WrongDtype: an input is an integer, without `allow_int`, or an output is not real.
      MissingRule: a primitive in `f` has no rule.

    >>> float(xform.grad(jnp.sin)(0.0))
    1.0
    """
    policy = parse(policy)
    both = _value_and_grad("grad", f, argnums, has_aux, holomorphic, allow_int, policy)

    @functools.wraps(f, updated=())
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, g = both(*args, **kwargs)
        return (g, value[1]) if has_aux else g

    record_transform(gradient, "grad", argnums, policy)
    return gradient


def _value_and_grad(caller: str, f: Any, argnums: Any, has_aux: bool, holomorphic: bool,
                    allow_int: bool, policy: Policy) -> Callable[..., Any]:  # fmt: skip
    """Return the result of `value_and_grad`, with messages that name `caller`."""
    check_callable(f, caller)
    numbers(argnums, caller, "argnums")

    @functools.wraps(f, updated=())
    def both(*args: Any, **kwargs: Any) -> Any:
        bound, primals = bind_others(f, positions(argnums, len(args), caller), args, kwargs)
        check_inputs(caller, primals, holomorphic, allow_int)
        with seldom_collected(staging()):
            y, pull, *aux = _vjp(function_call(bound, primals, caller, has_aux), policy)
            check_scalar(caller, bound.__name__, y)
            check_output(caller, y, holomorphic)
            g = pull_ones(pull, y)
        g = g[0] if isinstance(argnums, int | np.integer) else g
        return ((y, *aux) if has_aux else y), g

    record_transform(both, "value_and_grad", argnums, policy)
    return both


def fwd_and_bwd(
    f: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool = False,
    jitted: bool = True,
    *,
    policy: Policy = None,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return two functions, one for the forward and one for the backward pass.

    Args:
      f: pure function of pytrees of arrays.
      argnums: position or positions of the arguments to differentiate.
      has_aux: whether `f` returns a pair `(output, auxiliary)`; the second is not differentiated.
      jitted: whether both functions are wrapped in `jax.jit`.
      policy: which values to save between the passes, as for `value_and_grad`.

    Returns:
      `fwd(*args) -> (y, residuals)`, or `(y, residuals, auxiliary)` with `has_aux`; and
      `bwd(residuals, ct) -> cotangents`: a tuple, or one cotangent if `argnums` is an int.

    Raises:
      WrongArgument: `argnums` or `policy` is unusable.
      MissingRule: a primitive in `f` has no rule; raised when `fwd` is called.
      WrongCotangent: the cotangent given to `bwd` does not match `y`.

    >>> fwd, bwd = xform.fwd_and_bwd(jnp.sin, argnums=0)
    >>> y, residuals = fwd(0.0)
    >>> float(bwd(residuals, 2.0))
    2.0
    """
    check_callable(f, "fwd_and_bwd")
    policy = parse(policy)
    numbers(argnums, "fwd_and_bwd", "argnums")

    def fwd(*args: Any, **kwargs: Any) -> Any:
        bound, primals = bind_others(f, positions(argnums, len(args), "fwd_and_bwd"), args, kwargs)
        return _vjp(function_call(bound, primals, "fwd_and_bwd", has_aux), policy, later=True)

    def bwd(residuals: Pullback, ct: Tree) -> Any:
        cts = residuals(ct)
        return cts[0] if isinstance(argnums, int | np.integer) else cts

    return (jit(fwd), jit(bwd)) if jitted else (fwd, bwd)


def linear_transpose(f: Callable[..., Any], *primals: Tree) -> Callable[..., Any]:
    """Return the transpose of a linear function.

    Args:
      f: a function that is linear in all its arguments together.
      *primals: values with the shapes and dtypes of its arguments; only their types are used.

    Returns:
      A function from a cotangent like `f`'s output to a tuple of cotangents like `primals`.

    Raises:
      NotLinear: `f` is not linear; the message names the operation.

    >>> transpose = xform.linear_transpose(lambda x: 3.0 * x, jnp.float32(0))
    >>> float(transpose(2.0)[0])
    6.0
    """
    # The pullback of a linear function is its transpose, at any point.
    zero_primals = jax.tree.map(_zeros_like, primals)
    for leaf in jax.tree.leaves(zero_primals):
        check_input("linear_transpose", leaf, False, False)
    call = function_call(f, zero_primals, "linear_transpose")
    fun, args = trace_function(call, linear=True)
    fun = dataclasses.replace(fun, program=_without_jvp_rules(fun.program))
    joint = analyze(fun.program, fun.active(), fun.differentiable(), linear=True)
    chosen = schedule(joint)
    check_linear(chosen, fun.active())
    _, saved = emit.forward(chosen, args, (False,) * len(fun.program.outputs))
    runner = PlannedRunner(fun, chosen, push=False)
    return _pullback(fun, runner, runner.arrays(saved, args), args)


def _without_jvp_rules(prog: Program) -> Program:
    """Inline functions with a `custom_jvp` rule. If a function is linear, they are linear too."""
    body = lambda eqn: called_body(eqn) if eqn.primitive is custom_jvp_call_p else None
    return map_nested_programs(inline_bodies(prog, body), _without_jvp_rules)


def _zeros_like(x: Any) -> Value:
    """Return zeros with the type of `x`."""
    if isinstance(x, int | float | complex):
        return type(x)(0)
    if isinstance(x, jax.Array):  # its type has its sharding and the axes over which it varies
        return zeros(jax.typeof(x))
    dtype = x.dtype if hasattr(x, "dtype") else jax.typeof(x).dtype
    return jnp.zeros(np.shape(x), jax.dtypes.canonicalize_dtype(dtype))
