"""A user's function at a point: flattened, checked and traced."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform._jax import Tracer
from xform.errors import WrongArgument, WrongDtype
from xform.ir import Mask, Program, trace
from xform.table import Value, differentiable

Tree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
    """`f` at `primals`: its Program and how to read its inputs and outputs.

    What `f` closes over are leading inputs of the program (`consts`), so that a Program that
    outlives this trace holds no tracer.
    """

    name: str
    program: Program
    n_consts: int
    in_tree: Any
    out_tree: Any
    n_out: int
    rebuild_aux: Callable[[Sequence[Value]], Tree]

    @property
    def primal_avals(self) -> list[Any]:
        """Types of the flat primals."""
        return self.program.in_avals[self.n_consts :]

    @property
    def out_avals(self) -> list[Any]:
        """Types of the flat outputs, the auxiliary ones excepted."""
        return self.program.out_avals[: self.n_out]

    def active(self) -> Mask:
        """Every primal with tangents other than float0; no constant."""
        on = (differentiable(a) for a in self.primal_avals)
        return (*(False,) * self.n_consts, *on)

    def differentiable(self) -> Mask:
        """The outputs that bring a cotangent: inexact ones, the auxiliary ones excepted."""
        on = (jnp.issubdtype(a.dtype, np.inexact) for a in self.out_avals)
        return (*on, *(False,) * (len(self.program.outputs) - self.n_out))

    def outputs(self, flat: Sequence[Value]) -> tuple[Tree, Tree]:
        """Output and auxiliary output of `f`, from flat outputs of the program."""
        return jax.tree.unflatten(self.out_tree, flat[: self.n_out]), self.rebuild_aux(
            flat[self.n_out :]
        )


def function(
    f: Callable[..., Any], primals: Sequence[Tree], asked: str, has_aux: bool = False
) -> tuple[Function, list[Value]]:
    """Trace `f` at `primals`, positional arguments that are arrays in pytrees; and flat inputs."""
    check_callable(f, asked)
    leaves, in_tree = jax.tree.flatten(tuple(primals))
    args = [as_array(x, asked) for x in leaves]
    name = getattr(f, "__name__", type(f).__name__)
    out: dict[str, Any] = {}

    def flat(*args: Value) -> list[Value]:
        result = f(*jax.tree.unflatten(in_tree, args))
        aux = ()
        if has_aux:
            if not isinstance(result, tuple) or len(result) != 2:
                kind = "an array" if isinstance(result, Tracer) else type(result).__name__
                raise WrongArgument(
                    f"{asked} with has_aux=True",
                    f"{name} returned {kind}, not a pair (output, auxiliary)",
                    "",
                    "return a pair, or drop has_aux",
                )
            result, aux = result
        ys, out["tree"] = jax.tree.flatten(result)
        leaves, tree = jax.tree.flatten(aux)
        # Auxiliary leaves may be anything; only what was traced goes through the program.
        traced = [isinstance(x, Tracer) for x in leaves]
        out["n"] = len(ys)
        out["aux"] = tree, [None if t else x for x, t in zip(leaves, traced, strict=True)], traced
        return [*ys, *(x for x, t in zip(leaves, traced, strict=True) if t)]

    prog = trace(flat, *args)
    consts = [x for _, x in prog.consts]
    lifted = Program((*(v for v, _ in prog.consts), *prog.inputs), (), prog.equations, prog.outputs)
    tree, static, traced = out["aux"]

    def rebuild_aux(values: Sequence[Value]) -> Tree:
        rest = iter(values)
        return jax.tree.unflatten(
            tree, [next(rest) if t else x for x, t in zip(static, traced, strict=True)]
        )

    fun = Function(name, lifted, len(consts), in_tree, out["tree"], out["n"], rebuild_aux)
    return fun, [*consts, *args]


def check_callable(f: Any, asked: str) -> None:
    """Refuse what is no function."""
    if not callable(f):
        raise WrongArgument(asked, f"{f!r} is not callable", "", "pass a function of arrays")


def as_array(x: Any, asked: str) -> Value:
    """A leaf as an array or tracer; its weak type is kept."""
    if isinstance(x, Tracer | jax.Array):
        return x
    try:
        jax.typeof(x)
    except TypeError:
        raise WrongDtype(
            asked,
            f"an argument of type {type(x).__name__} is not an array",
            "",
            "pass arrays, numbers or pytrees of them; bind other arguments with functools.partial",
        ) from None
    if getattr(x, "dtype", None) == jax.dtypes.float0:
        return x
    return jnp.asarray(x)


def positions(argnums: int | Sequence[int], n: int, asked: str) -> tuple[int, ...]:
    """`argnums` as a tuple of non-negative positions."""
    given = (argnums,) if isinstance(argnums, int | np.integer) else tuple(argnums)
    for i in given:
        if not -n <= i < n:
            raise WrongArgument(
                f"{asked} with argnums={argnums}",
                f"the function was called with {n} positional argument{'s' * (n != 1)}",
                "",
                "pass the arguments to differentiate by position; keywords are held constant",
            )
    at = tuple(int(i) % n for i in given)
    if len(set(at)) < len(at):
        raise WrongArgument(
            f"{asked} with argnums={argnums}",
            "it names one argument twice",
            "",
            "name each argument once",
        )
    return at


def partial(
    f: Callable[..., Any], at: tuple[int, ...], args: Sequence[Any], kwargs: dict[str, Any]
):
    """`f` as a function of the arguments at some positions; all others are held as they are."""

    def held(*given: Any) -> Any:
        full = list(args)
        for i, x in zip(at, given, strict=True):
            full[i] = x
        return f(*full, **kwargs)

    held.__name__ = getattr(f, "__name__", type(f).__name__)
    return held, [args[i] for i in at]
