"""A user's function at its arguments: flattened, checked and, if it is planned, traced.

The transforms call `function_call`, which returns a `FunctionCall`, and, to plan the derivative,
`trace_function`, which traces the call into a `Function`. A primal is an argument with respect to
which a transform differentiates. The other functions of this module check arguments that several
transforms have.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xform._jax import Tracer
from xform._jax.mutable import is_mutable
from xform.errors import WrongArgument, WrongDtype
from xform.introspection.callables import check_callable, definition_site, function_name
from xform.introspection.modules import is_inexact_array, take_static_out_of_modules
from xform.passes.inline import bodies_called_once, inline_bodies
from xform.planner.planning import use_default_policy
from xform.planner.problem import Problem
from xform.policies import min_cut
from xform.program.arithmetic import Value, differentiable
from xform.program.ir import Mask, Program, lift_constants, trace
from xform.rules.call_time import trace_active
from xform.transforms.prefix import flags

Tree = Any

# A text lists at most this many types. Of more types it gives only the number.
_MOST_TYPES = 6


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionCall:
    """A call of a function `f` that a transform differentiates.

    Attributes:
      caller: the name of the transform, for messages.
      name: the name of `f`, for messages.
      f: the function of the primals.
      has_aux: whether `f` returns a pair `(output, auxiliary)`.
      leaves: the leaves of the primals, as the user gave them.
      args: the same leaves as arrays or tracers.
      in_tree: the tree of the primals.
      requested: for each leaf, whether the user wants its derivative; None for all.
    """

    caller: str
    name: str
    f: Callable[..., Any]
    has_aux: bool
    leaves: list[Any]
    args: list[Value]
    in_tree: Any
    requested: Mask | None = None

    @property
    def active(self) -> Mask:
        """Which leaves are differentiated: those of float or complex type that are requested."""
        return _differentiated(map(jax.typeof, self.args), self.requested)

    def run(self, args: Sequence[Value]) -> tuple[Tree, Tree]:
        """Call `f` with flat arguments; return its output and its auxiliary output."""
        result = self.f(*jax.tree.unflatten(self.in_tree, args))
        if not self.has_aux:
            return result, ()
        if not isinstance(result, tuple) or len(result) != 2:
            kind = "an array" if isinstance(result, Tracer) else type(result).__name__
            raise WrongArgument(
                f"{self.caller} with has_aux=True",
                f"{self.name} returned {kind}, not a pair (output, auxiliary)",
                "",
                "return a pair, or drop has_aux",
            )
        return result


def function_call(f: Callable[..., Any], primals: Sequence[Tree], caller: str,
                  has_aux: bool = False, in_nzs: Any = None) -> FunctionCall:  # fmt: skip
    """Return the `FunctionCall` of `f` at positional arguments that are pytrees of arrays.

    Args:
      f: the user's function.
      primals: its arguments.
      caller: the name of the transform, for messages.
      has_aux: whether `f` returns a pair `(output, auxiliary)`.
      in_nzs: a tree of bools, a prefix of the arguments: which are differentiated; None for all.
        It is JAX's name for the inputs with nonzero tangents.

    Raises:
      WrongArgument: `f` is not callable, or `in_nzs` is not a prefix of the arguments.
      WrongDtype: a leaf of an argument is not an array.
    """
    check_callable(f, caller)
    name = function_name(f)
    f, primals = take_static_out_of_modules(f, primals, is_inexact_array)
    leaves, in_tree = jax.tree.flatten(primals)
    args = [as_array(x, caller) for x in leaves]
    requested = None if in_nzs is None else flags(in_nzs, in_tree, caller, "in_nzs")
    return FunctionCall(caller, name, f, has_aux, leaves, args, in_tree, requested)


def _differentiated(avals: Iterable[Any], requested: Mask | None) -> Mask:
    """Return which values of these types are differentiated: float or complex, and requested."""
    on = tuple(map(differentiable, avals))
    return on if requested is None else tuple(a and b for a, b in zip(on, requested, strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class Signature:
    """The name of a function, and the trees and types of its primals and of its output."""

    name: str
    in_tree: Any
    out_tree: Any
    primal_avals: list[Any]
    out_avals: list[Any]

    @property
    def is_scalar(self) -> bool:
        """Whether the output is one scalar."""
        return [a.shape for a in self.out_avals] == [()]

    @property
    def input_types(self) -> str:
        """The types of the primals, as text."""
        return _types_text(self.primal_avals)

    @property
    def output_types(self) -> str:
        """The types of the output, as text."""
        return _types_text(self.out_avals)


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
    """A traced call of a function.

    Attributes:
      signature: the trees and types of the function.
      program: the traced function. Its first inputs are the values that the function closes over,
        so a Program that outlives this trace holds no tracer. Then come the leaves of the primals.
        Its outputs are the leaves of the output, then the traced leaves of the auxiliary output.
      n_consts: how many values the function closes over.
      rebuild_aux: returns the auxiliary output, from its traced leaves.
      requested: for each primal, whether the user wants its derivative; None for all.
    """

    signature: Signature
    program: Program
    n_consts: int
    rebuild_aux: Callable[[Sequence[Value]], Tree]
    requested: Mask | None = None

    @property
    def program_and_masks(self) -> tuple[Program, Mask, Mask]:
        """Return the program, its differentiated inputs, and its outputs that get a cotangent."""
        return self.program, self.active(), self.differentiable()

    @property
    def problem(self) -> Problem:
        """Return the derivative as a planning problem, for the device that is planned for."""
        return Problem(*self.program_and_masks)

    def active(self) -> Mask:
        """Return which inputs of the program are differentiated; closed-over values are not."""
        on = _differentiated(self.signature.primal_avals, self.requested)
        return (*(False,) * self.n_consts, *on)

    def differentiable(self) -> Mask:
        """Return which outputs of the program get a cotangent: float or complex, not auxiliary."""
        avals = self.signature.out_avals
        n_aux = len(self.program.outputs) - len(avals)
        return (*map(differentiable, avals), *(False,) * n_aux)

    def outputs(self, flat: Sequence[Value]) -> tuple[Tree, Tree]:
        """Return the output and the auxiliary output, from the outputs of the program."""
        n = len(self.signature.out_avals)
        y = jax.tree.unflatten(self.signature.out_tree, flat[:n])
        return y, self.rebuild_aux(flat[n:])


def trace_function(at: FunctionCall, inline: bool = False, linear: bool = False
                   ) -> tuple[Function, list[Value]]:  # fmt: skip
    """Trace a call; return the traced function and the flat inputs of its program.

    With `inline`, jitted functions that the program calls once are inlined, so that a planner sees
    through them. The rules of custom functions are traced at their calls. With `linear` they are
    not: the transpose of a linear function does not use them.
    """
    found: dict[str, Any] = {}  # the structure of the outputs, found during the trace

    def flat(*args: Value) -> list[Value]:
        result, aux = at.run(args)
        ys, found["tree"] = jax.tree.flatten(result)
        check_outputs(ys, at)
        leaves, tree = jax.tree.flatten(aux)
        # Auxiliary leaves may be anything; only traced values go through the program.
        traced = [isinstance(x, Tracer) for x in leaves]
        found["n_outputs"] = len(ys)
        untraced_leaves = [None if t else x for x, t in zip(leaves, traced, strict=True)]
        found["aux"] = tree, untraced_leaves, traced
        return [*ys, *(x for x, t in zip(leaves, traced, strict=True) if t)]

    # JAX's errors name the user's function.
    functools.update_wrapper(flat, at.f, assigned=(), updated=())
    with use_default_policy(min_cut):  # derivatives inside `f` get the default policy
        prog = trace(flat, *at.args) if linear else trace_active(flat, at.args, at.active)
    if inline:
        prog = inline_bodies(prog, bodies_called_once(prog))
    lifted_prog, consts = lift_constants(prog)
    tree, untraced_leaves, traced = found["aux"]

    def rebuild_aux(values: Sequence[Value]) -> Tree:
        remaining = iter(values)
        return jax.tree.unflatten(
            tree,
            [next(remaining) if t else x for x, t in zip(untraced_leaves, traced, strict=True)],
        )

    avals = prog.in_avals, prog.out_avals[: found["n_outputs"]]
    signature = Signature(at.name, at.in_tree, found["tree"], *avals)
    fun = Function(signature, lifted_prog, len(consts), rebuild_aux, at.requested)
    return fun, [*consts, *at.args]


_ARRAYS = Tracer, jax.Array, jax.Ref  # a tuple: `isinstance` would build a union at each call


def check_outputs(ys: Sequence[Any], at: FunctionCall) -> None:
    """Raise WrongDtype if an output is not an array, a number or another JAX value."""
    for y in ys:
        if isinstance(y, _ARRAYS):
            continue
        try:
            jax.typeof(y)
        except TypeError:
            raise WrongDtype(
                f"{at.caller} of {at.name}",
                f"it returned a value of type {type(y).__name__}, which is no array",
                definition_site(at.f),
                "return arrays, numbers or pytrees of them; with has_aux=True the second of a pair "
                "may hold anything",
            ) from None


def as_array(x: Any, caller: str) -> Value:
    """Return a leaf of an argument as an array or tracer; values of hijax types are unchanged.

    A Python number becomes an array of weak type. `caller` is the transform, for messages.

    Raises:
      WrongDtype: `x` is no JAX value, or is a mutable value, such as a Flax Variable.
    """
    if isinstance(x, _ARRAYS) and not (isinstance(x, Tracer) and is_mutable(x.aval)):
        return x
    try:
        aval = jax.typeof(x)
    except TypeError:
        raise WrongDtype(
            caller,
            f"an argument of type {type(x).__name__} is not an array",
            "",
            "pass arrays, numbers or pytrees of them; bind other arguments with functools.partial",
        ) from None
    if is_mutable(aval):
        raise WrongDtype(
            caller,
            f"an argument of type {type(x).__name__} is a mutable value, which has no derivative",
            "",
            "pass its contents, for a Flax Variable nnx.with_vars(x, hijax=False), and let the "
            "function close over the Variables that it writes to",
        )
    if getattr(aval, "dtype", jax.dtypes.float0) == jax.dtypes.float0:
        return x
    return jnp.asarray(x)


def as_tuple(value: Any, name: str, caller: str) -> tuple[Tree, ...]:
    """Return primals or tangents as a tuple; raise WrongArgument if they are no tuple or list."""
    if isinstance(value, tuple | list):
        return tuple(value)
    raise WrongArgument(
        f"{caller} with {name} of type {type(value).__name__}",
        f"{name} must be a tuple or list with one entry for each argument of the function",
        "",
        f"for a function of one argument pass {name}=({'x' if name == 'primals' else 'dx'},)",
    )


def bind_others(
    f: Callable[..., Any], at: tuple[int, ...], args: Sequence[Any], kwargs: dict[str, Any]
):
    """Return `f` as a function of only the arguments at positions `at`, and those arguments.

    All other arguments, and `kwargs`, are bound.
    """

    def bound(*primals: Any) -> Any:
        full = list(args)
        for i, x in zip(at, primals, strict=True):
            full[i] = x
        return f(*full, **kwargs)

    bound.__name__ = function_name(f)
    vars(bound)["__wrapped__"] = f  # so that messages name the line of `f`
    return take_static_out_of_modules(bound, [args[i] for i in at], is_inexact_array)


def _types_text(avals: Sequence[Any]) -> str:
    """Return types as text, or only their number if there are many."""
    if len(avals) > _MOST_TYPES:
        return f"({len(avals)} arrays)"
    texts = [a.str_short(short_dtypes=True) for a in avals]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"
