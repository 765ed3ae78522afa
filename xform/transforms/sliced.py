"""`sliced`: a function that runs in slices, such that it keeps to a number of bytes.

For the planner, the function is a problem without a derivative. It has one plan, which runs
everything once. So the search for a budget can only slice regions.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from xform._jax import jit, staging
from xform._jax.meshes import explicit_mesh_of
from xform.errors import BudgetInfeasible, WrongArgument
from xform.interpret.cost import size
from xform.introspection.callables import check_callable, function_name
from xform.introspection.modules import (
    is_array_or_type,
    take_static_out,
    take_static_out_of_modules,
)
from xform.memory.compilation import compiled_bytes
from xform.memory.targets import parse_target
from xform.modules import module_boundary
from xform.planner.choice import Choice
from xform.planner.default_plan import default_plan
from xform.planner.measure import Measure
from xform.planner.problem import Problem
from xform.planner.search import search
from xform.planner.sliced.decision import in_slices, regions_of_slices
from xform.policies.budgets import Budget
from xform.policies.sample import check_known_sizes
from xform.program.dimensions import shape
from xform.program.ir import Program, evaluate, lift_constants, trace
from xform.program.source import frame
from xform.slices.decision import Slices
from xform.slices.region import Region
from xform.terminal import progress_line
from xform.terminal.text import byte_count, human_bytes
from xform.transforms.compiling import check_shardings

Tree = Any


@dataclasses.dataclass(frozen=True)
class SlicedRegion:
    """A region of a function that runs in slices.

    Attributes:
      slices: the number of slices.
      length: the length of the sliced axis.
      axis: the axis, of the value `type`.
      type: the type of a large value of the region, such as "float32[1024,1024]".
      operation: the operation that computes this value.
      where: the user's line that computes it.
      equations: the number of equations of the region.
    """

    slices: int
    length: int
    axis: int
    type: str
    operation: str
    where: str
    equations: int

    def __str__(self) -> str:
        return (
            f"{self.slices} slices of axis {self.axis} of {self.type}, {self.operation} at "
            f"{self.where} ({self.equations} operations)"
        )


def sliced(f: Callable[..., Any], budget: float | str, *, target: str | None = None
           ) -> Callable[..., Any]:  # fmt: skip
    """Return a function like `f` that takes at most `budget` bytes: parts of it run in slices.

    If the compiled function takes more, regions of it become loops over slices of an axis. The
    regions, the axes and the numbers of slices are found from the traced program. A region computes
    independent parts, such as rows, or sums over the axis. The compiler's figures decide, and few
    slices are preferred. Results that are joined from slices equal those of `f`, unless XLA chooses
    another kernel for fewer rows. Sums are added in another order. Both differ by rounding. On a
    mesh with explicit axes, a sharded axis is sliced within each shard, and the budget is that of
    each device.

    Args:
      f: a function of pytrees of arrays, or of modules of Flax NNX or Equinox. Use
        `sliced(jax.vmap(f), ...)` to run a `vmap` in chunks.
      budget: arguments, outputs and temporary memory of the compiled function, in bytes or as text
        such as "512 MiB".
      target: the device to compile for, such as "tpu:v5e"; None is JAX's default backend. Outside
        `jit` the function runs on the default backend in any case.

    Returns:
      A function with the signature of `f`. It works under `jit`, `vmap` and derivatives. If a
      region computes one number, such as a loss, its derivative computes value and gradient in one
      loop. Any other loop recomputes its body in the backward pass. The budget is that of `f`, not
      of its derivative, and under `vmap` that of one example: write `sliced(xform.grad(f), ...)`
      and `sliced(jax.vmap(f), ...)` for a budget of these. The method `regions(*args)` lists the
      regions that run in slices.

    Raises:
      BudgetInfeasible: no slices that were tried keep to the budget. The error names the smallest
        number of bytes that was found.
      UnknownShardings: the arguments are on a mesh with `Auto` axes.
      WrongArgument: `budget` is not a number of bytes, or `f` is not a function.

    Cost: the search compiles about four programs, and ten at most before it raises an error: once
    for each `jit` that calls the function, or once for each type of arguments. Source: Zhao et al.,
    "AutoChunk", arXiv:2401.10652, which slices the activations of inference in this way.

    >>> x = jnp.ones((512, 8))
    >>> small = xform.sliced(lambda x, y: jnp.sort(x @ y.T)[:, 0], "400 KiB")  # or 1 MiB in full
    >>> small(x, x).shape
    (512,)
    >>> [region.length for region in small.regions(x, x)]
    [512]
    """
    check_callable(f, "sliced")
    name = function_name(f)
    try:
        limit = byte_count(budget)
    except (ValueError, TypeError) as error:
        raise WrongArgument(
            "sliced", f"budget={budget!r}: {error}", "", 'pass a number, or a text like "512 MiB"'
        ) from None

    def chosen(args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> tuple[_Sliced, Any, Any]:
        """Return the program in slices, its leading inputs, and the tree of its outputs."""
        with_static, args, kwargs = _without_static(f, args, kwargs)
        check_known_sizes(f"sliced({name}, {budget!r})", (args, kwargs))
        leaves, tree = jax.tree.flatten((args, kwargs))
        out_trees: list[Any] = []

        def flat(*xs: Any) -> list[Any]:
            positional, named = jax.tree.unflatten(tree, xs)
            ys, out_tree = jax.tree.flatten(with_static(*positional, **named))
            out_trees[:] = [out_tree]
            return ys

        prog, consts = lift_constants(trace(flat, *leaves))
        check_shardings(f"sliced({name}, {budget!r})", prog.in_avals)
        with progress_line.show(f"choosing slices of {name}"):
            found = _within(prog, limit, target)
        if found.bytes > limit:
            raise _infeasible(name, budget, prog, found)
        return found, [*consts, *leaves], out_trees[0]

    def run(*args: Tree, **kwargs: Tree) -> Tree:
        found, inputs, out_tree = chosen(args, kwargs)
        return jax.tree.unflatten(out_tree, evaluate(found.program, inputs))

    @functools.lru_cache(maxsize=4)
    def of_arrays(boundary: Any) -> Callable[..., Any]:
        return sliced(boundary.pure(f), budget, target=target)

    @functools.wraps(f)
    def wrapped(*args: Tree, **kwargs: Tree) -> Tree:
        if boundary := module_boundary("sliced", (args, kwargs)):
            return boundary.call(of_arrays(boundary), args, kwargs)
        if staging():
            return run(*args, **kwargs)
        with explicit_mesh_of((args, kwargs)):
            return compiled(args, kwargs)

    def regions(*args: Tree, **kwargs: Tree) -> list[SlicedRegion]:
        if boundary := module_boundary("sliced", (args, kwargs)):
            return boundary.ask(vars(of_arrays(boundary))["regions"], args, kwargs)
        with explicit_mesh_of((args, kwargs)):
            return [_row(region) for region in chosen(args, kwargs)[0].regions]

    def compiled(args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> Tree:
        with_static, args, kwargs = _without_static(run, args, kwargs)
        if with_static is not run:
            return jit(with_static)(*args, **kwargs)
        return jitted(*args, **kwargs)

    jitted = jit(run)
    wrapped.regions = regions  # pyright: ignore[reportAttributeAccessIssue]
    return wrapped


def _without_static(f: Callable[..., Any], args: Sequence[Tree], kwargs: Mapping[str, Tree]
                    ) -> tuple[Callable[..., Any], Sequence[Tree], Mapping[str, Tree]]:  # fmt: skip
    """Take the static leaves out of the arguments, in Equinox modules all that are no arrays."""
    call = lambda args, kwargs: f(*args, **kwargs)
    with_static, given = take_static_out_of_modules(call, (args, kwargs), is_array_or_type)
    if with_static is call:
        return take_static_out(f, args, kwargs)
    run = lambda *args, **kwargs: with_static(args, kwargs)
    return take_static_out(run, *given)


@dataclasses.dataclass(frozen=True)
class _Sliced:
    """A program with some regions in slices.

    Attributes:
      program: the program.
      regions: its regions in slices, in the order of the choices.
      bytes: its compiled bytes.
    """

    program: Program
    regions: Sequence[Region]
    bytes: float


def _within(prog: Program, limit: int, target: str | None) -> _Sliced:
    """Return a program that takes at most `limit` bytes on a target, or the smallest one tried."""
    compiled: dict[Slices, float] = {}
    wanted = (True,) * len(prog.outputs)

    def bytes_of(choice: Choice) -> float:
        (candidate,) = choice.candidates.values()
        sliced = in_slices(prog, candidate.slices, wanted)
        size = compiled_bytes(lambda *xs: evaluate(sliced, xs), prog.in_types, target)
        compiled[candidate.slices] = size
        return size

    with parse_target(target).planned_for():
        problem = Problem(prog, (False,) * len(prog.inputs), wanted)
        budget = Budget(limit, slices=True)
        try:
            plans = search({"": problem}, budget, {"": default_plan(problem)}, Measure(bytes_of))
            slices = plans[""].slices
        except BudgetInfeasible:
            slices = min(compiled, key=compiled.__getitem__)
    regions = regions_of_slices(prog, slices, wanted)
    return _Sliced(in_slices(prog, slices, wanted), regions, compiled[slices])


def _row(region: Region) -> SlicedRegion:
    """Describe a region for users."""
    operation = region.source.primitive.name
    aval: Any = region.start.aval
    text = f"{aval.dtype}[{','.join(map(str, shape(region.start)))}]"
    return SlicedRegion(
        region.n, region.size, region.axis, text, operation, region.where, len(region.members)
    )


def _infeasible(name: str, budget: Any, prog: Program, found: _Sliced) -> BudgetInfeasible:
    """Return the error for a budget that no slices keep to."""
    rows = [str(_row(region)) for region in found.regions]
    largest = max(prog.equations, key=lambda e: sum(map(size, e.outvars)), default=None)
    if math.isinf(found.bytes):
        problem = "the compiler refused every program that was tried"
    else:
        with_slices = f" (with {'; '.join(rows)})" if rows else ": no region of it can be sliced"
        problem = f"the smallest program found takes {human_bytes(int(found.bytes))}{with_slices}"
    return BudgetInfeasible(
        f"sliced({name}, {budget!r})",
        problem,
        frame(largest) if largest is not None else "",
        "raise the budget, or make the arguments smaller: they and the outputs count too",
        0 if math.isinf(found.bytes) else int(found.bytes),
    )
