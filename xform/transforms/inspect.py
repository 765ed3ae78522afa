"""`residuals`: the values that a backward pass saves, as a table.

`derivative_at` traces the derivative of a function at given types. `plan` uses it too.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.tree_util import keystr

from xform._jax import JaxprEqn, jaxprs_of
from xform.errors import NotScalar
from xform.interpret.emit import pass_name
from xform.interpret.node import gather, spread
from xform.introspection.argnums import positions
from xform.introspection.callables import (
    argument_names,
    check_callable,
    definition_site,
    function_name,
)
from xform.introspection.modules import is_array_or_type
from xform.modules import with_arrays
from xform.modules.loss_call import LossCall
from xform.planner.candidate import Candidate
from xform.planner.device import resolve_fit
from xform.planner.idle_regions import warn_of_idle_regions
from xform.planner.plan_program import plan_program
from xform.planner.problem import Problem
from xform.planner.report.residuals import ResidualTable, residuals_of
from xform.policies import min_cut, parse, policy_name
from xform.policies.per_value import NamePolicy
from xform.policies.unused_names import warn_of_unused_names
from xform.program.ir import Program
from xform.program.source import user_stacklevel
from xform.transforms.compiling import compiler_for
from xform.transforms.function import (
    Function,
    Tree,
    bind_others,
    function_call,
    trace_function,
)
from xform.transforms.reverse import Policy


def residuals(
    f: Callable[..., Any],
    *args: Tree,
    policy: Policy = None,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
) -> ResidualTable:
    """List the values that `xform.vjp(f, *args, policy=policy)` saves for its backward pass.

    Args:
      f: pure function of pytrees of arrays, or a function of Flax NNX modules.
      *args: arrays, or `jax.ShapeDtypeStruct`s in pytrees; nothing is run or allocated.
      policy: a policy of `xform.policies` or `jax.checkpoint_policies`, or its text, such as
        "save_dots"; None is `min_cut`, the default under `jit`.
      argnums: position or positions of the arguments to differentiate, as for `grad`; all others
        may be any Python object. None differentiates every argument. The default is None, not 0 as
        for `grad`, because the table lists what `vjp` saves, and `vjp` differentiates them all.
      has_aux: whether `f` returns a pair `(output, auxiliary)`; the second is not differentiated.

    Returns:
      A `ResidualTable` that prints and iterates over rows. A row has the type, the bytes
      times the trip count, the operation, the user's line (also inside loop bodies and calls), and
      the reason. Rows are sorted by size. `total_bytes` counts the saved values. Arguments that the
      backward pass reads are not copied, and `argument_bytes` counts them. Bytes are those on each
      device, in a compiled function. Values on a mesh of `Auto` axes count with their unsharded
      size, because their types do not say how they are sharded.

    Raises:
      MissingRule: a primitive in `f` has no rule.
      WrongArgument: `f` is not callable, or `argnums` or `policy` is unusable.

    Cost: one trace of `f` and its derivative.

    >>> def loss(w, x):
    ...     step = lambda h, w: (jnp.sin(h @ w), None)
    ...     return jax.lax.scan(step, x, w)[0].sum()
    >>> w = jax.ShapeDtypeStruct((12, 64, 64), jnp.float32)
    >>> x = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    >>> kept = xform.residuals(loss, w, x)
    >>> [(row.type, row.trips, row.operation, row.kind) for row in kept]
    [('float32[32,64]', 12, 'cos', 'kept'), ('float32[32,64]', 12, 'sin', 'carry'),
     ('float32[12,64,64]', 1, 'w', 'argument')]
    >>> kept.total_bytes, kept.argument_bytes
    (196608, 196608)
    """
    by = parse(min_cut if policy is None else policy)
    at = derivative_at("residuals", f, args, argnums, has_aux)
    warn_of_unused_names(by, at.problem.marked, at.name)
    warn_of_idle_regions(by, at.problem, at.name)
    title = f"kept for the backward pass of {at.name}, {policy_name(resolve_fit(by))}"
    table = residuals_of(at.planned(by).schedule, at.inputs, title)
    if isinstance(by, NamePolicy) and by.offloaded and not table.offloaded_bytes:
        warnings.warn(f"{policy_name(by)} offloads nothing: the backward pass of {at.name} reads "
                      "no value with these names", stacklevel=user_stacklevel())  # fmt: skip
    return table


class FlatArguments:
    """The leaves of a function's arguments.

    Some of them are arrays, or types of arrays, which are inputs when the function is traced. The
    others may be any Python objects. `paths` has each leaf with its path in the tree.
    """

    def __init__(self, args: Sequence[Tree]):
        self.paths, self._tree = jax.tree.flatten_with_path(tuple(args))
        self._traced = tuple(is_array_or_type(x) for _, x in self.paths)

    def arrays(self) -> list[Any]:
        """Return the leaves that are arrays or types of arrays."""
        return gather([x for _, x in self.paths], self._traced)

    def replace_arrays(self, arrays: Sequence[Any]) -> tuple[list[Any], tuple[Tree, ...]]:
        """Return the leaves, and the arguments, with new values in place of the arrays."""
        triples = zip(spread(arrays, self._traced), self.paths, self._traced, strict=True)
        leaves = [new if traced else x for new, (_, x), traced in triples]
        return leaves, jax.tree.unflatten(self._tree, leaves)

    def indices(self, positions: Sequence[int]) -> tuple[int, ...]:
        """Return the indices in `arrays()` that belong to the arguments at some positions."""
        owners = gather([path[0].idx for path, _ in self.paths], self._traced)
        return tuple(i for i, owner in enumerate(owners) if owner in positions)


@dataclasses.dataclass(frozen=True, eq=False)
class TracedDerivative:
    """The derivative of a function at a point, as `grad` would plan it under `jit`.

    Attributes:
      function: the traced function.
      inputs: the names of the inputs of its program.
      sources: an entry for each input of its program, first the values that the function closes
        over. For a leaf of the arguments it is the leaf's index, and else the value itself.
    """

    function: Function
    inputs: list[str]
    sources: list[Any]

    @property
    def problem(self) -> Problem:
        """Return the derivative as a planning problem."""
        return self.function.problem

    def planned(self, policy: Policy) -> Candidate:
        """Plan the derivative under a policy."""
        pairs = zip(self.sources, self.function.program.in_avals, strict=True)
        args = [aval if isinstance(x, int) else x for x, aval in pairs]
        transform = "grad" if self.function.signature.is_scalar else "vjp"
        compiler = compiler_for(self.function, args, policy, transform)
        return plan_program(self.problem, policy, compiler)

    @property
    def name(self) -> str:
        """Return the name of the function."""
        return self.function.signature.name


def derivative_at(
    caller: str,
    f: Callable[..., Any],
    args: Sequence[Tree],
    argnums: int | Sequence[int] | None,
    has_aux: bool,
) -> TracedDerivative:
    """Trace `f` at arrays, or their types, and return its derivative there. Nothing is run.

    `caller` is the transform, for messages. The other arguments are those of `residuals`.
    """
    check_callable(f, caller)
    call = with_arrays(LossCall(f, args, argnums, has_aux), caller)
    f, args, argnums, has_aux = call.f, call.args, call.argnums, call.has_aux
    differentiated = None if argnums is None else positions(argnums, len(args), caller)
    arguments = FlatArguments(args)
    names = argument_names(f, len(args))
    leaf_names = [names[path[0].idx] + keystr(path[1:]) for path, _ in arguments.paths]
    traced: list[TracedDerivative] = []

    @functools.wraps(f, updated=())
    def run(*arrays: Any) -> None:
        leaves, full = arguments.replace_arrays(arrays)
        if differentiated is None:
            bound, primals, argument_of = f, full, range(len(args))
        else:
            bound, primals = bind_others(f, differentiated, full, {})
            argument_of = differentiated
        call = function_call(bound, primals, caller, has_aux)
        fun, flat = trace_function(call, inline=True)
        index_of_id = {id(x): i for i, x in enumerate(leaves)}
        sources = [index_of_id.get(id(x), x) for x in (*flat[: fun.n_consts], *call.leaves)]
        consts = [leaf_names[x] if isinstance(x, int) else "closed over"
                  for x in sources[: fun.n_consts]]  # fmt: skip
        primal = jax.tree.flatten_with_path(jax.tree.unflatten(call.in_tree, call.args))[0]
        inputs = [names[argument_of[path[0].idx]] + keystr(path[1:]) for path, _ in primal]
        traced.append(TracedDerivative(fun, [*consts, *inputs], sources))

    jax.eval_shape(run, *arguments.arrays())
    (point,) = traced
    if argnums is not None and not point.function.signature.is_scalar:
        _check_loss(caller, f, point.function.program)
    return point


# What to pass instead of a function that takes a derivative itself.
SUBJECT = (
    "pass the loss, which returns a scalar; for a whole training step, pass xform.jit(step) (on a "
    "command line --transform jit)"
)


def _check_loss(caller: str, f: Callable[..., Any], prog: Program) -> None:
    """Raise NotScalar if a function takes a derivative itself, such as a training step."""
    if not _takes_derivative(prog.equations):
        return
    raise NotScalar(
        f"{caller} of {function_name(f)}",
        "it takes a derivative itself and returns no scalar, so it is a step, not a loss",
        definition_site(f),
        f"{SUBJECT}; to differentiate all of its outputs once more, pass argnums=None",
    )


def _takes_derivative(equations: Iterable[JaxprEqn]) -> bool:
    """Return whether an equation, or a nested one, is in the backward pass of a derivative."""
    return any(
        pass_name(str(eqn.source_info.name_stack))
        or any(_takes_derivative(jaxpr.eqns) for jaxpr in jaxprs_of(eqn))
        for eqn in equations
    )
