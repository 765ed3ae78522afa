"""What a model says as an artifact of `jax.export`, which runs with JAX alone: no model's code.

A folder has the function, of any number of examples of one shape, and its parameters in
safetensors. Of a decoder it makes logits of sequences of as many tokens as the model's context;
those that are shorter are padded at their end: no logits see it.
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

FUNCTION, PARAMS = "logits.jax", "params.safetensors"
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def save(model: Any, path: Path, dtype: Any = jnp.float32, platforms: Sequence[str] = (),
         reads: jax.ShapeDtypeStruct | None = None) -> None:  # fmt: skip
    """Write the folder; it is there whole, or not at all.

    Args:
      model: of a kind that is trained.
      path: the folder, which is not there yet.
      dtype: of the parameters.
      platforms: where it will run, of `PLATFORMS`; where it is written if none.
      reads: the type of an example; tokens of a decoder's context if None.

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
    named = {".".join(map(str, place)): x for place, x in nnx.to_flat_state(state)}
    structure, answer = jax.tree.structure(state), OBJECTIVES[type(model.config)].answer
    params = {
        name: x[...].astype(dtype) if isinstance(x, nnx.Param) else x[...]
        for name, x in named.items()
    }

    def logits(params: dict[str, jax.Array], examples: jax.Array) -> jax.Array:
        state = jax.tree.unflatten(structure, [params[name] for name in named])
        merged = nnx.merge(graphdef, state)
        merged.eval()
        return answer(merged, examples)

    if reads is None:
        reads = jax.ShapeDtypeStruct((model.config.context,), jnp.int32)
    (batch,) = jax.export.symbolic_shape("batch")
    examples = reads.update(shape=(batch, *reads.shape))
    made = jax.export.export(jax.jit(logits), platforms=platforms or None)(params, examples)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as work:
        folder = Path(work) / path.name
        folder.mkdir()
        (folder / FUNCTION).write_bytes(made.serialize())
        save_file(params, folder / PARAMS)
        folder.rename(path)


def load(path: Path) -> Callable[[jax.Array], jax.Array]:
    """The function of a folder: of a decoder, float32 logits `[B, T, V]` of int32 `[B, T]`.

    Of pictures uint8 `[B, height, width, channels]` it makes logits of each or of each pixel; of
    series float32 `[B, T, F]` what follows on each moment.
    """
    made = jax.export.deserialize(bytearray((path / FUNCTION).read_bytes()))
    params = load_file(path / PARAMS)
    return lambda examples: made.call(params, examples)
