"""Weights by the names and in the layouts of other implementations, into a model and out of it.

A table says, for each parameter of a model, what it is called there. What are many arrays there,
one for each layer or expert, may be one array here, with leading axes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.errors import InputError

Array = np.ndarray
Shape = tuple[int, ...]


def _matrix(array: Array, inputs: int) -> Array:
    return array.reshape(math.prod(array.shape[:inputs]), -1)


def _enlarging(array: Array) -> Array:
    """Of a transposed convolution: PyTorch's kernels are ours mirrored."""
    return array.transpose(2, 3, 0, 1)[::-1, ::-1]


# From there, up to a reshape; and back, of an array whose first so many axes are inputs.
LAYOUTS: dict[str, tuple[Callable[[Array], Array], Callable[[Array, int], Array]]] = {
    "same": (lambda x: x, lambda x, _: x),
    "flat": (lambda x: x, lambda x, _: x.reshape(-1)),
    "boxed": (lambda x: x, lambda x, _: x[None]),
    "in out": (lambda x: x, _matrix),
    "out in": (lambda x: x.T, lambda x, inputs: _matrix(x, inputs).T),
    "out in places": (lambda x: x.transpose(2, 3, 1, 0), lambda x, _: x.transpose(3, 2, 0, 1)),
    "in out places": (_enlarging, lambda x, _: _enlarging(x)),
}


@dataclasses.dataclass(frozen=True)
class Name:
    """What a parameter is called there, with {} for each number of a layer or an expert."""

    text: str
    layout: str = "flat"
    inputs: int = 1
    part: int = 0  # which of ...
    parts: int = 1  # ... several that are one array there, side by side


Table = Mapping[str, Name]


def fill(
    model: Any,
    table: Table,
    source: Mapping[str, Array],
    put: Callable[[str, Array], Any] = lambda _, array: jnp.asarray(array),
) -> Any:
    """A model like `model`, which may be abstract, with the weights of `source`.

    Each parameter has its dtype from `model`; `put` makes an array of a device, or of several, of
    the parameter's name here and its value.
    """
    graphdef, state = nnx.split(model)
    filled: list[Any] = []
    for path, variable in nnx.to_flat_state(state):
        here, numbers, like = *_named(path), variable.get_value()
        name, lead = table[here], _lead(table[here], numbers, like.shape)
        pieces = [
            _read(source, name, (*numbers, *index), like.shape[len(lead) :])
            for index in np.ndindex(*lead)
        ]
        array = np.stack(pieces).reshape(like.shape).astype(like.dtype)
        filled.append((path, variable.replace(put(here, array))))
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def called(model: Any, table: Table) -> set[str]:
    """What all weights of a model, which may be abstract, are called there."""
    names: set[str] = set()
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        here, numbers = _named(path)
        lead = _lead(table[here], numbers, variable.get_value().shape)
        names |= {table[here].text.format(*numbers, *index) for index in np.ndindex(*lead)}
    return names


def taken(model: Any, table: Table) -> Iterator[tuple[str, Array]]:
    """The weights of a model, under the names and in the layouts of there."""
    parts: dict[str, dict[int, Array]] = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        here, numbers = _named(path)
        name, array = table[here], np.asarray(variable.get_value())
        lead = _lead(name, numbers, array.shape)
        for index in np.ndindex(*lead):
            text = name.text.format(*numbers, *index)
            piece = LAYOUTS[name.layout][1](array[index], name.inputs)
            parts.setdefault(text, {})[name.part] = piece
            if len(parts[text]) == name.parts:
                pieces = [piece for _, piece in sorted(parts.pop(text).items())]
                yield text, np.ascontiguousarray(np.concatenate(pieces, axis=-1))


def _named(path: tuple[Any, ...]) -> tuple[str, Shape]:
    """A parameter's name in a table, and the numbers of the layers on the way to it."""
    words = [str(word) for word in path if not isinstance(word, int)]
    return ".".join(words), tuple(word for word in path if isinstance(word, int))


def _lead(name: Name, numbers: Shape, shape: Shape) -> Shape:
    """Sizes of the leading axes that are many arrays there."""
    return shape[: name.text.count("{}") - len(numbers)]


def _read(source: Mapping[str, Array], name: Name, numbers: Shape, shape: Shape) -> Array:
    text = name.text.format(*numbers)
    if text not in source:
        raise InputError(f"the weights have no {text}: they are of another model")
    array = LAYOUTS[name.layout][0](source[text])
    array = np.split(array, name.parts, axis=-1)[name.part]
    if array.size != math.prod(shape):
        raise InputError(f"{text} has {array.size} elements, and {math.prod(shape)} are needed")
    return array.reshape(shape)
