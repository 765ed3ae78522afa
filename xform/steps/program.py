"""`StepProgram`: a step that JAX traces, compiles and runs under different plans."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax

from xform._jax import Tracer, jit
from xform.memory.compilation import compile_for, report_of, trace_for
from xform.memory.executable import compile_here
from xform.memory.lowering import device_count, has_symbols, lower_traced
from xform.memory.report import MemoryReport
from xform.memory.targets import Target
from xform.planner.planning import default_policy, use_default_policy
from xform.policies import Policy
from xform.transforms.recorded import Chosen, ChosenPolicy, Recorded, recorded

Args = Sequence[Any]
Kwargs = Mapping[str, Any]

_UNTUNED = {"xla_gpu_autotune_level": 0}
# The step that is traced under some plans; None: no step may be traced.
_TRACED: contextvars.ContextVar[Chosen | None] = contextvars.ContextVar("traced", default=None)


class NotPlanned(Exception):
    """JAX traces a step for arguments that no plan was made for."""


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledStep:
    """A compiled step.

    Attributes:
      lowered: JAX's `Lowered` object; None for a target whose devices are not here.
      executable: JAX's `Compiled` object; None if the compiler refused the step, or for a target
        whose devices are not here.
      compilation: the compiler's figures.
    """

    lowered: Any
    executable: Any
    compilation: MemoryReport


class StepProgram:
    """A step as JAX compiles it for a target.

    Args:
      f: the step.
      options: the options of `jax.jit`.
      target: the devices to compile for.
    """

    def __init__(self, f: Callable[..., Any], options: Mapping[str, Any], target: Target):
        @functools.wraps(f)
        def step(*args: Any, **kwargs: Any) -> Any:
            if not isinstance(default_policy(), ChosenPolicy):
                return f(*args, **kwargs)
            if (chosen := _TRACED.get()) is None:
                raise NotPlanned
            traced = [x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, Tracer)]
            return jax.tree.unflatten(chosen.recorded.out_tree, chosen.run(*traced))

        self.jitted: Any = jit(step, **options)
        self.target = target

    @property
    def autotunes(self) -> bool:
        """Whether the compiler runs parts of a program on the device to choose among kernels.

        This takes memory of the device and most of the time of a compilation. It hardly changes the
        bytes of the program: by 0.001% in a GPT-2 and a Llama on an H100.
        """
        return self.target.local and self.target.backend == "gpu"

    def record(self, default: Policy, has_budget: bool, args: Args, kwargs: Kwargs) -> Recorded:
        """Trace the step once, with derivatives whose plans are chosen later, see `recorded`."""

        def trace_once(policy: Policy) -> tuple[Any, Any]:
            traced = self._trace(args, kwargs)
            return traced.jaxpr, jax.tree.structure(traced.out_info)

        return recorded(default, has_budget, trace_once)

    def trace(self, chosen: Chosen, args: Args, kwargs: Kwargs) -> Any:
        """Return JAX's `Traced` object of the recorded step under some plans."""
        with _tracing(chosen):
            return self._trace(args, kwargs)

    def _trace(self, args: Args, kwargs: Kwargs) -> Any:
        if self.target.local:
            return self.jitted.trace(*args, **kwargs)
        return trace_for(self.jitted, args, kwargs, self.target)

    def compile(
        self, chosen: Chosen, args: Args, kwargs: Kwargs, autotune: bool = True
    ) -> CompiledStep:
        """Compile the step under some plans. JAX keeps the program, so a call runs it.

        Without `autotune`, nothing runs on the device, and a call compiles again if the backend
        autotunes.
        """
        if not self.target.local:
            with _tracing(chosen):
                figures = compile_for(self.jitted, args, kwargs, self.target)
            return CompiledStep(None, None, figures)
        return self.compile_traced(chosen, self.trace(chosen, args, kwargs), autotune)

    def compile_traced(self, chosen: Chosen, traced: Any, autotune: bool = True) -> CompiledStep:
        """Compile a step that was traced under some plans, for devices of this process."""
        with use_default_policy(chosen.policy):
            lowered, symbolic = traced.lower(), has_symbols(traced)
            options = _UNTUNED if self.autotunes and not autotune else None
            # With symbolic dimensions, it is compiled for one size of each, only for the figures.
            known = lower_traced(traced, self.target.platform) if symbolic else lowered
            executable, answer = compile_here(known, options)
        devices = device_count(lowered)
        figures = report_of(traced.fun_name, self.target, devices, answer, traced.jaxpr)
        return CompiledStep(lowered, None if symbolic else executable, figures)

    def run(self, chosen: Chosen, args: Args, kwargs: Kwargs) -> Any:
        """Call the step under some plans.

        Raises:
          NotPlanned: JAX would have to trace it, as it was not compiled for these arguments.
        """
        with use_default_policy(chosen.policy):
            return self.jitted(*args, **kwargs)


@contextlib.contextmanager
def _tracing(chosen: Chosen) -> Generator[None]:
    """A context in which a step is traced under some plans; see `NotPlanned`."""
    token = _TRACED.set(chosen)
    try:
        with use_default_policy(chosen.policy):
            yield
    finally:
        _TRACED.reset(token)
