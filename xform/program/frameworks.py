"""Choose the line of a model among the Python frames of an operation.

An operation has many frames. They are in JAX, in the framework that a layer is written in, in the
model, and in the script that runs the model. The model's line tells the most. It is often in an
installed package: MaxText is one. So where a file is installed does not matter. Only these files
are not the model's: JAX, xform, Python's standard library, and the frameworks in `_FRAMEWORKS`.
Libraries that convert arrays to NumPy's, such as SciPy, are among them.

A framework's own layers, losses and solvers are not the model's line either. All models share the
line in `flax.linen.Dense`, and the line that calls the layer tells which layer it is. But if a
framework's own training loop calls the model, as Keras' `fit` does, then the line that calls the
loop is the same for every operation, and the framework's layer tells more.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterable
from typing import NamedTuple

import jax

from xform.introspection.loaded import names_of


class _Framework(NamedTuple):
    """Files of a framework, as regular expressions of paths in its folder.

    Attributes:
      layers: files of layers, losses and solvers. All other files only pass calls on.
      loops: files of training loops, which call the model.
    """

    layers: str = r"(?!)"
    loops: str = r"(?!)"


_EVERY_FILE = ""
_FRAMEWORKS = {
    "aqt": _Framework(),
    "chex": _Framework(),
    "diffrax": _Framework(_EVERY_FILE),
    "distrax": _Framework(_EVERY_FILE),
    "einops": _Framework(),
    "equinox": _Framework("nn/"),
    "flax": _Framework(r"(linen|nnx/nn)/(?!module|transforms)"),
    "haiku": _Framework(r"_src/(?!module|transform|stateful|lift|layer_stack|base)"),
    "jax": _Framework(),
    "jaxlib": _Framework(),
    "jaxtyping": _Framework(),
    "keras": _Framework(r"src/(layers|losses|optimizers)/(?!layer\.py)",
                        r"src/(trainers|backend/jax/trainer)"),
    "keras_hub": _Framework("src/(layers|models)/"),
    "lineax": _Framework(_EVERY_FILE),
    "matplotlib": _Framework(),
    "numpy": _Framework(),
    "numpyro": _Framework(_EVERY_FILE),
    "optax": _Framework(_EVERY_FILE),
    "optimistix": _Framework(_EVERY_FILE),
    "pandas": _Framework(),
    "qwix": _Framework(),
    "rlax": _Framework(_EVERY_FILE),
    "scipy": _Framework(),
    "sklearn": _Framework(),
    "tensorflow": _Framework(),
    "tensorflow_probability": _Framework(_EVERY_FILE),
    "torch": _Framework(),
}  # fmt: skip

# The folders of xform, JAX and Python's standard library.
XFORM = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_JAX = os.path.dirname(os.path.abspath(jax.__file__ or "")) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_INSTALLED_PACKAGE = re.compile(r"(?:site|dist)-packages[/\\]")
_INSTALLED = re.compile(rf"[/\\](?:site|dist)-packages[/\\]({'|'.join(_FRAMEWORKS)})[/\\]")


def line_of_model(frames: Iterable[tuple[str, str]]) -> str:
    """Return the line of a model among the frames of an operation; "" if there are no frames.

    Args:
      frames: pairs of the path of a file and the text of its line, the innermost first, without the
        frames of JAX, xform and Python's standard library.

    Returns:
      The innermost line outside of frameworks. If a framework's training loop calls the model and
      has no such line inside, the innermost line of a framework's layer; else the innermost line.

    >>> from xform.program.frameworks import line_of_model
    >>> layer = ("/lib/site-packages/flax/linen/linear.py", "linear.py:271")
    >>> line_of_model([layer, ("/lib/site-packages/maxtext/llama2.py", "llama2.py:170")])
    'llama2.py:170'
    >>> line_of_model([layer])
    'linear.py:271'
    """
    first = layer = ""
    for path, line in frames:
        framework, inside = _in_framework(path)
        if framework is None:
            return line
        first = first or line
        if re.match(framework.loops, inside):
            return layer or first
        if not layer and re.match(framework.layers, inside):
            layer = line
    return layer or first


def is_library(path: str) -> bool:
    """Return whether a file is part of xform, JAX or Python's standard library.

    Without a virtual environment, packages are installed in a folder inside the standard library's.
    They are no part of it.

    >>> from xform.program.frameworks import is_library
    >>> is_library(jax.__file__), is_library("/me/train.py")
    (True, False)
    """
    if path.startswith((XFORM, _JAX)):
        return True
    return path.startswith(_STANDARD_LIBRARY) and not _INSTALLED_PACKAGE.match(
        path, len(_STANDARD_LIBRARY)
    )


def is_framework(path: str) -> bool:
    """Return whether a file is part of a framework, and so never a model's own."""
    return _in_framework(path)[0] is not None


@functools.lru_cache(maxsize=2**14)
def _in_framework(path: str) -> tuple[_Framework | None, str]:
    """Return the framework that a file is part of, and its path in the framework's folder.

    A framework need not be installed: it may be a checkout that Python imports.
    """
    if found := _INSTALLED.search(path):
        return _FRAMEWORKS[found[1]], path[found.end() :].replace(os.sep, "/")
    for name, framework in _FRAMEWORKS.items():
        file = names_of(sys.modules.get(name)).get("__file__")
        folder = os.path.dirname(os.path.abspath(file)) + os.sep if isinstance(file, str) else None
        if folder and path.startswith(folder):
            return framework, path[len(folder) :].replace(os.sep, "/")
    return None, ""
