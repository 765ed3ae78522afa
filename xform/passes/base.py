"""The base class `Pass` of program transforms, and `Pipeline`, which runs several of them."""

from __future__ import annotations

import abc
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from xform.errors import WrongArgument
from xform.passes.builder import map_nested_programs
from xform.passes.structured import bodies
from xform.passes.verify import verify
from xform.program.ir import Program, evaluate, gather, seldom_collected, spread, trace


@dataclasses.dataclass(frozen=True)
class Pass(abc.ABC):
    """A program transform that preserves inputs, outputs, their types and values, and effects.

    Applied to a `Program` (a traced function), a pass returns a Program. Applied to a function, it
    returns a function of the same signature. Each call of that function traces the original,
    rewrites its program, and runs it.

    A subclass is a frozen dataclass whose fields are its options. It defines its `name`, and the
    method `rewrite`, which changes the equations of one program. This class also applies `rewrite`
    to the bodies of loops, branches and calls.
    """

    name: ClassVar[str] = ""

    @abc.abstractmethod
    def rewrite(self, prog: Program) -> Program:
        """Return the rewritten program; `prog` itself if nothing changes.

        Nested programs (the bodies of loops, branches and calls) stay as they are.
        """

    def program(self, prog: Program) -> Program:
        """Return the program with its equations and its nested programs rewritten.

        The result is cached on `prog`.
        """
        if self not in prog.cache:
            prog.cache[self] = map_nested_programs(self.rewrite(prog), self.program)
        return prog.cache[self]

    @overload
    def __call__(self, of: Program) -> Program: ...
    @overload
    def __call__(self, of: Callable[..., Any]) -> Callable[..., Any]: ...
    def __call__(self, of: Any) -> Any:
        """Rewrite a program or a function."""
        if isinstance(of, Program):
            return self.program(of)
        if not callable(of):
            raise WrongArgument(
                f"{self!r}",
                f"{of!r} is not a function",
                "",
                "pass a function of arrays or a Program",
            )
        return _rewrite_function(self, of)


@dataclasses.dataclass(frozen=True)
class PassResult:
    """What one pass of a pipeline did.

    Attributes:
      name: the name of the pass.
      equations_before: the number of equations before the pass, nested ones included.
      equations_after: the number of equations after it.
      seconds: the time that the pass took.
      program: the program after the pass.
    """

    name: str
    equations_before: int
    equations_after: int
    seconds: float
    program: Program


@dataclasses.dataclass(frozen=True)
class Pipeline(Pass):
    """A pass that runs several passes in order, and verifies the program after each.

    Attributes:
      passes: the passes, in the order of their runs.
      verify: whether to check the types and effects of the program after each pass, as the function
        `xform.passes.verify` does.

    When the pipeline is applied to a function, the arrays among its arguments (also in pytrees and
    keyword arguments) are traced, and all other arguments are passed on unchanged. The returned
    function can be jitted, mapped and differentiated, by JAX or by xform.

    Raises:
      BrokenPass: a pass returned an invalid program, or changed types or effects.

    Cost: each call traces the function and runs the passes. Each pass is near linear in the number
    of equations. Under `jit` this happens once for each compilation.

    >>> from xform import passes
    >>> tidy = passes.Pipeline([passes.Inline(), passes.Simplify(), passes.Cse(), passes.Dce()])
    >>> f = tidy(lambda x: jnp.sin(x) * 1.0 + jnp.sin(x))
    >>> [e.primitive.name for e in jax.make_jaxpr(f)(jnp.ones(3)).eqns]
    ['sin', 'add']
    """

    name: ClassVar[str] = "pipeline"
    passes: Sequence[Pass]
    verify: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.passes, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise WrongArgument(
                "Pipeline", f"{self.passes!r} is not a list of passes", "",
                "pass a list, such as Pipeline([xform.passes.Cse()])",
            )  # fmt: skip
        object.__setattr__(self, "passes", tuple(self.passes))
        for p in self.passes:
            if not isinstance(p, Pass):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise WrongArgument(
                    "Pipeline", f"{p!r} is not a pass", "", "use passes, such as xform.passes.Cse()"
                )

    def rewrite(self, prog: Program) -> Program:
        for step in self.steps(prog):
            prog = step.program
        return prog

    def program(self, prog: Program) -> Program:
        """Return the program after the last pass, with its nested programs rewritten."""
        return self.rewrite(prog)

    def steps(self, prog: Program) -> Iterator[PassResult]:
        """Run the passes one by one, and yield the result of each."""
        for p in self.passes:
            start = time.perf_counter()
            with seldom_collected():
                after = p.program(prog)
            seconds = time.perf_counter() - start
            if self.verify and after is not prog:
                verify(prog, after, p.name)
            yield PassResult(p.name, size(prog), size(after), seconds, after)
            prog = after


def size(prog: Program) -> int:
    """Return the number of equations of a program, nested programs included."""
    if "equations" not in prog.cache:
        inner = sum(size(b) for e in prog.equations for b in bodies(e))
        prog.cache["equations"] = len(prog.equations) + inner
    return prog.cache["equations"]


def _rewrite_function(pass_: Pass, f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that traces `f`, applies a pass to its program, and runs the result."""

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        is_array = [isinstance(x, jax.Array | np.ndarray | np.generic) for x in leaves]
        arrays = gather(leaves, is_array)
        out_trees: list[Any] = []

        def flat(*tracers: Any) -> list[Any]:
            triples = zip(leaves, spread(tracers, is_array), is_array, strict=True)
            inputs = [tracer if on else x for x, tracer, on in triples]
            positional, named = jax.tree.unflatten(tree, inputs)
            ys, out_tree = jax.tree.flatten(f(*positional, **named))
            out_trees[:] = [out_tree]
            return ys

        ys = evaluate(pass_.program(trace(flat, *arrays)), arrays)
        return jax.tree.unflatten(out_trees[0], map(_as_array, ys))

    return run


def _as_array(y: Any) -> Any:
    """Convert an output as jit does: a constant becomes an array, and keeps its weak type."""
    unchanged = isinstance(y, jax.Array) or getattr(y, "dtype", None) == jax.dtypes.float0
    return y if unchanged else jnp.asarray(y)
