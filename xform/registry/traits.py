"""Traits: the properties of a primitive besides its derivative.

Traits say how the compiler treats an equation of the primitive, what the equation costs, and which
rewrites of a program are allowed. They are part of the primitive's rule, so
`table.traits(eqn.primitive)` returns them.

Terms: the *operands* of an equation are its inputs. A *movement* copies elements without computing,
like a transpose. A *call* is an equation that runs a program, such as `jit`. A *remat region* is a
function under `jax.checkpoint`. A *minimum cut* and a *budget* are policies: they decide which
values a backward pass saves and which equations it recomputes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Literal

from xform._jax import JaxprEqn, Primitive, jaxprs_of
from xform.program.ir import Program, trace
from xform.registry.dependence import (
    ELEMENTWISE_DEPENDENCE,
    MOVEMENT_DEPENDENCE,
    Dependence,
    Elementwise,
    by_ends,
)
from xform.registry.ends import Ends, EndsRule, all_mixed, all_stay, reduced

Count = Callable[[JaxprEqn], float]
# Traits that `Traits.named` leaves out.
_WITHOUT_WORDS = frozenset((
    "reshapes", "adds", "linear_in", "neutral", "counts", "label", "product", "result_shape",
    "part_shape", "dependence", "ends",
))  # fmt: skip


def none(eqn: JaxprEqn) -> float:
    """Return 0, as `flops` or `bytes` of a primitive that takes no FLOPs or moves no bytes."""
    return 0.0


@dataclasses.dataclass(frozen=True)
class Traits:
    """The properties of a primitive besides its derivative.

    A minimum cut and a budget do not choose to recompute equations that are `random`, `collective`
    or `foreign`. Such an equation is recomputed only if a policy that decides about one value at a
    time, such as `save_nothing`, does not save its result. The policy of a remat region may be of
    this kind. An equation that is not `repeatable` is never recomputed, under any policy.

    Attributes:
      fusion: how XLA fuses the equation with its neighbours: as an "elementwise" operation, a
        "movement" or a "reduction". "" if XLA runs it on its own, such as a matrix product.
      view: whether the result is the operand, reshaped or repeated, such as by `broadcast_in_dim`.
        A view is never saved, because it costs nothing to make from its operand.
      identity: whether the result equals the operand. Such a primitive attaches information to a
        value: a name, a sharding, or that no derivative passes.
      reshapes: whether the result has the elements of operand 0 in the same row-major order; or a
        function from an equation to that.
      adds: whether the result is operand 0 with sums added, as for scatter-add.
      linear_in: the operands in which a pointwise primitive is linear, together. Other rules know
        it from their kind: see `Rule.linear_groups`.
      pools: whether the primitive reduces many windows of the operand to one element each.
      expensive: whether the operation costs so much for each element that XLA does not duplicate
        it into every reader of the result. For example `exp`.
      repeatable: whether a second run of an equation with equal operands gives equal results and
        does nothing that must happen once; or a function from an equation to that. Effects need no
        trait: JAX knows them. `registry.repeatable` takes them and nested programs into account.
      pure: whether an earlier equation with equal operands and parameters may replace this one.
        False for primitives that keep the compiler from merging values, such as barriers. An
        equation that is not repeatable is never replaced either.
      foldable: whether an equation whose operands are known may be evaluated at trace time, if it
        is not a call. `folds` takes calls into account.
      random: whether the primitive draws random numbers or makes keys.
      collective: whether the primitive communicates between the devices of a mesh.
      foreign: whether the primitive is a kernel, a callback or a transfer, which the compiler
        cannot analyze.
      result_shape: the name of the parameter that holds the shape of the result; "" if none does.
      part_shape: the name of the parameter that holds the shape of a part of operand 0, which the
        primitive reads or which ends there; "" if none does.
      neutral: for a binary operation with a neutral element, that number and the positions of the
        operands that may be it. For a difference they are 0 and operand 1.
      counts: for a primitive whose result has the numbers 0, 1, ... along an axis, the name of the
        parameter that holds the axis; else "".
      label: for a primitive that names its operand, as `checkpoint_name` does, the name of the
        parameter that holds the name; else "".
      product: "matrix" for a product of matrices and "convolution" for a convolution; else "".
      call: for a call, the name of the parameter that holds the called program; else "".
      calls: what the primitive does besides running its program. "": nothing more. "custom": it
        has its own derivative. "region": it is a remat region. "mark": it says how or where to run
        the program, as `compute_on` does.
      flops: a function from an equation to its FLOPs. None: a call has the FLOPs of its program, a
        movement 0, a reduction one for each element of the operand, and any other equation one for
        each element of the results.
      bytes: a function from an equation to the bytes of memory traffic that recomputing it costs.
        None: the bytes of the operands for a reduction, else the bytes of the results.
      lowered: a function from an equation to the `Program` that JAX gives to XLA in place of the
        equation on CPUs and GPUs. The function returns None if that program is unknown. None: the
        primitive is a single XLA operation, or XLA cannot analyze it.
      dependence: on which elements of the operands each element of the result depends. None: on all
        elements of each operand that the primitive has a derivative in.
    """

    fusion: Literal["elementwise", "movement", "reduction", ""] = ""
    view: bool = False
    identity: bool = False
    reshapes: bool | Callable[[JaxprEqn], bool] = False
    adds: bool = False
    linear_in: tuple[int, ...] = ()
    pools: bool = False
    expensive: bool = False
    repeatable: bool | Callable[[JaxprEqn], bool] = True
    pure: bool = True
    foldable: bool = True
    random: bool = False
    collective: bool = False
    foreign: bool = False
    result_shape: str = ""
    part_shape: str = ""
    neutral: tuple[float, tuple[int, ...]] | None = dataclasses.field(default=None, compare=False)
    counts: str = ""
    label: str = ""
    product: Literal["", "matrix", "convolution"] = ""
    call: str = ""
    calls: Literal["", "custom", "region", "mark"] = ""
    flops: Count | None = dataclasses.field(default=None, compare=False)
    bytes: Count | None = dataclasses.field(default=None, compare=False)
    lowered: Callable[[JaxprEqn], Any] | None = dataclasses.field(default=None, compare=False)
    dependence: Dependence | None = dataclasses.field(default=None, compare=False)
    ends: EndsRule | None = dataclasses.field(default=None, compare=False)

    def axis_ends(self, eqn: JaxprEqn) -> list[Ends]:
        """Return for each operand of an equation how each of its axes ends."""
        if self.ends is not None:
            return self.ends(eqn)
        same_indices = self.fusion == "elementwise" or isinstance(self.dependence, Elementwise)
        return all_stay(eqn) if same_indices or self.identity else all_mixed(eqn)

    @property
    def sums_operands(self) -> bool:
        """Whether the result is the sum of two operands."""
        return self.neutral == (0, (0, 1))

    @property
    def converts(self) -> bool:
        """Whether each element is copied to its place, perhaps as another dtype."""
        in_place = isinstance(self.dependence, Elementwise) and self.pure and not self.identity
        return in_place and self.fusion == "movement"

    @property
    def folds(self) -> bool:
        """Whether an equation with known operands may be evaluated at trace time. No call may."""
        return self.foldable and not (self.call or self.calls)

    @property
    def fusible(self) -> bool:
        """Whether XLA fuses the equation with the readers of its result."""
        return bool(self.fusion)

    @property
    def recomputable(self) -> bool:
        """Whether a minimum cut or a budget may recompute the equation if it is repeatable."""
        return not (self.collective or self.foreign)

    @property
    def named(self) -> list[str]:
        """The traits that differ from their defaults, as words for the table of `xform rules`.

        For example `["elementwise", "expensive"]`. Traits of axes and elements are left out.
        """
        default = Traits()
        words: list[str] = [self.fusion] if self.fusion else []
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if field.name in _WITHOUT_WORDS or value == getattr(default, field.name):
                continue
            if isinstance(value, str):
                words.append(f"{field.name}={value}")
            elif isinstance(value, bool):
                words.append(field.name if value else f"not {field.name}")
            else:
                words.append(f"own {field.name}")
        return words


def with_ends(traits: Traits, ends: EndsRule) -> Traits:
    """Return traits that say how axes end, with the dependence that follows from it."""
    return dataclasses.replace(traits, ends=ends, dependence=by_ends(ends))


def implementation(eqn: JaxprEqn) -> Program | None:
    """Return the program of a primitive's own implementation, or None if it cannot be traced.

    A library often gives XLA the same program. For example, it is empty for an identity that checks
    something while JAX traces.
    """
    run = lambda *xs: eqn.primitive.impl(*xs, **eqn.params)
    results = run if eqn.primitive.multiple_results else lambda *xs: [run(*xs)]
    try:
        prog = trace(results, *(v.aval for v in eqn.invars))
    except Exception:  # the code of another library, which may raise any error
        return None
    return None if _binds(prog.equations, eqn.primitive) else prog


def _binds(eqns: Iterable[JaxprEqn], primitive: Primitive) -> bool:
    """Return whether equations, or equations nested in them, are of a primitive."""
    nested = lambda eqn: (x for jaxpr in jaxprs_of(eqn) for x in jaxpr.eqns)
    return any(eqn.primitive is primitive or _binds(nested(eqn), primitive) for eqn in eqns)


# Traits of a primitive without a rule: XLA does not fuse it, and it is never evaluated at trace
# time.
UNKNOWN = Traits(foldable=False, lowered=implementation)
PLAIN = Traits()  # all defaults: XLA runs the equation on its own
ELEMENTWISE = Traits("elementwise", dependence=ELEMENTWISE_DEPENDENCE)
EXPENSIVE = Traits("elementwise", expensive=True, dependence=ELEMENTWISE_DEPENDENCE)
MOVEMENT = Traits("movement", dependence=MOVEMENT_DEPENDENCE)
VIEW = Traits("movement", view=True, dependence=MOVEMENT_DEPENDENCE)
# A conversion of the dtype: no FLOPs, like a movement, but each element stays in its place.
CONVERSION = Traits("movement", dependence=ELEMENTWISE_DEPENDENCE)
# A reduction over the axes in the parameter `axes`.
REDUCTION = Traits("reduction", ends=reduced)
# An identity that attaches a sharding or a layout. It takes no FLOPs, and XLA runs no loop for it.
MARK = Traits(identity=True, flops=none, dependence=ELEMENTWISE_DEPENDENCE)
# No FLOPs, and not fused: for example the index of a device on a mesh.
UNFUSED = Traits(flops=none)
COLLECTIVE = Traits(collective=True)
# A collective that computes nothing, such as `all_gather`.
EXCHANGE = Traits(collective=True, flops=none)
FOREIGN = Traits(foreign=True, foldable=False)
