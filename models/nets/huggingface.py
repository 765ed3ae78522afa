"""Load models from Hugging Face folders (`config.json` and safetensors), and save them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from models.errors import InputError
from models.nets import config_json, names
from models.nets.gpt2 import GPT2Config
from models.nets.llama import LlamaConfig
from models.nets.presets import abstract
from models.nets.weights import Table, called, fill, taken

TABLES: dict[type[Any], Table] = {GPT2Config: names.GPT2, LlamaConfig: names.LLAMA}
# Arrays in such files that are ignored: masks, frequencies, a tied embedding's second name.
IGNORED = re.compile(r"\.attn\.(bias|masked_bias)$|rotary_emb\.inv_freq$|^lm_head\.weight$")
SHARD = 5 * 10**9  # maximum bytes of a file


class Folder(Mapping[str, np.ndarray]):
    """The arrays of a folder by name. An array is read when it is used."""

    def __init__(self, path: Path, inside: contextlib.ExitStack) -> None:
        index = path / "model.safetensors.index.json"
        files = {"model.safetensors"}
        if index.exists():
            files = set(json.loads(index.read_text())["weight_map"].values())
        self.where: dict[str, Any] = {}
        for name in sorted(files):
            try:
                file = inside.enter_context(safe_open(path / name, framework="numpy"))
            except (OSError, SafetensorError) as error:
                raise InputError(f"cannot read {path / name}: {error}") from error
            self.where |= dict.fromkeys(file.keys(), file)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.where[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.where)

    def __len__(self) -> int:
        return len(self.where)


def load(
    path: Path | str,
    put: Callable[[str, np.ndarray], Any] = lambda _, array: jnp.asarray(array),
    **changes: Any,
) -> Any:
    """Load a GPT-2, a Llama, a Mixtral or a Qwen 3 from a folder.

    Args:
      path: the folder.
      put: makes a JAX array, possibly sharded, from a parameter's name and value.
      **changes: fields of the configuration that `config.json` does not have, such as
        `scan_layers`, `remat` and `dtype`.

    Returns:
      The model, with float32 parameters.

    Raises:
      InputError: a file cannot be read, or the folder holds a model that is not supported.
    """
    path = Path(path)
    try:
        config = config_json.read(json.loads((path / "config.json").read_text()))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path / 'config.json'}: {error}") from error
    except KeyError as error:
        raise InputError(
            f"{path / 'config.json'} has no entry {error}: name a folder that transformers saved"
        ) from error
    config = dataclasses.replace(config, **changes)
    table, model = TABLES[type(config)], abstract(config)
    with contextlib.ExitStack() as inside:
        source = Folder(path, inside)
        bare = not any(name.startswith("transformer.") for name in source)
        if type(config) is GPT2Config and bare:  # the original release has no prefix
            table = {
                here: dataclasses.replace(name, text=name.text.removeprefix("transformer."))
                for here, name in table.items()
            }
        for name in sorted(source.keys() - called(model, table)):
            if not IGNORED.search(name):
                raise InputError(
                    f"{path} has weights that this kind of model lacks: {name}; the model is not"
                    " supported"
                )
        return fill(model, table, source, put)


def save(model: Any, path: Path | str, dtype: Any = np.float32, shard: int = SHARD) -> None:
    """Write a folder that `transformers` can load. It appears complete or not at all.

    Args:
      model: a GPT2 or Llama.
      path: the folder to create.
      dtype: the dtype of the saved weights.
      shard: the maximum bytes of a file. A larger array gets a file of its own.

    Raises:
      InputError: the folder exists.
    """
    path = Path(path)
    if path.exists():
        raise InputError(f"{path} exists: name a new folder, or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as made:
        folder = Path(made) / path.name
        folder.mkdir()
        written = config_json.write(model.config) | {"dtype": np.dtype(dtype).name}
        (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")
        _save_arrays(taken(model, TABLES[type(model.config)]), folder, np.dtype(dtype), shard)
        folder.rename(path)


def _save_arrays(
    arrays: Iterator[tuple[str, np.ndarray]], folder: Path, dtype: np.dtype[Any], shard: int
) -> None:
    """Write files of at most `shard` bytes, and an index if there are several."""
    parts: list[list[str]] = []
    batch: dict[str, np.ndarray] = {}
    size = total = 0

    def flush() -> None:
        save_file(batch, folder / f"{len(parts)}.safetensors", {"format": "pt"})
        parts.append(list(batch))
        batch.clear()

    for name, array in arrays:
        array = array.astype(dtype)
        if batch and size + array.nbytes > shard:
            flush()
            size = 0
        batch[name] = array
        size, total = size + array.nbytes, total + array.nbytes
    flush()
    if len(parts) == 1:
        (folder / "0.safetensors").rename(folder / "model.safetensors")
        return
    places: dict[str, str] = {}
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05}-of-{len(parts):05}.safetensors"
        (folder / f"{i}.safetensors").rename(folder / file)
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
