"""GPT-2, Llama, Mixtral and Qwen 3 against `transformers`, loaded and saved in both directions."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.nets import config_json
from models.nets.huggingface import load, save
from models.nets.presets import PRESETS
from tests.models.nets.sizes import SIZES, tokens
from tests.models.nets.twins import CLOSE, drawn, torch, weights

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
transformers = pytest.importorskip("transformers")
IDS: Any = {"bos_token_id": 1, "eos_token_id": 2}
LLAMA: Any = {
    "vocab_size": SIZES["vocab"],
    "max_position_embeddings": SIZES["context"],
    "hidden_size": SIZES["width"],
    "intermediate_size": 48,
    "num_hidden_layers": SIZES["depth"],
    "num_attention_heads": SIZES["heads"],
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    **IDS,
}
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def twin(kind: str) -> Any:
    """Return a small model of `transformers` with random weights."""
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=SIZES["vocab"],
            n_positions=SIZES["context"],
            n_embd=SIZES["width"],
            n_layer=SIZES["depth"],
            n_head=SIZES["heads"],
            **IDS,
        )
        return drawn(transformers.GPT2LMHeadModel(config))
    if kind == "mixtral":
        config = transformers.MixtralConfig(**LLAMA, num_local_experts=4, output_router_logits=True)
        return drawn(transformers.MixtralForCausalLM(config))
    if kind == "qwen3":
        config = transformers.Qwen3Config(**LLAMA, head_dim=10)
        return drawn(transformers.Qwen3ForCausalLM(config))
    rope = {"rope_type": "default", "rope_theta": 10_000.0} if kind == "llama2" else STRETCHED
    config = transformers.LlamaConfig(
        **LLAMA, rope_parameters=rope, tie_word_embeddings=kind == "tied"
    )
    return drawn(transformers.LlamaForCausalLM(config))


def answers(other: Any, ids: Any) -> Any:
    """Return logits and loss of a twin."""
    x = torch.tensor(np.asarray(ids, np.int64))
    with torch.no_grad():
        return other(x, labels=x)


@pytest.mark.parametrize("kind", ["gpt2", "llama2", "llama3", "tied", "qwen3", "mixtral"])
def test_logits_and_loss_are_those_of_transformers_both_ways(kind: str, tmp_path: Path) -> None:
    theirs, ids = twin(kind), tokens()
    expected = answers(theirs, ids)
    theirs.save_pretrained(
        tmp_path / "theirs", max_shard_size="20KB" if kind == "llama3" else "1GB"
    )
    assert (tmp_path / "theirs/model.safetensors.index.json").exists() == (kind == "llama3")

    ours = load(tmp_path / "theirs", query_chunk_size=5)
    np.testing.assert_allclose(ours(ids), expected.logits.numpy(), **CLOSE)
    balance = 0.001 if kind == "mixtral" else 0.0  # their default
    loss = ours.loss(ids, chunk=5, balance=balance)
    # Their experts are counted over all tokens, ours only over tokens that predict something.
    np.testing.assert_allclose(loss, expected.loss.numpy(), rtol=2e-4 if balance else 1e-5)
    if balance:
        imbalance = ours.read(ids)[2].imbalance()
        np.testing.assert_allclose(imbalance, expected.aux_loss.numpy(), rtol=1e-4)

    save(ours, tmp_path / "ours", shard=20_000 if kind == "mixtral" else 10**9)
    assert (tmp_path / "ours/model.safetensors.index.json").exists() == (kind == "mixtral")
    back = type(theirs).from_pretrained(tmp_path / "ours").eval()
    before, after = weights(theirs), weights(back)
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(array, after[name], err_msg=name)
    np.testing.assert_allclose(answers(back, ids).logits, expected.logits, rtol=1e-5, atol=1e-6)


def test_presets_have_the_settings_of_their_twins() -> None:
    gpt2, ours = transformers.GPT2Config(), PRESETS["gpt2-124m"]
    assert config_json.read(gpt2.to_dict()) == ours
    assert config_json.read(transformers.MixtralConfig().to_dict()) == dataclasses.replace(
        PRESETS["mixtral-8x7b"], context=transformers.MixtralConfig().max_position_embeddings
    )
