"""Convert the `config.json` of a Hugging Face folder to a model configuration, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from models.errors import InputError
from models.nets.gpt2 import GPT2Config
from models.nets.llama import LlamaConfig

Json = Mapping[str, Any]


def read(config: Json) -> GPT2Config | LlamaConfig:
    """Return the model configuration; `InputError` names a setting that is not supported."""
    kind = config.get("model_type")
    if kind not in READERS:
        raise InputError(f"config.json has the model type {kind}, which is not supported: use one"
                         f" of {', '.join(READERS)}")  # fmt: skip
    return READERS[kind](config)


def write(config: GPT2Config | LlamaConfig) -> dict[str, Any]:
    """Return a `config.json` for the same model in `transformers`."""
    return _write_gpt2(config) if isinstance(config, GPT2Config) else _write_llama(config)


def _gpt2(config: Json) -> GPT2Config:
    width = config["n_embd"]
    _require(
        config,
        activation_function=("gelu_new", "gelu_pytorch_tanh"),
        n_inner=(None, 4 * width),
        scale_attn_by_inverse_layer_idx=(False,),
        scale_attn_weights=(True,),
        add_cross_attention=(False,),
        tie_word_embeddings=(True,),
    )
    return GPT2Config(
        vocab=config["vocab_size"],
        context=config["n_positions"],
        width=width,
        depth=config["n_layer"],
        heads=config["n_head"],
        norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
        dropout=config.get("resid_pdrop", 0.1),
    )


def _write_gpt2(config: GPT2Config) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "vocab_size": config.vocab,
        "n_positions": config.context,
        "n_embd": config.width,
        "n_layer": config.depth,
        "n_head": config.heads,
        "layer_norm_epsilon": config.norm_epsilon,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": True,
    }


def _llama(config: Json) -> LlamaConfig:
    context = config["max_position_embeddings"]
    window = config.get("sliding_window")
    _require(config, hidden_act=("silu",), attention_bias=(False,), mlp_bias=(False,))
    if config.get("use_sliding_window", True):
        _require(config, sliding_window=(None, window if window and window >= context else None))
    heads, width = config["num_attention_heads"], config["hidden_size"]
    each = config.get("head_dim")
    return LlamaConfig(
        vocab=config["vocab_size"],
        context=context,
        width=width,
        depth=config["num_hidden_layers"],
        heads=heads,
        norm_epsilon=config["rms_norm_eps"],
        kv_heads=config.get("num_key_value_heads") or heads,
        mlp_width=config["intermediate_size"],
        head_width=0 if each in (None, width // heads) else each,
        qk_norm=config["model_type"] == "qwen3",
        tie_embeddings=config.get("tie_word_embeddings", False),
        experts=config.get("num_local_experts", 0),
        experts_per_token=config.get("num_experts_per_tok", 2),
        **_positions(config),
    )


def _positions(config: Json) -> dict[str, Any]:
    """Read `rope_parameters`, or `rope_theta` and `rope_scaling` of `transformers` before 5."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = rope.get("rope_theta") or config.get("rope_theta", 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_theta": base}
    if kind != "llama3":
        raise InputError(f"config.json has rotary positions of type {kind}, which is not supported:"
                         " use default or llama3")  # fmt: skip
    return {
        "rope_theta": base,
        "rope_factor": rope["factor"],
        "rope_low_freq_factor": rope["low_freq_factor"],
        "rope_high_freq_factor": rope["high_freq_factor"],
        "rope_original_context": rope["original_max_position_embeddings"],
    }


def _write_llama(config: LlamaConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope_factor != 1:
        rope = {
            "rope_type": "llama3",
            "factor": config.rope_factor,
            "low_freq_factor": config.rope_low_freq_factor,
            "high_freq_factor": config.rope_high_freq_factor,
            "original_max_position_embeddings": config.rope_original_context,
        }
    if config.experts and config.qk_norm:
        raise InputError("a folder of transformers cannot have a model with experts and qk_norm:"
                         " transformers has no such model; use xform.export")  # fmt: skip
    name = "Mixtral" if config.experts else "Qwen3" if config.qk_norm else "Llama"
    written = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": name.lower(),
        "hidden_act": "silu",
        "vocab_size": config.vocab,
        "max_position_embeddings": config.context,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.each_head,
        "rms_norm_eps": config.norm_epsilon,
        "rope_parameters": rope | {"rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
    }
    experts = {"num_local_experts": config.experts, "num_experts_per_tok": config.experts_per_token}
    # `transformers` before version 5 reads the next two.
    older: dict[str, Any] = {"rope_theta": config.rope_theta}
    older |= {"rope_scaling": rope} if config.rope_factor != 1 else {}
    return written | older | (experts if config.experts else {})


def _require(config: Json, **allowed: tuple[Any, ...]) -> None:
    """Raise an `InputError` if a setting has a value that our models do not support."""
    for name, values in allowed.items():
        if name in config and config[name] not in values:
            known = " or ".join(str(value) for value in values)
            raise InputError(f"config.json has {name} {config[name]}, which is not supported: only"
                             f" {known} is")  # fmt: skip


READERS: dict[str, Callable[[Json], Any]] = {
    "gpt2": _gpt2, "llama": _llama, "mixtral": _llama, "qwen3": _llama
}  # fmt: skip
