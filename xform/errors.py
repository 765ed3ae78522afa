"""The exceptions of xform.

A message has four parts: the request, the problem, the line of the user's code, the remedy. An
exception is also an instance of the type that JAX raises in the same situation, such as
`TypeError`. So code that catches JAX's exceptions catches xform's too.
"""

from __future__ import annotations

from typing import Any

from jax.errors import ConcretizationTypeError, TracerArrayConversionError


class XformError(Exception):
    """The base class of all errors of xform.

    Args:
      request: what the user asked for, such as "derivative of sort".
      problem: why it cannot be done.
      where: the line of the user's code, as `file:line (function)`; "" if unknown.
      remedy: what to do about it.
    """

    def __init__(self, request: str, problem: str, where: str, remedy: str):
        self.request, self.problem, self.where, self.remedy = request, problem, where, remedy
        lines = [request, f"  problem: {problem}"]
        if where:
            lines.append(f"  where:   {where}")
        # Not `super().__init__`: JAX's exception types take a tracer and build their own text.
        Exception.__init__(self, "\n".join([*lines, f"  remedy:  {remedy}"]))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.request, self.problem, self.where, self.remedy)

    def at(self, where: str) -> XformError:
        """Return the same error with another `where`."""
        return type(self)(self.request, self.problem, where, self.remedy)


class MissingRule(XformError, NotImplementedError):
    """A primitive has no derivative rule."""


class UnsupportedParam(XformError, NotImplementedError):
    """A primitive has a parameter value that its derivative rule does not support."""


class NotDifferentiable(XformError, TypeError, ValueError):
    """The requested derivative does not exist, or not in this mode (forward or reverse)."""


class NoForwardMode(NotDifferentiable):
    """A `custom_vjp` function was differentiated in forward mode."""


class DerivativeLost(XformError, ConcretizationTypeError, TracerArrayConversionError):
    """A value under differentiation was converted to a number, which loses its derivative."""


class WrongCotangent(XformError, TypeError, ValueError):
    """A cotangent does not have the type or the tree structure of its primal."""


class WrongTangent(XformError, TypeError, ValueError):
    """A tangent does not have the type or the tree structure of its primal."""


class NotScalar(XformError, TypeError):
    """The function that `grad` differentiates does not return a scalar."""


class WrongDtype(XformError, TypeError):
    """An input or output has a dtype that the requested derivative does not support."""


class WrongArgument(XformError, TypeError, ValueError):
    """An argument of a transform is invalid."""


class UnknownShardings(WrongArgument):
    """A budget counts bytes on each device, but the sharding of the values is unknown."""


class NotLinear(XformError, TypeError, NotImplementedError):
    """`linear_transpose` was given a function that is not linear."""


class WrongRule(XformError, AssertionError):
    """A declared derivative rule contradicts itself or its primitive."""


class BudgetInfeasible(XformError, ValueError):
    """No plan, that is no choice of the values that the backward pass saves, fits the budget.

    Attributes:
      floor_bytes: bytes of the plan with the lowest memory, the smallest budget that can be met.
    """

    def __init__(self, request: str, problem: str, where: str, remedy: str, floor_bytes: int = 0):
        super().__init__(request, problem, where, remedy)
        self.floor_bytes = floor_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.request, self.problem, self.where, self.remedy, self.floor_bytes)


class NotSolved(XformError, RuntimeError):
    """A solver of an optimization problem stopped before it proved its result."""


class CoupledUpdate(XformError, ValueError):
    """An optimizer needs the gradients of several parameters to update one of them.

    So `fused_update` cannot update a parameter before all of these gradients exist.
    """


class OtherProgram(XformError, ValueError):
    """A saved plan was made for another program than the one that it is used for."""


class MissingExtra(XformError, ImportError):
    """An optional dependency that the request needs is not installed."""


class CompilationFailed(XformError, RuntimeError):
    """The compiler for a target failed, or was stopped."""


class FailedFunction(XformError):
    """A function named on the command line, or the function that makes its arguments, failed."""


class FileNotWritten(XformError, OSError):
    """A requested output file cannot be written."""


class BrokenPass(XformError, AssertionError):
    """A program pass returned an invalid program, or one with other types or effects."""
