"""A loss whose layers are read as it is differentiated, and what the readings say."""

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
from xform.arithmetic import Value
from xform.callables import argument_names, function_name
from xform.diagnosis import readings
from xform.diagnosis.flow import Mark
from xform.diagnosis.layers import Layer, Level, Row, level
from xform.diagnosis.nonfinite import Origin
from xform.diagnosis.probed import run, sinks
from xform.diagnosis.report import Report
from xform.diagnosis.row import LayerHealth
from xform.diagnosis.verdict import judged
from xform.errors import WrongArgument
from xform.ir import lifted, trace
from xform.transforms.check import check_inputs, check_output, check_scalar
from xform.transforms.function import Call, Tree, as_array
from xform.transforms.reverse import value_and_grad

ASKED = "health"


@dataclasses.dataclass(frozen=True)
class Readings:
    """What one evaluation of a derivative brought: a pytree of arrays.

    Attributes:
      layers: for each layer `[*trips, len(readings.NAMES)]`.
      weights, gradients, updates: norms of each parameter for each way to take it apart; updates
        are empty where there was none.
    """

    layers: list[Value]
    weights: list[Value]
    gradients: list[Value]
    updates: list[Value]


jax.tree_util.register_dataclass(Readings)


class Diagnosis:
    """A loss with its layers, found once for the types of its arguments. Nothing is run.

    Args:
      loss: `loss(params, batch)`, a pure function that returns a scalar, or with `has_aux` a pair
        of it and of what else it makes.
      params: pytree of floats, or their types; all of it is differentiated.
      batch: pytree of what the loss reads besides; arrays or their types. The first axis of its
        first array is that of the examples.
      iterations: of the power iteration for each layer's largest singular value; 0 leaves it out.
      has_aux: whether the loss returns a pair, of which the second is passed through.

    Raises:
      NotScalar: the loss returns something other than a scalar.
      WrongArgument: no layer was found.
      NotDifferentiable: the loss has effects.
    """

    def __init__(self, loss: Callable[[Tree, Tree], Value], params: Tree, batch: Tree,
                 iterations: int = 0, has_aux: bool = False) -> None:  # fmt: skip
        self.name, self.iterations, self._has_aux = function_name(loss), iterations, has_aux
        paths, self._params = jax.tree.flatten_with_path(params)
        called = argument_names(loss, 2)[0]
        self.paths = [_named(keystr(path, simple=True, separator="."), called) for path, _ in paths]
        leaves, self._batch = jax.tree.flatten(batch)
        of_type = lambda x: jnp.zeros((), x.dtype) if hasattr(x, "dtype") else x
        check_inputs(ASKED, jax.tree.map(of_type, params), False, False)
        n, whole = len(paths), jax.tree.structure((params, batch))
        self._aux: Any = None

        def flat(*args: Value) -> list[Value]:
            y, aux = Call(ASKED, self.name, loss, has_aux, [], [], whole).run(args)
            check_scalar(ASKED, self.name, y)
            check_output(ASKED, y, False)
            others, self._aux = jax.tree.flatten(aux)
            return [y, *map(jnp.asarray, others)]

        args = [_typed(x) for x in (*(x for _, x in paths), *leaves)]
        self._program, self._closed = lifted(trace(flat, *args))
        self.batch_size = next((x.shape[0] for x in args[n:] if x.shape), 0)
        marks = [Mark(frozenset([(i, 0)])) for i in range(n)]
        marks = [*[Mark()] * len(self._closed), *marks, *[Mark(batch=True)] * len(leaves)]
        self._level: Level = level(self._program, marks)
        self.rows: list[Row] = self._level.rows
        if not any(row.layer.kind == "layer" for row in self.rows):
            raise WrongArgument(
                f"{ASKED} of {self.name}",
                "no layer was found: nothing in it multiplies a parameter with the batch, or looks "
                "one up by it",
                "",
                "pass what is trained as params and the data as batch, rather than close over it, "
                "and name what a layer is with jax.named_scope",
            )

    @cached_property
    def owned(self) -> list[tuple[int, int]]:
        """Each parameter that a layer owns, with the axes that loops take off, in order."""
        return sorted({w for row in self.rows for w in row.layer.weights})

    def value_and_grad(self, params: Tree, batch: Tree, key: Value, policy: Any = None
                       ) -> tuple[Any, Tree, Readings]:  # fmt: skip
        """The loss, its gradient in `params`, and what was read. May be jitted.

        With `has_aux` the first is a pair: the loss, and what else was made.
        """
        leaves, others = self._params.flatten_up_to(params), self._batch.flatten_up_to(batch)

        def loss(leaves: list[Value], into: list[Value]) -> tuple[Value, list[Value]]:
            y, *aux = run(self._level, [*self._closed, *leaves, *others], into, probe)
            return y, aux

        def probe(layer: Layer, env: Callable[[Var], Value], sink: Value) -> Value:
            read = readings.forward(layer, env, key, self.iterations)
            return readings.probe(env(layer.out), sink, read, self.batch_size)

        into = sinks(self.rows, len(readings.NAMES))
        gradient = value_and_grad(loss, (0, 1), has_aux=True, policy=policy)
        (value, aux), (grads, read) = gradient(leaves, into)
        found = Readings(read, self.norms(leaves), self.norms(grads), [])
        out = (value, self._aux.unflatten(aux)) if self._has_aux else value
        return out, self._params.unflatten(grads), found

    def norms(self, leaves: Sequence[Value]) -> list[Value]:
        """The norm of each parameter that a layer owns."""
        return [readings.norm(leaves[i], axes) for i, axes in self.owned]

    def updated(self, read: Readings, before: Tree, after: Tree, scale: Value | None = None
                ) -> Readings:  # fmt: skip
        """The readings with how far an update moved the parameters.

        Where the loss was multiplied by a `scale`, its gradients are divided by that.
        """
        a, b = self._params.flatten_up_to(before), self._params.flatten_up_to(after)
        updates = self.norms([y - x for x, y in zip(a, b, strict=True)])
        if scale is None:
            return dataclasses.replace(read, updates=updates)
        place = readings.NAMES.index("gradient")
        layers = [x.at[..., place].divide(scale) for x in read.layers]
        return Readings(layers, read.weights, [x / scale for x in read.gradients], updates)

    def report(self, losses: Sequence[Any], read: Readings, origin: Origin | None = None) -> Report:
        """What the readings say, with the losses they are of; not to be jitted."""
        rows = self.judged(jax.device_get(read))
        return Report(self.name, tuple(map(float, losses)), tuple(rows), origin)

    def judged(self, read: Readings) -> list[LayerHealth]:
        """Rows with verdicts, in the order in which layers run; `read` may be of NumPy."""
        norms = [dict(zip(self.owned, map(np.asarray, of), strict=False))
                 for of in (read.weights, read.gradients, read.updates)]  # fmt: skip
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
            named = one if one.kind == "layer" else dataclasses.replace(one, name=last)
            ordered.append(named)
        return judged(ordered)

    def _row(self, row: Row, place: int, trip: tuple[int, ...], values: Any,
             norms: Sequence[dict[tuple[int, int], Any]]) -> LayerHealth | None:  # fmt: skip
        layer, of = row.layer, dict(zip(readings.NAMES, values.tolist(), strict=True))
        runs = of["runs"]
        if not runs:  # the branch that was not taken, or nothing of it reaches the loss
            return None
        of = {name: x / runs for name, x in of.items()}
        aval: Any = layer.out.aval
        weight, gradient, update = (_together(n, layer.weights, trip) for n in norms)
        has = lambda on, name: of[name] if on else None
        ratio = lambda x: None if x is None or not weight else x / weight
        together = readings.neighbours(aval.shape, self.batch_size)
        gain = (
            of["product"] / of["input"] if of["input"] > 0 and math.isfinite(of["input"]) else None
        )
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
            activation=of["activation"],
            gradient=of["gradient"],
            input=has(layer.kind == "sum" or layer.body is not None, "input"),
            nonfinite=of["nonfinite"],
            gradient_nonfinite=of["gradient_nonfinite"],
            gain=gain,
            sigma=has(self.iterations and layer.body is not None, "sigma"),
            dead=has(layer.slope is not None, "dead"),
            saturated=has(layer.slope is not None, "saturated"),
            least=has(layer.kind == "sum", "least"),
            correlation=has(together, "correlation"),
            noise=_noise(aval.shape) if together else None,
            weight=weight,
            gradient_to_weight=ratio(gradient),
            update_to_weight=ratio(update),
        )

    def _name(self, layer: Layer) -> str:
        """The longest path that all its weights have in common, if it is of this layer alone.

        Else that of the weight with which it begins. A sum is called after the layer before it.
        """
        if layer.kind == "sum":
            return ""
        split = lambda weights: [self.paths[i].split(".") for i in sorted({i for i, _ in weights})]
        paths = split(layer.weights)
        shared = _shared(paths)
        if len(paths) == 1 and len(self._owners[tuple(shared[:-1])]) == 1:
            shared.pop()
        own = len(self._owners[tuple(shared)]) == 1
        return (
            ".".join(shared) if own and shared else ", ".join(map(".".join, split(layer.applied)))
        )

    @cached_property
    def _owners(self) -> dict[tuple[str, ...], set[Layer]]:
        """Of each path that parameters begin with, the layers that own one of them."""
        owners: dict[tuple[str, ...], set[Layer]] = {}
        for row in self.rows:
            for i, _ in row.layer.weights:
                path = tuple(self.paths[i].split("."))
                for n in range(len(path) + 1):
                    owners.setdefault(path[:n], set()).add(row.layer)
        return owners


def _shared(paths: Sequence[list[str]]) -> list[str]:
    """The parts with which all paths begin."""
    same = itertools.takewhile(lambda parts: len({*parts}) == 1, zip(*paths, strict=False))
    return [parts[0] for parts in same]


def _named(path: str, called: str) -> str:
    """The path of a parameter; behind the argument's name, if it is none or a number."""
    path = path.removesuffix(".value")  # of a variable of Flax NNX
    return path if path[:1].isalpha() else f"{called}.{path}".rstrip(".")


def _typed(x: Any) -> Any:
    return x if isinstance(x, jax.ShapeDtypeStruct) else as_array(x, ASKED)


def _noise(shape: tuple[int, ...]) -> float:
    """The mean size of the cosine between random vectors, each of a row's size."""
    return math.sqrt(2 / (math.pi * max(math.prod(shape[1:]), 1)))


def _together(norms: dict[tuple[int, int], Any], weights: frozenset[tuple[int, int]],
              trip: tuple[int, ...]) -> float | None:  # fmt: skip
    """The norm of some parameters together, in one trip."""
    known = [norms[w] for w in weights if w in norms]
    picked = [x[trip[: x.ndim]] if x.ndim <= len(trip) else np.linalg.norm(x) for x in known]
    return math.hypot(*map(float, picked)) if picked else None
