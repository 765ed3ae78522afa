"""A user's function at a point: flattened, checked and, if it is planned, traced."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform._jax import Tracer
from xform._jax.mutable import is_mutable
from xform.errors import WrongArgument, WrongDtype
from xform.introspection.callables import check_callable, definition_site, function_name
from xform.introspection.modules import is_inexact_array, take_static_out_of_modules
from xform.passes.inline import bodies_called_once, inline_bodies
from xform.planner.problem import Problem
from xform.program.arithmetic import Value, differentiable
from xform.program.ir import Mask, Program, lift_constants, trace
from xform.transforms.prefix import flags

Tree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionCall:
    """A call of `f` that a transform differentiates: the `leaves` of its primals, as arrays `args`.

    `caller` is the transform, for messages. `requested` says for each leaf whether the caller wants
    its derivative; None means all leaves.
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
        """Which primals are differentiated: the requested ones that have a tangent type."""
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

    `in_nzs` is a tree of bools, a prefix of the arguments: which are differentiated; None for all.
    """
    check_callable(f, caller)
    name = function_name(f)
    f, primals = take_static_out_of_modules(f, primals, is_inexact_array)
    leaves, in_tree = jax.tree.flatten(primals)
    args = [as_array(x, caller) for x in leaves]
    requested = None if in_nzs is None else flags(in_nzs, in_tree, caller, "in_nzs")
    return FunctionCall(caller, name, f, has_aux, leaves, args, in_tree, requested)


def _differentiated(avals: Iterable[Any], requested: Mask | None) -> Mask:
    """Return which values of these types are differentiated: requested, with a tangent type."""
    on = tuple(map(differentiable, avals))
    return on if requested is None else tuple(a and b for a, b in zip(on, requested, strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class Signature:
    """The trees and types of a function's primals and of its output."""

    name: str
    in_tree: Any
    out_tree: Any
    primal_avals: list[Any]
    out_avals: list[Any]

    @property
    def is_scalar(self) -> bool:
        """Whether the output is one scalar."""
        return [a.shape for a in self.out_avals] == [()]


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
    """A traced call.

    The values that `f` closes over are the first inputs of the program (`n_consts` of them), so a
    Program that outlives this trace holds no tracer. `requested` is as in
    `FunctionCall`.
    """

    signature: Signature
    program: Program
    n_consts: int
    rebuild_aux: Callable[[Sequence[Value]], Tree]
    requested: Mask | None = None

    @property
    def ends(self) -> tuple[Program, Mask, Mask]:
        """Return the program, its differentiated inputs, and its outputs that get a cotangent."""
        return self.program, self.active(), self.differentiable()

    @property
    def problem(self) -> Problem:
        """Return the derivative as a planning problem, for the device of the current plan."""
        return Problem(*self.ends)

    def active(self) -> Mask:
        """Which inputs of the program are differentiated; constants are not."""
        on = _differentiated(self.signature.primal_avals, self.requested)
        return (*(False,) * self.n_consts, *on)

    def differentiable(self) -> Mask:
        """Which outputs get a cotangent: inexact ones that are not auxiliary."""
        avals = self.signature.out_avals
        rest = len(self.program.outputs) - len(avals)
        return (*map(differentiable, avals), *(False,) * rest)

    def outputs(self, flat: Sequence[Value]) -> tuple[Tree, Tree]:
        """Return output and auxiliary output of `f`, from flat outputs of the program."""
        n = len(self.signature.out_avals)
        y = jax.tree.unflatten(self.signature.out_tree, flat[:n])
        return y, self.rebuild_aux(flat[n:])


def trace_function(at: FunctionCall, inline: bool = False) -> tuple[Function, list[Value]]:
    """Trace a call; return the traced function and the flat inputs of its program.

    With `inline`, jitted functions that the program calls once are inlined, so that a planner sees
    through them.
    """
    out: dict[str, Any] = {}

    def flat(*args: Value) -> list[Value]:
        result, aux = at.run(args)
        ys, out["tree"] = jax.tree.flatten(result)
        check_outputs(ys, at)
        leaves, tree = jax.tree.flatten(aux)
        # Auxiliary leaves may be anything; only traced values go through the program.
        traced = [isinstance(x, Tracer) for x in leaves]
        out["n"] = len(ys)
        out["aux"] = tree, [None if t else x for x, t in zip(leaves, traced, strict=True)], traced
        return [*ys, *(x for x, t in zip(leaves, traced, strict=True) if t)]

    prog = trace(flat, *at.args)
    if inline:
        prog = inline_bodies(prog, bodies_called_once(prog))
    lifted_prog, consts = lift_constants(prog)
    tree, static, traced = out["aux"]

    def rebuild_aux(values: Sequence[Value]) -> Tree:
        rest = iter(values)
        return jax.tree.unflatten(
            tree, [next(rest) if t else x for x, t in zip(static, traced, strict=True)]
        )

    ends = prog.in_avals, prog.out_avals[: out["n"]]
    signature = Signature(at.name, at.in_tree, out["tree"], *ends)
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
    """Return a leaf as an array or tracer, with its weak type, or as another JAX value."""
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
            "pass its contents (nnx.with_vars(x, hijax=False)), and close over what f writes",
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


def numbers(value: Any, caller: str, name: str) -> tuple[int, ...]:
    """Return one position, or a sequence of positions, as a tuple."""
    try:
        several = (value,) if isinstance(value, int | np.integer) else tuple(value)
        return tuple(map(operator.index, several))
    except TypeError:
        raise WrongArgument(
            f"{caller} with {name}={value!r}",
            "it is neither a position nor a sequence of positions",
            "",
            f"give positions of arguments, such as {name}=0 or {name}=(0, 2)",
        ) from None


def positions(argnums: int | Sequence[int], n: int, caller: str) -> tuple[int, ...]:
    """Return `argnums` as a tuple of non-negative positions."""
    several = numbers(argnums, caller, "argnums")
    for i in several:
        if not -n <= i < n:
            raise WrongArgument(
                f"{caller} with argnums={argnums}",
                f"the function was called with {n} positional argument{'s' * (n != 1)}",
                "",
                "pass the arguments to differentiate by position; keywords are held constant",
            )
    at = tuple(int(i) % n for i in several)
    distinct(at, caller, argnums)
    return at


def distinct(at: Sequence[int], caller: str, argnums: Any) -> None:
    """Raise WrongArgument if a position occurs twice in `at`, which came from `argnums`."""
    if len(set(at)) < len(at):
        raise WrongArgument(
            f"{caller} with argnums={argnums}",
            "it names one argument twice",
            "",
            "name each argument once",
        )


def partial(
    f: Callable[..., Any], at: tuple[int, ...], args: Sequence[Any], kwargs: dict[str, Any]
):
    """Return `f` as a function of the arguments at positions `at`, and those arguments.

    All other arguments are bound.
    """

    def bound(*primals: Any) -> Any:
        full = list(args)
        for i, x in zip(at, primals, strict=True):
            full[i] = x
        return f(*full, **kwargs)

    bound.__name__ = function_name(f)
    vars(bound)["__wrapped__"] = f  # so that messages name the line of `f`
    return take_static_out_of_modules(bound, [args[i] for i in at], is_inexact_array)
