"""`Diagnosis`: a loss whose layers are measured while it is differentiated."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from xform._jax import Var
from xform.diagnosis import readings
from xform.diagnosis.dependence import Dependence
from xform.diagnosis.layers import Layer, Level, NestedLayer, level
from xform.diagnosis.nonfinite import Origin
from xform.diagnosis.probed import run, sinks
from xform.diagnosis.report import Report
from xform.diagnosis.row import LayerHealth
from xform.diagnosis.verdict import with_verdicts
from xform.errors import WrongArgument
from xform.introspection.callables import argument_names, function_name
from xform.program.arithmetic import Value
from xform.program.ir import lift_constants, trace
from xform.transforms.check import check_inputs, check_output, check_scalar
from xform.transforms.function import FunctionCall, Tree, as_array
from xform.transforms.reverse import value_and_grad

CALLER = "health"


@dataclasses.dataclass(frozen=True)
class Readings:
    """The measurements of one gradient evaluation, a pytree of arrays.

    Attributes:
      layers: for each layer an array of shape `[*trip counts, len(readings.NAMES)]`.
      weights, gradients, updates: for each entry of `Diagnosis.owned`, the norm of the parameter,
        of its gradient and of its update. `updates` is empty without an update.
    """

    layers: list[Value]
    weights: list[Value]
    gradients: list[Value]
    updates: list[Value]


jax.tree_util.register_dataclass(Readings)


class Diagnosis:
    """A loss and its layers, which are found once for the types of its arguments.

    The constructor traces the loss and runs nothing.

    Args:
      loss: `loss(params, batch)`, a pure function that returns a scalar; with `has_aux`, a pair of
        the scalar and auxiliary output.
      params: pytree of floating-point arrays, or their types. All of it is differentiated.
      batch: pytree of all other inputs of the loss, arrays or their types. The first axis of its
        first array is the axis of examples.
      iterations: number of power iterations for the largest singular value of each layer; 0 leaves
        it out.
      has_aux: whether the loss returns a pair whose second element is auxiliary output.

    Raises:
      NotScalar: the loss returns something other than a scalar.
      WrongArgument: no layer was found.
      NotDifferentiable: the loss has effects.
    """

    def __init__(self, loss: Callable[[Tree, Tree], Value], params: Tree, batch: Tree,
                 iterations: int = 0, has_aux: bool = False) -> None:  # fmt: skip
        self.name, self.iterations, self._has_aux = function_name(loss), iterations, has_aux
        paths, self._params = jax.tree.flatten_with_path(params)
        argument = argument_names(loss, 2)[0]
        self.paths = [
            _path_name(keystr(path, simple=True, separator="."), argument) for path, _ in paths
        ]
        leaves, self._batch = jax.tree.flatten(batch)
        zero_of = lambda x: jnp.zeros((), x.dtype) if hasattr(x, "dtype") else x
        check_inputs(CALLER, jax.tree.map(zero_of, params), False, False)
        n, structure = len(paths), jax.tree.structure((params, batch))
        self._aux: Any = None

        def flat(*args: Value) -> list[Value]:
            y, aux = FunctionCall(CALLER, self.name, loss, has_aux, [], [], structure).run(args)
            check_scalar(CALLER, self.name, y)
            check_output(CALLER, y, False)
            others, self._aux = jax.tree.flatten(aux)
            return [y, *map(jnp.asarray, others)]

        args = [_typed(x) for x in (*(x for _, x in paths), *leaves)]
        self._program, self._closed = lift_constants(trace(flat, *args))
        self.batch_size = next((x.shape[0] for x in args[n:] if x.shape), 0)
        inputs = [Dependence(frozenset([(i, 0)])) for i in range(n)]
        inputs = [
            *[Dependence()] * len(self._closed),
            *inputs,
            *[Dependence(batch=True)] * len(leaves),
        ]
        self._level: Level = level(self._program, inputs)
        self.rows: list[NestedLayer] = self._level.rows
        if not any(row.layer.kind == "layer" for row in self.rows):
            raise WrongArgument(
                f"{CALLER} of {self.name}",
                "no layer was found: the loss has no matrix product, convolution or look-up of a "
                "parameter with a value that depends on the batch",
                "",
                "pass the trained parameters as params and the data as batch; do not close over "
                "them",
            )

    @cached_property
    def owned(self) -> list[tuple[int, int]]:
        """The parameters of all layers, sorted, as pairs (leaf, n).

        `n` is the number of leading axes of the leaf over which loops scan.
        """
        return sorted({w for row in self.rows for w in row.layer.weights})

    def value_and_grad(self, params: Tree, batch: Tree, key: Value, policy: Any = None
                       ) -> tuple[Any, Tree, Readings]:  # fmt: skip
        """Return the loss, its gradient with respect to `params`, and the readings. May be jitted.

        With `has_aux` the first result is a pair: the loss and its auxiliary output. `key` is the
        random key for the power iterations. `policy` decides which values are saved, as for `grad`.
        """
        leaves, others = self._params.flatten_up_to(params), self._batch.flatten_up_to(batch)

        def loss(leaves: list[Value], sinks_: list[Value]) -> tuple[Value, list[Value]]:
            y, *aux = run(self._level, [*self._closed, *leaves, *others], sinks_, probe)
            return y, aux

        def probe(layer: Layer, env: Callable[[Var], Value], sink: Value) -> Value:
            forward = readings.forward(layer, env, key, self.iterations)
            return readings.probe(env(layer.out), sink, forward, self.batch_size)

        zero_sinks = sinks(self.rows, len(readings.NAMES))
        gradient = value_and_grad(loss, (0, 1), has_aux=True, policy=policy)
        (value, aux), (grads, layer_readings) = gradient(leaves, zero_sinks)
        result = Readings(layer_readings, self.norms(leaves), self.norms(grads), [])
        out = (value, self._aux.unflatten(aux)) if self._has_aux else value
        return out, self._params.unflatten(grads), result

    def norms(self, leaves: Sequence[Value]) -> list[Value]:
        """Return the norm of each entry of `owned`, for leaves like those of the parameters.

        The norm excludes the axes over which loops scan: there is one norm for each iteration.
        """
        return [readings.norm(leaves[i], axes) for i, axes in self.owned]

    def updated(self, read: Readings, before: Tree, after: Tree, scale: Value | None = None
                ) -> Readings:  # fmt: skip
        """Return the readings, with the norms of an update of the parameters added.

        If the loss was multiplied by a `scale`, the gradients in the readings are divided by it.
        """
        a, b = self._params.flatten_up_to(before), self._params.flatten_up_to(after)
        updates = self.norms([y - x for x, y in zip(a, b, strict=True)])
        if scale is None:
            return dataclasses.replace(read, updates=updates)
        column = readings.NAMES.index("gradient")
        layers = [x.at[..., column].divide(scale) for x in read.layers]
        return Readings(layers, read.weights, [x / scale for x in read.gradients], updates)

    def report(self, losses: Sequence[Any], read: Readings, origin: Origin | None = None) -> Report:
        """Return the report of the readings and the losses. This cannot be jitted."""
        rows = self.with_verdicts(jax.device_get(read))
        return Report(self.name, tuple(map(float, losses)), tuple(rows), origin)

    def with_verdicts(self, read: Readings) -> list[LayerHealth]:
        """Return the rows with verdicts, in execution order. `read` may hold NumPy arrays."""
        norms = [dict(zip(self.owned, map(np.asarray, of_owned), strict=False))
                 for of_owned in (read.weights, read.gradients, read.updates)]  # fmt: skip
        rows: list[tuple[tuple[int, ...], LayerHealth]] = []
        for place, (row, values) in enumerate(zip(self.rows, read.layers, strict=True)):
            table = np.asarray(values, np.float64)
            for trip in np.ndindex(*row.trips):
                one = self._row(row, place, trip, table[trip], norms)
                if one is not None:
                    rows.append((row.when(trip), one))
        ordered: list[LayerHealth] = []
        for _, one in sorted(rows, key=lambda pair: pair[0]):
            last = next((r.name for r in reversed(ordered) if r.kind == "layer"), "")
            with_name = one if one.kind == "layer" else dataclasses.replace(one, name=last)
            ordered.append(with_name)
        return with_verdicts(ordered)

    def _row(self, row: NestedLayer, place: int, trip: tuple[int, ...], values: Any,
             norms: Sequence[dict[tuple[int, int], Any]]) -> LayerHealth | None:  # fmt: skip
        layer, sums = row.layer, dict(zip(readings.NAMES, values.tolist(), strict=True))
        runs = sums["runs"]
        if not runs:  # the branch did not run, or its result does not reach the loss
            return None
        means = {name: x / runs for name, x in sums.items()}
        aval: Any = layer.out.aval
        weight, gradient, update = (_joint_norm(n, layer.weights, trip) for n in norms)
        if_has = lambda condition, name: means[name] if condition else None
        ratio = lambda x: None if x is None or not weight else x / weight
        has_examples = readings.neighbours(aval.shape, self.batch_size)
        x = means["input"]
        gain = means["product"] / x if x > 0 and math.isfinite(x) else None
        return LayerHealth(
            name=self._name(layer),
            trip=trip,
            kind=layer.kind,
            scope=layer.scope,
            where=layer.where,
            kin=f"{layer.kind} {layer.shape}",
            place=place,
            bypassed=layer.bypassed,
            size=math.prod(aval.shape),
            activation=means["activation"],
            gradient=means["gradient"],
            input=if_has(layer.kind == "sum" or layer.body is not None, "input"),
            nonfinite=means["nonfinite"],
            gradient_nonfinite=means["gradient_nonfinite"],
            gain=gain,
            sigma=if_has(self.iterations and layer.body is not None, "sigma"),
            dead=if_has(layer.slope is not None, "dead"),
            saturated=if_has(layer.slope is not None, "saturated"),
            least=if_has(layer.kind == "sum", "least"),
            correlation=if_has(has_examples, "correlation"),
            noise=_noise(aval.shape) if has_examples else None,
            weight=weight,
            gradient_to_weight=ratio(gradient),
            update_to_weight=ratio(update),
        )

    def _name(self, layer: Layer) -> str:
        """Return the longest path that all weights of a layer share, if no other layer shares it.

        Else return the path of the weight that the layer's first operation applies. The name of a
        sum is empty here: it gets the name of the layer before it.
        """
        if layer.kind == "sum":
            return ""
        split = lambda weights: [self.paths[i].split(".") for i in sorted({i for i, _ in weights})]
        paths = split(layer.weights)
        shared = _common_prefix(paths)
        if len(paths) == 1 and len(self._owners[tuple(shared[:-1])]) == 1:
            shared.pop()
        if shared and len(self._owners[tuple(shared)]) == 1:
            return ".".join(shared)
        return ", ".join(map(".".join, split(layer.applied)))

    @cached_property
    def _owners(self) -> dict[tuple[str, ...], set[Layer]]:
        """For each prefix of a parameter path, the layers with a parameter under it."""
        owners: dict[tuple[str, ...], set[Layer]] = {}
        for row in self.rows:
            for i, _ in row.layer.weights:
                path = tuple(self.paths[i].split("."))
                for n in range(len(path) + 1):
                    owners.setdefault(path[:n], set()).add(row.layer)
        return owners


def _common_prefix(paths: Sequence[list[str]]) -> list[str]:
    """Return the parts that all paths begin with."""
    same = itertools.takewhile(lambda parts: len({*parts}) == 1, zip(*paths, strict=False))
    return [parts[0] for parts in same]


def _path_name(path: str, argument: str) -> str:
    """Return the name of a parameter: its path.

    If the path is empty or begins with a number, the name begins with the name of the argument.
    """
    path = path.removesuffix(".value")  # added by variables of Flax NNX
    return path if path[:1].isalpha() else f"{argument}.{path}".rstrip(".")


def _typed(x: Any) -> Any:
    return x if isinstance(x, jax.ShapeDtypeStruct) else as_array(x, CALLER)


def _noise(shape: tuple[int, ...]) -> float:
    """Return the mean absolute cosine between random vectors of the size of one example."""
    return math.sqrt(2 / (math.pi * max(math.prod(shape[1:]), 1)))


def _joint_norm(norms: dict[tuple[int, int], Any], weights: frozenset[tuple[int, int]],
                trip: tuple[int, ...]) -> float | None:  # fmt: skip
    """Return the joint norm of some parameters in one iteration; None if there are none."""
    known = [norms[w] for w in weights if w in norms]
    picked = [x[trip[: x.ndim]] if x.ndim <= len(trip) else np.linalg.norm(x) for x in known]
    return math.hypot(*map(float, picked)) if picked else None
