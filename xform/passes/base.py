"""`Pass`: from a program to a program of the same types; `Pipeline`: several, verified."""

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
from xform.ir import Program, evaluate, gather, seldom_collected, spread, trace
from xform.passes.builder import inside
from xform.passes.structured import bodies
from xform.passes.verify import verify


@dataclasses.dataclass(frozen=True)
class Pass(abc.ABC):
    """A change of programs that keeps inputs, outputs, their types, values and effects.

    Applied to a `Program` it gives a Program; applied to a function, a function of the same
    signature that is traced when it is called, changed, and run. A subclass is a frozen dataclass:
    its fields are its options. It says its `name`, and in `rewrite` what it does to the equations
    of one program; the programs of loops, branches and calls are seen to by this class.
    """

    name: ClassVar[str] = ""

    @abc.abstractmethod
    def rewrite(self, prog: Program) -> Program:
        """The program changed at its own level; itself if there is nothing to change."""

    def program(self, prog: Program) -> Program:
        """The program changed at every level. Kept in its cache."""
        if self not in prog.cache:
            prog.cache[self] = inside(self.rewrite(prog), self.program)
        return prog.cache[self]

    @overload
    def __call__(self, of: Program) -> Program: ...
    @overload
    def __call__(self, of: Callable[..., Any]) -> Callable[..., Any]: ...
    def __call__(self, of: Any) -> Any:
        """A program, or a function, changed."""
        if isinstance(of, Program):
            return self.program(of)
        if not callable(of):
            raise WrongArgument(
                f"{self!r}", f"{of!r} is no function", "", "pass a function of arrays, or a Program"
            )
        return _optimized(self, of)


@dataclasses.dataclass(frozen=True)
class Step:
    """What one pass did to a program.

    Attributes:
      name: of the pass.
      before, after: how many equations the program had, nested ones included.
      seconds: how long it took.
      program: what it made.
    """

    name: str
    before: int
    after: int
    seconds: float
    program: Program


@dataclasses.dataclass(frozen=True)
class Pipeline(Pass):
    """Passes one after another, with a verifier behind each: itself a pass.

    Attributes:
      passes: in the order in which they run.
      verified: whether each result is held against the program before it, see `verify`.

    Applied to a function, arrays among its arguments (in pytrees, and keyword arguments) are
    traced, and everything else is passed on as it is. What is returned can be jitted, mapped and
    differentiated, by JAX or by xform.

    Raises:
      BrokenPass: a pass made something that is no program, or of other types or effects.

    Cost: of a call, one trace of the function, and that of the passes, each near linear in the
    number of equations; under `jit`, once for each compilation.

    >>> from xform import passes
    >>> tidy = passes.Pipeline([passes.Inline(), passes.Simplify(), passes.Cse(), passes.Dce()])
    >>> f = tidy(lambda x: jnp.sin(x) * 1.0 + jnp.sin(x))
    >>> [e.primitive.name for e in jax.make_jaxpr(f)(jnp.ones(3)).eqns]
    ['sin', 'add']
    """

    name: ClassVar[str] = "pipeline"
    passes: Sequence[Pass]
    verified: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.passes, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise WrongArgument(
                "Pipeline", f"{self.passes!r} is no list of passes", "",
                "give a list, such as Pipeline([xform.passes.Cse()])",
            )  # fmt: skip
        object.__setattr__(self, "passes", tuple(self.passes))
        for p in self.passes:
            if not isinstance(p, Pass):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise WrongArgument(
                    "Pipeline", f"{p!r} is no pass", "", "give passes, such as xform.passes.Cse()"
                )

    def rewrite(self, prog: Program) -> Program:
        for step in self.steps(prog):
            prog = step.program
        return prog

    def program(self, prog: Program) -> Program:
        """The program after the last pass. Each pass sees to nested programs itself."""
        return self.rewrite(prog)

    def steps(self, prog: Program) -> Iterator[Step]:
        """The passes one by one, with what each did."""
        for p in self.passes:
            start = time.perf_counter()
            with seldom_collected():
                after = p.program(prog)
            seconds = time.perf_counter() - start
            if self.verified and after is not prog:
                verify(prog, after, p.name)
            yield Step(p.name, size(prog), size(after), seconds, after)
            prog = after


def size(prog: Program) -> int:
    """The number of equations, those of loops, branches and calls included."""
    if "equations" not in prog.cache:
        inner = sum(size(b) for e in prog.equations for b in bodies(e))
        prog.cache["equations"] = len(prog.equations) + inner
    return prog.cache["equations"]


def _optimized(by: Pass, f: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        traced = [isinstance(x, jax.Array | np.ndarray | np.generic) for x in leaves]
        arrays = gather(leaves, traced)
        out: list[Any] = []

        def flat(*xs: Any) -> list[Any]:
            new = zip(leaves, spread(xs, traced), traced, strict=True)
            full = [y if t else x for x, y, t in new]
            positional, named = jax.tree.unflatten(tree, full)
            ys, out_tree = jax.tree.flatten(f(*positional, **named))
            out[:] = [out_tree]
            return ys

        ys = evaluate(by.program(trace(flat, *arrays)), arrays)
        return jax.tree.unflatten(out[0], map(_array, ys))

    return run


def _array(y: Any) -> Any:
    """An output as jit returns it: constants become arrays, and keep their weak types."""
    kept = isinstance(y, jax.Array) or getattr(y, "dtype", None) == jax.dtypes.float0
    return y if kept else jnp.asarray(y)
