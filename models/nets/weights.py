"""Convert weights between our models and other implementations.

"Here" is our model, and "there" is the other implementation. A table maps the name of each
parameter here to its name and layout there. One array here, with leading axes, may be many arrays
there: one for each layer or expert.
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
    """Reshape an array to a matrix whose rows are the first `inputs` axes."""
    return array.reshape(math.prod(array.shape[:inputs]), -1)


def _enlarging(array: Array) -> Array:
    """Convert the kernel of a transposed convolution: PyTorch's kernels are ours mirrored."""
    return array.transpose(2, 3, 0, 1)[::-1, ::-1]


# For each layout, two functions. The first converts an array from there to here, up to a reshape.
# The second converts it back, given the number of leading axes that are inputs.
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
    """The name and layout of a parameter there.

    Attributes:
      text: its name, with {} for the index of a layer or expert.
      layout: its layout, a key of `LAYOUTS`.
      inputs: the number of leading axes here that are inputs.
      part, parts: an array there may hold `parts` parameters here, concatenated along its last
        axis. This parameter is number `part` of these.
    """

    text: str
    layout: str = "flat"
    inputs: int = 1
    part: int = 0
    parts: int = 1


Table = Mapping[str, Name]


def fill(
    model: Any,
    table: Table,
    source: Mapping[str, Array],
    put: Callable[[str, Array], Any] = lambda _, array: jnp.asarray(array),
) -> Any:
    """Return a model like `model` with the weights of `source`.

    Args:
      model: the model, which may be abstract. It decides the dtype of each parameter.
      table: the names and layouts in `source`.
      source: arrays by their names there.
      put: makes a JAX array, possibly sharded, from a parameter's name here and its value.

    Raises:
      InputError: an array is missing, or has another size.
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
    """Return the names there of all weights of a model, which may be abstract."""
    names: set[str] = set()
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        here, numbers = _named(path)
        lead = _lead(table[here], numbers, variable.get_value().shape)
        names |= {table[here].text.format(*numbers, *index) for index in np.ndindex(*lead)}
    return names


def taken(model: Any, table: Table) -> Iterator[tuple[str, Array]]:
    """Iterate over the weights of a model, with their names and layouts there."""
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
    """Split a path into a parameter's name in a table, and the indices of layers in the path."""
    words = [str(word) for word in path if not isinstance(word, int)]
    return ".".join(words), tuple(word for word in path if isinstance(word, int))


def _lead(name: Name, numbers: Shape, shape: Shape) -> Shape:
    """Return the sizes of the leading axes here that are separate arrays there."""
    return shape[: name.text.count("{}") - len(numbers)]


def _read(source: Mapping[str, Array], name: Name, numbers: Shape, shape: Shape) -> Array:
    """Read the array of a layer or expert with these indices, in the layout and shape here."""
    text = name.text.format(*numbers)
    if text not in source:
        raise InputError(f"the weights have no array {text}: they are of another model")
    array = LAYOUTS[name.layout][0](source[text])
    array = np.split(array, name.parts, axis=-1)[name.part]
    if array.size != math.prod(shape):
        raise InputError(
            f"{text} has {array.size} elements, but the model has {math.prod(shape)}: the weights"
            " are of another model"
        )
    return array.reshape(shape)
