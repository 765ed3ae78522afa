"""A decoder that was exported gives the logits of the decoder, for any number of sequences."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from models.errors import InputError
from models.nets.exported import load, save
from models.nets.presets import TRAINED, build, parameter_count
from tests.models.micro import MODEL

CONFIGS = {
    "gpt2": dataclasses.replace(MODEL, query_chunk_size=8),
    "llama": dataclasses.replace(
        TRAINED["tiny-llama"], context=16, width=32, depth=2, heads=4, scan_layers=False
    ),
}
TOKENS = np.random.default_rng(0).integers(0, 256, (5, 16), dtype=np.int32)


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_equal(kind: str, tmp_path: Path) -> None:
    model = build(CONFIGS[kind])
    save(model, tmp_path / "there" / "it")
    logits = load(tmp_path / "there" / "it")
    expected = jax.jit(lambda tokens: model(tokens))
    for rows in (TOKENS, TOKENS[:2]):
        np.testing.assert_array_equal(logits(rows), expected(rows))
    # What comes after a token changes nothing.
    padded = np.where(np.arange(16) < 9, TOKENS, 0)
    np.testing.assert_array_equal(logits(padded)[:, :9], logits(TOKENS)[:, :9])


def test_parameters_of_another_dtype(tmp_path: Path) -> None:
    model = build(CONFIGS["gpt2"])
    save(model, tmp_path / "it", "bfloat16", ("cpu", "cuda", "tpu"))
    size = (tmp_path / "it" / "params.safetensors").stat().st_size
    assert size == pytest.approx(2 * parameter_count(model), rel=0.1)
    np.testing.assert_allclose(load(tmp_path / "it")(TOKENS), model(TOKENS), atol=0.05)


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    model = build(CONFIGS["gpt2"])
    with pytest.raises(InputError, match=r"exists: name a new folder"):
        save(model, tmp_path)
    with pytest.raises(
        InputError, match=r"--platform cud is not one of .*did you mean cuda"
    ) as raised:
        save(model, tmp_path / "it", platforms=("cud",))
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())
