"""Every exception of xform, with the text of its message.

A message has four parts: what was asked, what blocks it, where in the user's code, what to do. An
error is also an instance of the type that JAX raises in the same place, so that code which catches
`TypeError` or `ValueError` keeps working.
"""

from __future__ import annotations

from typing import Any

from jax.errors import ConcretizationTypeError, TracerArrayConversionError


class XformError(Exception):
    """Base of all errors of xform.

    Args:
      asked: what the caller asked for.
      blocked: what stands in the way.
      where: the place in the user's code, `file:line (function)`; empty when there is none.
      remedy: what to do about it.
    """

    def __init__(self, asked: str, blocked: str, where: str, remedy: str):
        self.asked, self.blocked, self.where, self.remedy = asked, blocked, where, remedy
        lines = [asked, f"  problem: {blocked}"]
        if where:
            lines.append(f"  where:   {where}")
        # Not by `super`: JAX's types make a text of their own, of a tracer.
        Exception.__init__(self, "\n".join([*lines, f"  remedy:  {remedy}"]))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.asked, self.blocked, self.where, self.remedy)

    def at(self, where: str) -> XformError:
        """The same error, at a place."""
        return type(self)(self.asked, self.blocked, where, self.remedy)


class MissingRule(XformError, NotImplementedError):
    """A primitive has no rule."""


class UnsupportedParam(XformError, NotImplementedError):
    """A primitive carries a parameter that its rule does not know."""


class NotDifferentiable(XformError, TypeError, ValueError):
    """The derivative that was asked for does not exist, or not in this mode."""


class DerivativeLost(XformError, ConcretizationTypeError, TracerArrayConversionError):
    """A value that is being differentiated was made a number, which carries no derivative."""


class WrongCotangent(XformError, TypeError, ValueError):
    """A cotangent does not have the type or the tree of the value it belongs to."""


class WrongTangent(XformError, TypeError, ValueError):
    """A tangent does not have the type or the tree of its primal."""


class NotScalar(XformError, TypeError):
    """`grad` was asked for the gradient of something that is not a scalar."""


class WrongDtype(XformError, TypeError):
    """An input or output has a dtype that cannot be differentiated as asked."""


class WrongArgument(XformError, TypeError, ValueError):
    """An argument of a transform itself is unusable."""


class NotOneDerivative(WrongArgument):
    """A function differentiates nothing under its argument `policy`, or several functions."""


class UnknownShardings(WrongArgument):
    """A budget is for each device, and nothing says how values lie on the devices."""


class NotLinear(XformError, TypeError, NotImplementedError):
    """`linear_transpose` was given a function that is not linear."""


class WrongRule(XformError, AssertionError):
    """A declared rule contradicts itself or the primitive it is for."""


class BudgetInfeasible(XformError, ValueError):
    """No plan fits a budget.

    Attributes:
      floor_bytes: what the plan with the fewest bytes takes.
    """

    def __init__(self, asked: str, blocked: str, where: str, remedy: str, floor_bytes: int = 0):
        super().__init__(asked, blocked, where, remedy)
        self.floor_bytes = floor_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.asked, self.blocked, self.where, self.remedy, self.floor_bytes)


class NotSolved(XformError, RuntimeError):
    """A solver stopped before it was sure of what was asked for."""


class OtherProgram(XformError, ValueError):
    """A plan was made for another program."""


class MissingExtra(XformError, ImportError):
    """Something that xform can do without, and was asked for, is not installed."""


class CompilationFailed(XformError, RuntimeError):
    """The compiler of a target failed, or was stopped."""


class FailedFunction(XformError):
    """A function that was named on the command line, or what gives its inputs, failed."""


class FileNotWritten(XformError, OSError):
    """A file that was asked for cannot be written."""


class BrokenPass(XformError, AssertionError):
    """A pass made something that is no program, or one of other types or effects."""
