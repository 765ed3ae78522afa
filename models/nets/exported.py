"""A decoder's logits as an artifact of `jax.export`, which runs with JAX alone: no model's code.

A folder has the function, of any number of sequences of as many tokens as the model's context, and
its parameters in safetensors. Sequences that are shorter are padded at their end: no logits see it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from safetensors.flax import load_file, save_file

from models.errors import InputError
from models.settings import nearest

FUNCTION, PARAMS = "logits.jax", "params.safetensors"
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def save(model: Any, path: Path, dtype: Any = jnp.float32, platforms: Sequence[str] = ()) -> None:
    """Write the folder; it is there whole, or not at all.

    Args:
      model: a decoder.
      path: the folder, which is not there yet.
      dtype: of the parameters.
      platforms: where it will run, of `PLATFORMS`; where it is written if none.

    Raises:
      InputError: the folder is there, or a platform is not known.
    """
    if path.exists():
        raise InputError(f"{path} exists: name a new folder, or remove it")
    for platform in platforms:
        if platform not in PLATFORMS:
            near = nearest(platform, PLATFORMS)
            raise InputError(f"--platform {platform} is none of {', '.join(PLATFORMS)}{near}")
    graphdef, state = nnx.split(model)
    names = [".".join(map(str, place)) for place, _ in nnx.to_flat_state(state)]
    arrays, structure = jax.tree.flatten(state)
    params = {name: x.astype(dtype) for name, x in zip(names, arrays, strict=True)}

    def logits(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        state = jax.tree.unflatten(structure, [params[name] for name in names])
        return nnx.merge(graphdef, state)(tokens)

    (batch,) = jax.export.symbolic_shape("batch")
    tokens = jax.ShapeDtypeStruct((batch, model.config.context), jnp.int32)
    made = jax.export.export(jax.jit(logits), platforms=platforms or None)(params, tokens)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as work:
        folder = Path(work) / path.name
        folder.mkdir()
        (folder / FUNCTION).write_bytes(made.serialize())
        save_file(params, folder / PARAMS)
        folder.rename(path)


def load(path: Path) -> Callable[[jax.Array], jax.Array]:
    """The function of a folder: float32 logits `[B, T, V]` of int32 tokens `[B, T]`."""
    made = jax.export.deserialize(bytearray((path / FUNCTION).read_bytes()))
    params = load_file(path / PARAMS)
    return lambda tokens: made.call(params, tokens)
