"""A model as a `jax.export` artifact, which runs with JAX alone, without the model's code.

The folder holds the serialized function, for any number of examples of one shape, and its
parameters in safetensors. For a decoder, an example is a sequence as long as the model's context.
Shorter sequences are padded at the end, which does not change the logits of the other tokens.
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
from models.nets.objectives import OBJECTIVES
from models.settings import nearest

# The files in the folder.
FUNCTION, PARAMS = "logits.jax", "params.safetensors"
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def save(model: Any, path: Path, dtype: Any = jnp.float32, platforms: Sequence[str] = (),
         reads: jax.ShapeDtypeStruct | None = None) -> None:  # fmt: skip
    """Write the folder. It appears complete or not at all.

    Args:
      model: a model of a kind that the trainer trains.
      path: the folder to create.
      dtype: the dtype of the saved parameters.
      platforms: the platforms on which it will run, of `PLATFORMS`; empty for the current one.
      reads: shape and dtype of an example; None for a decoder, which reads tokens.

    Raises:
      InputError: the folder exists, or a platform is unknown.
    """
    if path.exists():
        raise InputError(f"{path} exists: name a new folder, or remove it")
    for platform in platforms:
        if platform not in PLATFORMS:
            near = nearest(platform, PLATFORMS)
            raise InputError(f"--platform {platform} is not one of {', '.join(PLATFORMS)}{near}")
    graphdef, state = nnx.split(model)
    variables = {".".join(map(str, path)): x for path, x in nnx.to_flat_state(state)}
    structure, output = jax.tree.structure(state), OBJECTIVES[type(model.config)].output
    params = {
        name: x[...].astype(dtype) if isinstance(x, nnx.Param) else x[...]
        for name, x in variables.items()
    }

    def logits(params: dict[str, jax.Array], examples: jax.Array) -> jax.Array:
        state = jax.tree.unflatten(structure, [params[name] for name in variables])
        merged = nnx.merge(graphdef, state)
        merged.eval()
        return output(merged, examples)

    if reads is None:
        reads = jax.ShapeDtypeStruct((model.config.context,), jnp.int32)
    (batch,) = jax.export.symbolic_shape("batch")
    examples = reads.update(shape=(batch, *reads.shape))
    exported = jax.export.export(jax.jit(logits), platforms=platforms or None)(params, examples)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as work:
        folder = Path(work) / path.name
        folder.mkdir()
        (folder / FUNCTION).write_bytes(exported.serialize())
        save_file(params, folder / PARAMS)
        folder.rename(path)


def load(path: Path) -> Callable[[jax.Array], jax.Array]:
    """Load the function of a folder.

    For a decoder it maps int32 `[B, T]` to float32 logits `[B, T, V]`. For pictures it maps uint8
    `[B, height, width, channels]` to the logits of each picture or of each pixel. For series it
    maps float32 `[B, T, F]` to the prediction for the time step after each.
    """
    exported = jax.export.deserialize(bytearray((path / FUNCTION).read_bytes()))
    params = load_file(path / PARAMS)
    return lambda examples: exported.call(params, examples)
