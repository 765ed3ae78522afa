"""A user's function at a point: flattened, checked and, if it is to be planned, traced."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform._jax import Tracer
from xform.arithmetic import Value, differentiable
from xform.callables import check_callable, function_name, written
from xform.errors import WrongArgument, WrongDtype
from xform.ir import Mask, Program, lifted, trace
from xform.modules import inexact, opened
from xform.mutable import is_mutable
from xform.planner.problem import Problem
from xform.transforms.prefix import flags

Tree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A call of `f` that a transform differentiates: the `leaves` of its primals, as arrays `args`.

    `moving` says which of them may have a tangent; None for all.
    """

    asked: str
    name: str
    f: Callable[..., Any]
    has_aux: bool
    leaves: list[Any]
    args: list[Value]
    in_tree: Any
    moving: Mask | None = None

    @property
    def active(self) -> Mask:
        """Every primal that moves and has tangents other than float0."""
        return _moving(map(jax.typeof, self.args), self.moving)

    def run(self, args: Sequence[Value]) -> tuple[Tree, Tree]:
        """Output and auxiliary output of `f`, from flat arguments."""
        result = self.f(*jax.tree.unflatten(self.in_tree, args))
        if not self.has_aux:
            return result, ()
        if not isinstance(result, tuple) or len(result) != 2:
            kind = "an array" if isinstance(result, Tracer) else type(result).__name__
            raise WrongArgument(
                f"{self.asked} with has_aux=True",
                f"{self.name} returned {kind}, not a pair (output, auxiliary)",
                "",
                "return a pair, or drop has_aux",
            )
        return result


def call(f: Callable[..., Any], primals: Sequence[Tree], asked: str, has_aux: bool = False,
         in_nzs: Any = None) -> Call:  # fmt: skip
    """`f` at positional arguments that are arrays in pytrees.

    `in_nzs` is a tree of bools that is a prefix of them: which are differentiated; None for all.
    """
    check_callable(f, asked)
    name = function_name(f)
    f, primals = opened(f, primals, inexact)
    leaves, in_tree = jax.tree.flatten(primals)
    args = [as_array(x, asked) for x in leaves]
    moving = None if in_nzs is None else flags(in_nzs, in_tree, asked, "in_nzs")
    return Call(asked, name, f, has_aux, leaves, args, in_tree, moving)


def _moving(avals: Iterable[Any], moving: Mask | None) -> Mask:
    """Which values of these types are differentiated, of those that are `moving`."""
    on = tuple(map(differentiable, avals))
    return on if moving is None else tuple(a and b for a, b in zip(on, moving, strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class Signature:
    """The trees and types of a function's primals and output: what its derivative takes."""

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

    What `f` closes over are leading inputs of the program (`n_consts` of them), so that a Program
    that outlives this trace holds no tracer. `moving` is the Call's.
    """

    signature: Signature
    program: Program
    n_consts: int
    rebuild_aux: Callable[[Sequence[Value]], Tree]
    moving: Mask | None = None

    @property
    def ends(self) -> tuple[Program, Mask, Mask]:
        """The program, its inputs that are differentiated, its outputs that bring a cotangent."""
        return self.program, self.active(), self.differentiable()

    @property
    def problem(self) -> Problem:
        """Its derivative, to be planned for the device that is planned for here."""
        return Problem(*self.ends)

    def active(self) -> Mask:
        """Every primal that moves and has tangents other than float0; no constant."""
        on = _moving(self.signature.primal_avals, self.moving)
        return (*(False,) * self.n_consts, *on)

    def differentiable(self) -> Mask:
        """The outputs that bring a cotangent: inexact ones, the auxiliary ones excepted."""
        avals = self.signature.out_avals
        rest = len(self.program.outputs) - len(avals)
        return (*map(differentiable, avals), *(False,) * rest)

    def outputs(self, flat: Sequence[Value]) -> tuple[Tree, Tree]:
        """Output and auxiliary output of `f`, from flat outputs of the program."""
        n = len(self.signature.out_avals)
        y = jax.tree.unflatten(self.signature.out_tree, flat[:n])
        return y, self.rebuild_aux(flat[n:])


def function(at: Call) -> tuple[Function, list[Value]]:
    """Trace a call; and the flat inputs of the program."""
    out: dict[str, Any] = {}

    def flat(*args: Value) -> list[Value]:
        result, aux = at.run(args)
        ys, out["tree"] = jax.tree.flatten(result)
        check_outputs(ys, at)
        leaves, tree = jax.tree.flatten(aux)
        # Auxiliary leaves may be anything; only what was traced goes through the program.
        traced = [isinstance(x, Tracer) for x in leaves]
        out["n"] = len(ys)
        out["aux"] = tree, [None if t else x for x, t in zip(leaves, traced, strict=True)], traced
        return [*ys, *(x for x, t in zip(leaves, traced, strict=True) if t)]

    prog = trace(flat, *at.args)
    whole, consts = lifted(prog)
    tree, static, traced = out["aux"]

    def rebuild_aux(values: Sequence[Value]) -> Tree:
        rest = iter(values)
        return jax.tree.unflatten(
            tree, [next(rest) if t else x for x, t in zip(static, traced, strict=True)]
        )

    ends = prog.in_avals, prog.out_avals[: out["n"]]
    signature = Signature(at.name, at.in_tree, out["tree"], *ends)
    return Function(signature, whole, len(consts), rebuild_aux, at.moving), [*consts, *at.args]


_ARRAYS = Tracer, jax.Array, jax.Ref  # as a tuple: a union would be made at each question


def check_outputs(ys: Sequence[Any], at: Call) -> None:
    """Refuse outputs that are no arrays, numbers or values of other types of JAX's."""
    for y in ys:
        if isinstance(y, _ARRAYS):
            continue
        try:
            jax.typeof(y)
        except TypeError:
            raise WrongDtype(
                f"{at.asked} of {at.name}",
                f"it returned a value of type {type(y).__name__}, which is no array",
                written(at.f),
                "return arrays, numbers or pytrees of them; with has_aux=True the second of a pair "
                "may hold anything",
            ) from None


def as_array(x: Any, asked: str) -> Value:
    """A leaf as an array or tracer, its weak type kept, or a value of another type of JAX's."""
    if isinstance(x, _ARRAYS) and not (isinstance(x, Tracer) and is_mutable(x.aval)):
        return x
    try:
        aval = jax.typeof(x)
    except TypeError:
        raise WrongDtype(
            asked,
            f"an argument of type {type(x).__name__} is not an array",
            "",
            "pass arrays, numbers or pytrees of them; bind other arguments with functools.partial",
        ) from None
    if is_mutable(aval):
        raise WrongDtype(
            asked,
            f"an argument of type {type(x).__name__} is a mutable value, which has no derivative",
            "",
            "pass what it holds (nnx.with_vars(x, hijax=False)), and close over what is written",
        )
    if getattr(aval, "dtype", jax.dtypes.float0) == jax.dtypes.float0:
        return x
    return jnp.asarray(x)


def as_tuple(value: Any, name: str, asked: str) -> tuple[Tree, ...]:
    """Primals or tangents as a tuple; refused if they are not a tuple or list of arguments."""
    if isinstance(value, tuple | list):
        return tuple(value)
    raise WrongArgument(
        f"{asked} with {name} of type {type(value).__name__}",
        f"{name} must be a tuple or list with one entry for each argument of the function",
        "",
        f"for a function of one argument pass {name}=({'x' if name == 'primals' else 'dx'},)",
    )


def numbers(value: Any, asked: str, name: str) -> tuple[int, ...]:
    """Positions as a tuple, of one or several."""
    try:
        several = (value,) if isinstance(value, int | np.integer) else tuple(value)
        return tuple(map(operator.index, several))
    except TypeError:
        raise WrongArgument(
            f"{asked} with {name}={value!r}",
            "it is neither a position nor several",
            "",
            f"give positions of arguments, such as {name}=0 or {name}=(0, 2)",
        ) from None


def positions(argnums: int | Sequence[int], n: int, asked: str) -> tuple[int, ...]:
    """`argnums` as a tuple of non-negative positions."""
    several = numbers(argnums, asked, "argnums")
    for i in several:
        if not -n <= i < n:
            raise WrongArgument(
                f"{asked} with argnums={argnums}",
                f"the function was called with {n} positional argument{'s' * (n != 1)}",
                "",
                "pass the arguments to differentiate by position; keywords are held constant",
            )
    at = tuple(int(i) % n for i in several)
    distinct(at, asked, argnums)
    return at


def distinct(at: Sequence[int], asked: str, argnums: Any) -> None:
    """Refuse positions of which two are one, where `argnums` was given."""
    if len(set(at)) < len(at):
        raise WrongArgument(
            f"{asked} with argnums={argnums}",
            "it names one argument twice",
            "",
            "name each argument once",
        )


def partial(
    f: Callable[..., Any], at: tuple[int, ...], args: Sequence[Any], kwargs: dict[str, Any]
):
    """`f` as a function of the arguments at some positions, and these; all others are held."""

    def held(*primals: Any) -> Any:
        full = list(args)
        for i, x in zip(at, primals, strict=True):
            full[i] = x
        return f(*full, **kwargs)

    held.__name__ = function_name(f)
    vars(held)["__wrapped__"] = f  # where it was written
    return opened(held, [args[i] for i in at], inexact)
