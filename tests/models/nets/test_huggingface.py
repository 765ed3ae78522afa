"""Folders of weights: written, read back, and refused where they are of something else."""

import json
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from models.errors import InputError
from models.nets.config_json import read, write
from models.nets.huggingface import load, save
from models.nets.presets import PRESETS
from tests.models.nets.sizes import DECODERS, drawn


@pytest.fixture(scope="module", params=DECODERS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model and its folder, in several files."""
    model, folder = drawn(DECODERS[request.param]), tmp_path_factory.mktemp("saved") / "folder"
    save(model, folder, shard=20_000)
    return model, folder


def test_saved_model_is_loaded_back_with_equal_weights(saved: tuple[Any, Path]) -> None:
    model, folder = saved
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    back = load(folder, query_chunk_size=5)
    assert back.config == model.config
    chex.assert_trees_all_equal(nnx.state(back), nnx.state(model))
    unrolled = load(folder, scan_layers=False)
    first = nnx.to_pure_dict(nnx.state(unrolled.layers.each[1]))
    expected = jax.tree.map(lambda x: x[1], nnx.to_pure_dict(nnx.state(model.layers.each)))
    chex.assert_trees_all_equal(first, expected)


def test_the_first_gpt2_was_published_under_shorter_names(tmp_path: Path) -> None:
    model, folder = drawn(DECODERS["gpt2"]), tmp_path / "folder"
    save(model, folder, ml_dtypes.bfloat16)
    arrays = load_file(folder / "model.safetensors")
    assert {x.dtype for x in arrays.values()} == {jnp.dtype("bfloat16")}
    short = {name.removeprefix("transformer."): x for name, x in arrays.items()}
    save_file(short | {"h.0.attn.bias": short["ln_f.bias"]}, folder / "model.safetensors")
    chex.assert_trees_all_close(nnx.state(load(folder)), nnx.state(model), rtol=1e-2, atol=1e-3)


NAMED = [n for n in PRESETS if n.startswith(("gpt2", "llama", "qwen", "mixtral"))]


@pytest.mark.parametrize("name", NAMED)
def test_configurations_are_read_as_they_were_written(name: str) -> None:
    assert read(json.loads(json.dumps(write(PRESETS[name])))) == PRESETS[name]


def test_mismatched_unsupported_or_damaged_huggingface_folders_raise(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with pytest.raises(InputError, match=r"cannot read .*config.json"):
        load(folder)
    save(drawn(DECODERS["llama"]), folder)
    with pytest.raises(InputError, match="exists: name a new folder"):
        save(drawn(DECODERS["llama"]), folder)

    config = json.loads((folder / "config.json").read_text())
    arrays = load_file(folder / "model.safetensors")

    def refused(match: str, **changes: Any) -> None:
        (folder / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(InputError, match=match):
            load(folder)

    refused("use one of gpt2, llama, mixtral, qwen3", model_type="bert")
    refused("attention_bias True, which is not supported: only False is", attention_bias=True)
    refused("positions of type yarn", rope_parameters={"rope_type": "yarn"})
    refused("has 1952 elements, but the model has 2440", hidden_size=40, head_dim=8)
    refused("no array model.layers.2", num_hidden_layers=3)
    refused("weights that this kind of model lacks: model.layers.1", num_hidden_layers=1)
    save_file(arrays | {"extra": arrays["model.norm.weight"]}, folder / "model.safetensors")
    refused("weights that this kind of model lacks: extra")
    (folder / "model.safetensors").write_bytes(b"damaged")
    refused(r"cannot read .*model.safetensors")
