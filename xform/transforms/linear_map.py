"""The results of `vjp` and `linearize`: linear maps that are pytrees of residuals.

Because they are pytrees, jitted functions may return them, `vmap` may batch them, and loops may
carry them. A linear map has two parts: its arrays, which are the leaves of the pytree, and a
runner, which computes the map from these arrays. Its seeds are the values that it is called with:
cotangents of a function's outputs for `vjp`, and tangents of its inputs for `linearize`.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any, Self

import jax

from xform._jax import cotangent_aval, is_reference, staging, tangent_aval
from xform.errors import WrongCotangent
from xform.interpret import emit
from xform.interpret.activity import path
from xform.interpret.joint import Schedule
from xform.interpret.logs import collect_logs, log_without
from xform.interpret.node import gather, spread
from xform.program.arithmetic import (
    Value,
    as_jax_values,
    float0_zeros,
)
from xform.program.arrays import zeros
from xform.program.ir import Mask, seldom_collected
from xform.transforms.function import Function, Signature, Tree
from xform.transforms.gradient_refs import reference_argument_error, with_refs
from xform.transforms.prefix import mirrored
from xform.transforms.residuals import Primals, PullbackResiduals, split_residuals
from xform.transforms.seeds import check_cotangent, check_tangents


class LinearRunner(abc.ABC):
    """Computes a linear map from its arrays, which are passed to `run`.

    As long as nobody needs the arrays as a pytree, a runner may hold them itself. It then ignores
    the argument `arrays` of `run`; `with_explicit_arrays` returns a runner that reads them.
    """

    @abc.abstractmethod
    def run(self, arrays: Any, seeds: Sequence[Value]) -> list[Value]:
        """Return the results of the map; None is zero, also in `seeds`.

        A pullback maps cotangents of the outputs, `seeds`, to one result for each primal. A
        pushforward maps tangents of the primals to one result for each output.
        """

    @abc.abstractmethod
    def active_outputs(self) -> Mask:
        """Return which outputs depend on a differentiated input."""

    def with_explicit_arrays(self, arrays: Any) -> tuple[LinearRunner, Any]:
        """Return a runner for the same map that reads all values from its arrays, and the arrays.

        `arrays` are the arrays of this runner.
        """
        return self, arrays


class PlannedRunner(LinearRunner):
    """Runs the backward part of a function that was traced and planned.

    A Joint (`interpret/joint.py`) is the forward and the backward part of a function as one
    program. Its Schedule says which forward values are saved. The arrays of this runner are those
    values, and the inputs that the backward part reads.
    """

    def __init__(self, fun: Function, schedule: Schedule, push: bool):
        self.schedule, self._n_consts, self._push = schedule, fun.n_consts, push
        self._program, self._active = fun.program, fun.active()
        self._n_outputs = len(fun.signature.out_avals)

    def active_outputs(self) -> Mask:
        """Return which outputs of the program depend on a differentiated input."""
        return path(self._program, self._active).outputs[: self._n_outputs]

    def arrays(self, kept: list[Any], args: Sequence[Value]) -> Any:
        """Return the arrays, from the saved values of a forward pass and the inputs `args`."""
        return kept, gather(args, self.schedule.reads)

    def run(self, arrays: Any, seeds: Sequence[Value]) -> list[Value]:
        """Run the backward part, and return its results."""
        joint = self.schedule.joint
        seeds = as_jax_values(seeds)
        if self._push:
            padded = [*[None] * self._n_consts, *seeds]
        else:
            padded = [*seeds, *[None] * (len(joint.outputs) - len(seeds))]
        results = self._results(arrays, gather(padded, joint.seeded))
        log_without(joint.logs, "a planned program", "")
        return spread(results, joint.results)[0 if self._push else self._n_consts :]

    def _results(self, arrays: Any, seeds: Sequence[Value]) -> list[Value]:
        """Run the backward part; return its results, None for those that no seed reaches."""
        saved, read_inputs = arrays
        args = spread(read_inputs, self.schedule.reads)
        with seldom_collected(staging()):
            return emit.backward(self.schedule, saved, args, seeds, True, whole=True)


class LinearMap:
    """A linear map: a runner and its arrays, which are the leaves of the pytree."""

    def __init__(self, signature: Signature, runner: LinearRunner, arrays: Any):
        self._signature, self._runner, self._arrays = signature, runner, arrays

    def tree_flatten(self) -> tuple[tuple[Any], tuple[Signature, LinearRunner]]:
        """Return the arrays; everything else is static."""
        self._runner, self._arrays = self._runner.with_explicit_arrays(self._arrays)
        return (self._arrays,), (self._signature, self._runner)

    @classmethod
    def tree_unflatten(cls, static: tuple[Signature, LinearRunner], children: tuple[Any]) -> Self:
        """Return the map with other arrays."""
        return cls(*static, *children)


@jax.tree_util.register_pytree_node_class
class Pullback:
    """The function that `vjp` returns: a linear map whose arrays a user may read and replace.

    It has the attributes of the object that `jax.vjp` returns. Its arrays are the leaves of a
    pytree.

    Attributes:
      in_tree, out_tree: the trees of the arguments and of the output.
      out_nzs: a tree like the output: whether each leaf depends on the arguments.
      args_res: a list like the arguments. It has the arguments that the pullback reads, and
        `NotNeeded()` in place of the others. To drop an argument and to restore it later, assign
        to the list or to its entries.
      opaque_residuals: the other arrays that the pullback reads.
      structured_residuals: always empty. JAX puts the residuals of hijax objects there; xform puts
        their arrays among the opaque ones.
    """

    def __init__(self, signature: Signature, runner: LinearRunner, arrays: Any, primals: Primals):
        self._signature, self._runner = signature, runner
        self._arrays, self._primals = arrays, primals
        self._residuals: PullbackResiduals | None = None
        self._logs = False
        if not all(primals.saveable):
            self._separate()

    def _separate(self) -> PullbackResiduals:
        """Return the arrays, split into arguments and others; from now on they stay split."""
        if self._residuals is None:
            self._runner, arrays = self._runner.with_explicit_arrays(self._arrays)
            self._arrays = None
            self._residuals = split_residuals(arrays, self._primals, self.in_tree)
        return self._residuals

    def __repr__(self) -> str:
        of = self._signature
        return f"<pullback of {of.name}: {of.output_types} -> {of.input_types}>"

    @property
    def in_tree(self) -> Any:
        """The tree of the arguments."""
        return self._signature.in_tree

    @property
    def out_tree(self) -> Any:
        """The tree of the output."""
        return self._signature.out_tree

    @property
    def out_nzs(self) -> Any:
        """Whether each leaf of the output depends on the differentiated arguments."""
        return mirrored(self.out_tree, self._runner.active_outputs())

    @property
    def args_res(self) -> Any:
        """The arguments that the pullback reads, in a list like the arguments."""
        return self._separate().args

    @args_res.setter
    def args_res(self, values: Any) -> None:
        self._separate().args = values

    @property
    def opaque_residuals(self) -> Any:
        """All other arrays that the pullback reads, in a list."""
        return self._separate().opaque

    @opaque_residuals.setter
    def opaque_residuals(self, values: Any) -> None:
        self._separate().opaque = values

    @property
    def structured_residuals(self) -> list[Any]:
        """Always empty: each residual is an argument or opaque."""
        return []

    def tree_flatten(self) -> tuple[tuple[Any, Any], Any]:
        """Return the arrays; everything else is static."""
        residuals = self._separate()
        static = self._signature, self._runner, residuals.tree, residuals.positions, self._logs
        return (residuals.args, residuals.opaque), static

    @classmethod
    def tree_unflatten(cls, static: Any, children: tuple[Any, Any]) -> Pullback:
        """Return the map with other arrays."""
        signature, runner, tree, positions, logs = static
        new = cls(signature, runner, None, Primals((), ()))
        new._residuals, new._logs = PullbackResiduals(tree, positions, *children), logs
        return new

    @property
    def with_logs(self) -> Pullback:
        """Return this map as one that returns a pair: the cotangents, and the logs.

        The logs are a dict with the entries that backward functions of `custom_vjp`s return as
        their log (since JAX 0.11).
        """
        new = copy.copy(self)
        new._logs = True
        return new

    def logged(self, run: Callable[[], Tree]) -> Tree:
        """Run a backward pass; return its result, with its logs if this map returns logs."""
        with collect_logs() as logs:
            result = run()
        return (result, logs.checked(self._signature.name)) if self._logs else result

    def __call__(self, ct: Tree, *more: Any) -> tuple[Tree, ...]:
        """Return cotangents like the primals, from a cotangent like the output."""
        if more:
            raise WrongCotangent(
                f"pullback of {self._signature.name}",
                f"it was called with {1 + len(more)} arguments",
                "",
                "pass one cotangent with the tree of the function's output, such as a tuple",
            )
        return self.logged(lambda: self.in_tree.unflatten(self.flat(ct)))

    def flat(self, ct: Tree, unwanted: Collection[int] = ()) -> list[Value]:
        """Return the cotangents of the primals as a flat list, with arrays for symbolic zeros.

        Primals at the positions `unwanted` may be references, which have no cotangent.
        """
        of = self._signature
        for i, aval in enumerate(of.primal_avals):
            if i not in unwanted and is_reference(aval):
                raise reference_argument_error(of, i)
        cts, tree = jax.tree.flatten(ct)
        if tree != of.out_tree:
            raise WrongCotangent(
                f"pullback of {of.name}",
                f"the cotangent's tree is {tree}, the output's is {of.out_tree}",
                "",
                "pass a cotangent with the tree of the function's output",
            )
        checked = [check_cotangent(x, a, of.name) for x, a in zip(cts, of.out_avals, strict=True)]
        separate = self._residuals
        arrays = self._arrays if separate is None else separate.arrays(of)
        results = self._runner.run(arrays, checked)
        return list(map(dense, results, map(cotangent_aval, of.primal_avals)))

    def with_refs(self, *wishes: Any) -> Callable[[Tree], Tree]:
        """Return a map that adds cotangents to references, returns them or drops them.

        Args:
          *wishes: like the primals. For a `Ref`, the map adds the cotangent to it and returns
            `GradRef()` in its place. For `jax.ad.GradValue()` it returns the cotangent. For
            `jax.ad.DontWant()` it returns `DidntWant()`.
        """
        return with_refs(self, self._signature, wishes)


@jax.tree_util.register_pytree_node_class
class Pushforward(LinearMap):
    """The function that `linearize` returns, from tangents of the primals to those of the output.

    Attributes:
      out_nzs: a tree like the output: whether each leaf depends on the differentiated arguments.
    """

    def __repr__(self) -> str:
        of = self._signature
        return f"<pushforward of {of.name}: {of.input_types} -> {of.output_types}>"

    @property
    def out_nzs(self) -> Any:
        """Whether each leaf of the output depends on the differentiated arguments."""
        return mirrored(self._signature.out_tree, self._runner.active_outputs())

    def __call__(self, *tangents: Tree) -> Tree:
        """Return a tangent like the output, from tangents like the primals."""
        of = self._signature
        dxs = check_tangents(of.name, of.in_tree, of.primal_avals, "linearize", tangents)
        results = self._runner.run(self._arrays, dxs)
        return of.out_tree.unflatten(map(dense, results, map(tangent_aval, of.out_avals)))


def dense(value: Value, aval: Any) -> Value:
    """Return `value`, or if it is None, zeros of type `aval`. The dtype may be float0."""
    if value is not None:
        return value
    if getattr(aval, "dtype", None) == jax.dtypes.float0:
        return float0_zeros(aval.shape)
    return zeros(aval)
