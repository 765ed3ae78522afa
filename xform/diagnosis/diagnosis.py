"""`Diagnosis`: a loss whose layers are measured while it is differentiated.

The constructor finds the layers in the traced loss. `value_and_grad` runs the loss with a probe on
each layer's result. A probe has an argument of its own, the sink: a vector of zeros, whose gradient
is defined to be the measurements of the layer (its readings). `report` judges the readings.
"""

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
from xform.diagnosis.groups import Dependence
from xform.diagnosis.layers import Layer, NestedLayer, ProgramLayers, find_layers
from xform.diagnosis.nonfinite import Origin
from xform.diagnosis.probed import run_with_probes, zero_sinks
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
      layers: for each layer an array `[*iterations of the scans around it, readings]`, with the
        readings that `readings.NAMES` lists.
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
      power_iterations: number of power iterations for the largest singular value of each layer; 0
        leaves it out. The default is 0, not 8 as for `xform.health`, because a training loop pays
        for them in each step.
      has_aux: whether the loss returns a pair whose second element is auxiliary output.

    Raises:
      NotScalar: the loss returns something other than a scalar.
      WrongArgument: no layer was found.
      NotDifferentiable: the loss has effects.
    """

    def __init__(self, loss: Callable[[Tree, Tree], Value], params: Tree, batch: Tree,
                 power_iterations: int = 0, has_aux: bool = False) -> None:  # fmt: skip
        self.name, self.power_iterations = function_name(loss), power_iterations
        self._has_aux = has_aux
        paths, self._params = jax.tree.flatten_with_path(params)
        argument = argument_names(loss, 2)[0]
        self.paths = [
            _path_name(keystr(path, simple=True, separator="."), argument) for path, _ in paths
        ]
        leaves, self._batch = jax.tree.flatten(batch)
        # The check needs values, and `params` may be types.
        zero_of = lambda x: jnp.zeros((), x.dtype) if hasattr(x, "dtype") else x
        zeros = jax.tree.map(zero_of, params)
        check_inputs(CALLER, zeros, holomorphic=False, allow_int=False)
        n, structure = len(paths), jax.tree.structure((params, batch))
        self._aux: Any = None

        def of_leaves(*args: Value) -> list[Value]:
            y, aux = FunctionCall(CALLER, self.name, loss, has_aux, [], [], structure).run(args)
            check_scalar(CALLER, self.name, y)
            check_output(CALLER, y, False)
            aux_leaves, self._aux = jax.tree.flatten(aux)
            return [y, *map(jnp.asarray, aux_leaves)]

        args = [_array_or_type(x) for x in (*(x for _, x in paths), *leaves)]
        self._program, self._constants = lift_constants(trace(of_leaves, *args))
        self.batch_size = next((x.shape[0] for x in args[n:] if x.shape), 0)
        inputs = [
            *[Dependence()] * len(self._constants),
            *[Dependence(frozenset([(i, 0)])) for i in range(n)],
            *[Dependence(batch=True)] * len(leaves),
        ]
        self._layers: ProgramLayers = find_layers(self._program, inputs)
        self.rows: list[NestedLayer] = self._layers.rows
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

    def value_and_grad(self, params: Tree, batch: Tree, key: Value | None = None,
                       policy: Any = None) -> tuple[Any, Tree, Readings]:  # fmt: skip
        """Return the loss, its gradient with respect to `params`, and the readings. May be jitted.

        Args:
          params: parameters, of the types that the constructor got.
          batch: a batch, of the types that the constructor got.
          key: the random key for the power iterations; None: `jax.random.key(0)`.
          policy: which values are saved for the backward pass: a policy of `xform.policies` or
            `jax.checkpoint_policies`, or its text, such as "save_dots"; None: the default of
            `xform.grad`.

        Returns:
          The loss, its gradient, and a `Readings`. With `has_aux` the first result is a pair: the
          loss and its auxiliary output.
        """
        leaves, batch_leaves = self._params.flatten_up_to(params), self._batch.flatten_up_to(batch)
        key = jax.random.key(0) if key is None else key

        def loss(leaves: list[Value], sinks: list[Value]) -> tuple[Value, list[Value]]:
            args = [*self._constants, *leaves, *batch_leaves]
            y, *aux = run_with_probes(self._layers, args, sinks, probe)
            return y, aux

        def probe(layer: Layer, env: Callable[[Var], Value], sink: Value) -> Value:
            forward = readings.forward_readings(layer, env, key, self.power_iterations)
            return readings.probe(env(layer.result), sink, forward, self.batch_size)

        sinks = zero_sinks(self.rows, len(readings.NAMES))
        gradient = value_and_grad(loss, (0, 1), has_aux=True, policy=policy)
        (value, aux), (grads, layer_readings) = gradient(leaves, sinks)
        result = Readings(layer_readings, self.norms(leaves), self.norms(grads), [])
        out = (value, self._aux.unflatten(aux)) if self._has_aux else value
        return out, self._params.unflatten(grads), result

    def norms(self, leaves: Sequence[Value]) -> list[Value]:
        """Return the norm of each entry of `owned`.

        `leaves` are the leaves of the parameters, or of their gradient or update. The norm excludes
        the axes over which loops scan: there is one norm for each iteration.
        """
        return [readings.norm(leaves[i], axes) for i, axes in self.owned]

    def updated(self, read: Readings, before: Tree, after: Tree, scale: Value | None = None
                ) -> Readings:  # fmt: skip
        """Return the readings, with the norms of an update of the parameters added.

        Args:
          read: the readings.
          before: the parameters before the update.
          after: the parameters after the update.
          scale: a factor of the loss, such as the loss scale in mixed precision. The gradients in
            the readings are divided by it. None: 1.
        """
        old, new = self._params.flatten_up_to(before), self._params.flatten_up_to(after)
        updates = self.norms([y - x for x, y in zip(old, new, strict=True)])
        if scale is None:
            return dataclasses.replace(read, updates=updates)
        column = readings.NAMES.index("gradient")
        layers = [x.at[..., column].divide(scale) for x in read.layers]
        return Readings(layers, read.weights, [x / scale for x in read.gradients], updates)

    def report(self, losses: Sequence[Any], read: Readings, origin: Origin | None = None) -> Report:
        """Return the report of the readings and the losses. This cannot be jitted.

        Args:
          losses: value of the loss before each step.
          read: the readings of a step, or their means over several.
          origin: the operation that produced the first NaN or Inf, if it is known.
        """
        rows = self.with_verdicts(jax.device_get(read))
        return Report(self.name, tuple(map(float, losses)), tuple(rows), origin)

    def with_verdicts(self, read: Readings) -> list[LayerHealth]:
        """Return the rows with verdicts, in execution order. `read` may hold NumPy arrays."""
        norms = [dict(zip(self.owned, map(np.asarray, of_owned), strict=False))
                 for of_owned in (read.weights, read.gradients, read.updates)]  # fmt: skip
        rows: list[tuple[tuple[int, ...], LayerHealth]] = []
        for place, (row, values) in enumerate(zip(self.rows, read.layers, strict=True)):
            table = np.asarray(values, np.float64)
            for trip in np.ndindex(*row.lengths):
                health = self._row(row, place, trip, table[trip], norms)
                if health is not None:
                    rows.append((row.sort_key(trip), health))
        ordered: list[LayerHealth] = []
        for _, health in sorted(rows, key=lambda pair: pair[0]):
            last = next((r.name for r in reversed(ordered) if r.kind == "layer"), "")
            is_sum = health.kind == "sum"
            ordered.append(dataclasses.replace(health, name=last) if is_sum else health)
        return with_verdicts(ordered)

    def _row(self, row: NestedLayer, place: int, trip: tuple[int, ...], values: Any,
             norms: Sequence[dict[tuple[int, int], Any]]) -> LayerHealth | None:  # fmt: skip
        """Return the row of a layer in one iteration, without a verdict.

        Args:
          row: the layer.
          place: the number of the layer in the program.
          trip: the iteration of each scan around it.
          values: its readings in this iteration.
          norms: norms of weights, of gradients and of updates, by entry of `owned`.

        Returns:
          The row; None if the layer did not run.
        """
        layer, sums = row.layer, dict(zip(readings.NAMES, values.tolist(), strict=True))
        runs = sums["runs"]
        if not runs:  # the branch did not run, or its result does not reach the loss
            return None
        # The iterations of a while loop share a sink, so that their readings add up.
        means = {name: x / runs for name, x in sums.items()}
        aval: Any = layer.result.aval
        weight, gradient, update = (_joint_norm(n, layer.weights, trip) for n in norms)
        mean_if = lambda condition, name: means[name] if condition else None
        relative_to_weight = lambda x: None if x is None or not weight else x / weight
        has_examples = readings.has_example_axis(aval.shape, self.batch_size)
        input_size = means["input"]
        has_input = input_size > 0 and math.isfinite(input_size)
        gain = means["product"] / input_size if has_input else None
        return LayerHealth(
            name=self._name(layer),
            trip=trip,
            kind=layer.kind,
            scope=layer.scope,
            where=layer.where,
            kin=f"{layer.kind} {layer.operation}",
            place=place,
            bypassed=layer.bypassed,
            size=math.prod(aval.shape),
            activation=means["activation"],
            gradient=means["gradient"],
            input=mean_if(layer.kind == "sum" or layer.function is not None, "input"),
            nonfinite=means["nonfinite"],
            gradient_nonfinite=means["gradient_nonfinite"],
            gain=gain,
            sigma=mean_if(self.power_iterations and layer.function is not None, "sigma"),
            dead=mean_if(layer.activation is not None, "dead"),
            saturated=mean_if(layer.activation is not None, "saturated"),
            least=mean_if(layer.kind == "sum", "least"),
            correlation=mean_if(has_examples, "correlation"),
            noise=_random_cosine(aval.shape) if has_examples else None,
            weight=weight,
            gradient_to_weight=relative_to_weight(gradient),
            update_to_weight=relative_to_weight(update),
        )

    def _name(self, layer: Layer) -> str:
        """Return the name of a layer: the longest prefix that the paths of all its weights share.

        For a single weight the prefix leaves out the last part of the path, if the layer still is
        the only one with a weight under it. If another layer has a weight with the prefix, return
        the paths of the weights that the layer's first operation reads. The name of a sum is empty
        here: later it gets the name of the layer before it.
        """
        if layer.kind == "sum":
            return ""
        paths_of = lambda weights: [
            self.paths[i].split(".") for i in sorted({i for i, _ in weights})
        ]
        paths = paths_of(layer.weights)
        shared = _common_prefix(paths)
        if len(paths) == 1 and len(self._owners[tuple(shared[:-1])]) == 1:
            shared.pop()
        if shared and len(self._owners[tuple(shared)]) == 1:
            return ".".join(shared)
        return ", ".join(map(".".join, paths_of(layer.applied)))

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
    equal = itertools.takewhile(lambda parts: len({*parts}) == 1, zip(*paths, strict=False))
    return [parts[0] for parts in equal]


def _path_name(path: str, argument: str) -> str:
    """Return the name of a parameter: its path.

    If the path is empty or begins with a number, the name begins with the name of the argument.
    """
    path = path.removesuffix(".value")  # added by variables of Flax NNX
    return path if path[:1].isalpha() else f"{argument}.{path}".rstrip(".")


def _array_or_type(x: Any) -> Any:
    """Convert a leaf to an array, unless it is a `jax.ShapeDtypeStruct`."""
    return x if isinstance(x, jax.ShapeDtypeStruct) else as_array(x, CALLER)


def _random_cosine(shape: tuple[int, ...]) -> float:
    """Return the mean absolute cosine between random vectors of the size of one example."""
    return math.sqrt(2 / (math.pi * max(math.prod(shape[1:]), 1)))


def _joint_norm(norms: dict[tuple[int, int], Any], weights: frozenset[tuple[int, int]],
                trip: tuple[int, ...]) -> float | None:  # fmt: skip
    """Return the joint norm of some parameters in one iteration; None for no parameters."""
    known = [norms[w] for w in weights if w in norms]
    here = [x[trip[: x.ndim]] if x.ndim <= len(trip) else np.linalg.norm(x) for x in known]
    return math.hypot(*map(float, here)) if here else None
