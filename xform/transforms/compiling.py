"""Compile a derivative that is planned inside a trace, to measure its memory.

With `policy=budget(...)` under `jit`, a derivative is planned while the program around it is
traced. The budget limits the derivative alone, so it is compiled alone, for the types of the values
in the trace. If that is not possible, as under `vmap`, the planner simulates its memory instead.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.dtypes import float0

from xform import memory
from xform._jax import AbstractValue, ShapedArray, Tracer, cotangent_aval, is_batched
from xform._jax.meshes import auto_axes, shape_dtype_struct
from xform.errors import UnknownShardings
from xform.interpret import emit
from xform.memory.targets import Target, missing, parse_target
from xform.planner.candidate import Candidate
from xform.planner.choice import Choice
from xform.planner.device import current_device, current_target, resolve_fit
from xform.planner.measure import Measure, known_bytes
from xform.policies import Policy
from xform.policies.budgets import Budget
from xform.program.arithmetic import Value, float0_zeros
from xform.program.arrays import filled
from xform.program.source import frame, user_stacklevel
from xform.transforms.function import Function
from xform.transforms.linear_map import PlannedRunner, dense

if TYPE_CHECKING:
    from xform.memory.report import MemoryReport

# The reason why no compiler can measure a derivative under vmap.
_VMAP = "under vmap"


def compiler_for(
    fun: Function, args: Sequence[Value], policy: Policy, transform: str
) -> Measure | None:
    """Return the compiler that measures plans of a derivative; None if plans are only simulated.

    Args:
      fun: the traced function, whose derivative is planned.
      args: the inputs of its program, or their types. Concrete arrays become constants of the
        compiled program.
      policy: only a budget of the peak needs a compiler.
      transform: name of the transform. "grad" does not output the value. For "grad" and
        "value_and_grad" the cotangent is 1.

    Raises:
      UnknownShardings: the arguments are on a mesh with `Auto` axes.
    """
    budget = resolve_fit(policy)
    if not isinstance(budget, Budget) or budget.of != "peak" or not budget.verify:
        return None
    target = _planned_target()
    avals = [x if isinstance(x, AbstractValue) else jax.typeof(x) for x in args]
    reason = _no_compiler_reason(args, avals, target)
    if target is None or reason:
        warned = reason == _VMAP and budget.batch_size is None  # `planned_vjp` has already warned
        if not (warned or budget.device):
            warnings.warn(
                f"{budget!r} of {fun.signature.name} is simulated, with a margin: xform cannot "
                f"compile the derivative alone {reason}. Give the budget to xform.jit of the whole "
                "step, or pass verify=False to the budget to accept the simulation",
                stacklevel=user_stacklevel(),
            )
        return None
    check_shardings(f"policy={budget!r} of {fun.signature.name}", avals)
    is_traced = [isinstance(x, Tracer | AbstractValue) for x in args]
    given = [shape_dtype_struct(a) if on else None for a, on in zip(avals, is_traced, strict=True)]
    known = [None if on else x for x, on in zip(args, is_traced, strict=True)]
    compiler = DerivativeCompiler(fun, given, known, transform, target)

    def bytes_of(choice: Choice) -> float:
        (candidate,) = choice.candidates.values()
        size = compiler.compile(candidate).total_bytes
        return math.inf if size is None else size

    return Measure(bytes_of, known_bytes(fun.problem, target.name, *compiler.cache_key))


class DerivativeCompiler:
    """Compiles a derivative alone, under one plan after another. The function itself does not run.

    Args:
      fun: the traced function.
      given: for each input of its program, an array or a type; None for a known input.
      known: the values of known inputs, which become constants; None for given inputs.
      transform: the name of the transform, see `compiler_for`.
      target: the devices to compile for.
      donated: the positions of the inputs whose memory may be reused.

    Attributes:
      cotangents: the types of the cotangents of the outputs; None if the cotangent is 1.
      arguments: what the compiled function takes, the given inputs and then cotangents.
    """

    def __init__(
        self,
        fun: Function,
        given: Sequence[Any],
        known: Sequence[Any],
        transform: str,
        target: Target,
        donated: Sequence[int] = (),
    ):
        self.fun, self.target, self.transform, self.known = fun, target, transform, known
        # The cotangent of a scalar function is 1, and the compiler may use that.
        scalar = transform in ("grad", "value_and_grad")
        self.cotangents = None if scalar else [cotangent_aval(a) for a in fun.signature.out_avals]
        positions = [i for i, x in enumerate(given) if x is not None]
        self.donated = [n for n, i in enumerate(positions) if i in donated]
        self.arguments: list[Any] = [given[i] for i in positions]
        self.arguments += [
            shape_dtype_struct(a) for a in self.cotangents or () if a.dtype != float0
        ]

    @property
    def cache_key(self) -> tuple[Any, ...]:
        """Return what the bytes of a plan depend on besides the program."""
        shardings = tuple(str(getattr(x, "sharding", None)) for x in self.arguments)
        return self.transform, shardings, tuple(x is None for x in self.known), tuple(self.donated)

    def compile(self, candidate: Candidate) -> MemoryReport:
        """Compile the derivative under a plan."""

        def derivative(*given: Value) -> Any:
            return self._run(candidate, given)

        derivative.__name__ = f"derivative of {self.fun.signature.name}"
        return memory.compile_for(
            derivative, self.arguments, target=self.target, donate_argnums=self.donated
        )

    def _run(self, candidate: Candidate, given: Sequence[Value]) -> Any:
        """Return the outputs, and the cotangents of the arguments, from values of `arguments`."""
        remaining, n = iter(given), len(self.fun.signature.out_avals)
        args = [next(remaining) if x is None else x for x in self.known]
        outs, saved = emit.forward(candidate.schedule, args)
        if self.cotangents is None:
            cts = [filled(cotangent_aval(jax.typeof(y)), 1) for y in outs[:n]]
        else:
            cts = [float0_zeros(a.shape) if a.dtype == float0 else next(remaining)
                   for a in self.cotangents]  # fmt: skip
        runner = PlannedRunner(self.fun, candidate.schedule, push=False)
        outs = outs[n:] if self.transform == "grad" else outs
        # The user gets arrays of zeros where the outputs do not depend on an argument.
        avals = map(cotangent_aval, self.fun.signature.primal_avals)
        return outs, list(map(dense, runner.run(runner.arrays(saved, args), cts), avals))


def _planned_target() -> Target | None:
    """Return the target of the current plan; None if that device has no known name."""
    device = current_device()
    if current_target() is None and (device.kind or device.backend != jax.default_backend()):
        return None
    return parse_target(current_target())


def _no_compiler_reason(args: Sequence[Value], avals: Sequence[Any], target: Target | None) -> str:
    """Return why no compiler can measure these arguments; empty if one can."""
    if any(map(is_batched, args)):
        return _VMAP
    if jax.sharding.get_abstract_mesh().manual_axes:
        return "inside a shard_map"
    if not all(isinstance(a, ShapedArray) for a in avals):
        return "for references and values that are not arrays"
    if target is None:
        return "for these devices"
    absent = missing(target)
    return f"for {target.name}, as {absent[0]} is not installed" if absent else ""


def check_shardings(request: str, avals: Sequence[Any]) -> None:
    """Raise UnknownShardings if values may be sharded over mesh axes that types do not mention.

    These are `Auto` axes, of the mesh of an argument or of the current mesh. `request` names the
    user's request in the error.
    """
    meshes = (*(a.sharding.mesh for a in avals), jax.sharding.get_abstract_mesh())
    for mesh in meshes:
        if axes := auto_axes(mesh):
            raise UnknownShardings(
                request,
                f"the budget limits the bytes of each device, but inside jit nothing says how "
                f"values are sharded over a mesh with Auto axes {axes}",
                frame(),
                "give the budget to xform.jit of the whole step, which asks the compiler; or make "
                "the axes Explicit",
            )
