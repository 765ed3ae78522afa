"""`StepProgram`: a step that JAX traces, compiles and runs under different plans."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax

from xform.memory.answers import Answer
from xform.memory.compilation import Compilation, compilation_of, compile_for, trace_for
from xform.memory.executable import executable_answer
from xform.memory.targets import Target
from xform.planner.planning import use_default_policy
from xform.planner.problem import Problem
from xform.steps.derivatives import Decisions, follow, in_step

Args = Sequence[Any]
Kwargs = Mapping[str, Any]

_TRACING = contextvars.ContextVar("xform_step_tracing", default=False)


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
    compilation: Compilation


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
            if in_step() and not _TRACING.get():
                raise NotPlanned
            return f(*args, **kwargs)

        self.jitted: Any = jax.jit(step, **options)
        self.target = target

    def trace(
        self, decisions: Decisions, args: Args, kwargs: Kwargs
    ) -> tuple[Any, dict[str, Problem]]:
        """Trace the step; return JAX's `Traced` object and the derivatives that the trace met.

        With `decisions.retrace`, these are all derivatives without a policy of their own.
        """
        seen: dict[str, Problem] = {}
        with _tracing(decisions, seen):
            if self.target.local:
                return self.jitted.trace(*args, **kwargs), seen
            return trace_for(self.jitted, args, kwargs, self.target), seen

    def compile(self, decisions: Decisions, args: Args, kwargs: Kwargs) -> CompiledStep:
        """Compile the step under some plans. JAX keeps the program, so a call runs it."""
        if not self.target.local:
            with _tracing(decisions):
                figures = compile_for(self.jitted, args, kwargs, self.target)
            return CompiledStep(None, None, figures)
        traced, _ = self.trace(decisions, args, kwargs)
        executable = None
        with follow(decisions):
            lowered = traced.lower()
            start = time.perf_counter()
            try:
                executable = lowered.compile()
                answer = executable_answer(executable, time.perf_counter() - start)
            except jax.errors.JaxRuntimeError as error:
                answer = Answer({}, time.perf_counter() - start, None, str(error))
        figures = compilation_of(traced.fun_name, self.target, 1, answer, traced.jaxpr)
        return CompiledStep(lowered, executable, figures)

    def run(self, decisions: Decisions, args: Args, kwargs: Kwargs) -> Any:
        """Call the step under some plans.

        Raises:
          NotPlanned: JAX would have to trace it, as it was not compiled for these arguments.
        """
        with use_default_policy(decisions):
            return self.jitted(*args, **kwargs)


@contextlib.contextmanager
def _tracing(decisions: Decisions, seen: dict[str, Problem] | None = None) -> Generator[None]:
    """A context like `follow`, in which a step may be traced; see `NotPlanned`."""
    token = _TRACING.set(True)
    try:
        with follow(decisions, seen):
            yield
    finally:
        _TRACING.reset(token)
