"""The names of each model's parameters in `transformers` and `torch.nn`.

Each table maps a name in our model, called `here`, to the name and layout in the other
implementation, called `there`. `{}` stands for the index of a layer or expert.
"""

from __future__ import annotations

from models.nets.weights import Name, Table


def linear(here: str, there: str, layout: str = "out in", inputs: int = 1) -> dict[str, Name]:
    """Name the kernel and the bias of a linear layer or a convolution."""
    return {
        f"{here}.kernel": Name(f"{there}.weight", layout, inputs),
        f"{here}.bias": Name(f"{there}.bias"),
    }


def _norm(here: str, there: str) -> dict[str, Name]:
    """Name the scale and the bias of a norm."""
    return {f"{here}.scale": Name(f"{there}.weight"), f"{here}.bias": Name(f"{there}.bias")}


def batch_norm(here: str, there: str) -> dict[str, Name]:
    """Name the parameters and the running statistics of a batch norm."""
    statistics = {
        f"{here}.mean": Name(f"{there}.running_mean"),
        f"{here}.var": Name(f"{there}.running_var"),
    }
    return _norm(here, there) | statistics


def _fused(here: str, there: str, words: tuple[str, ...]) -> dict[str, Name]:
    """Name several linear layers here, with the names in `words`, that are one layer there."""
    parts = len(words)
    return {
        f"{here}.{word}.{ours}": Name(f"{there}.{theirs}", layout, 1, i, parts)
        for i, word in enumerate(words)
        for ours, theirs, layout in (("kernel", "weight", "in out"), ("bias", "bias", "flat"))
    }


_GPT2 = "transformer.h.{}"
GPT2: Table = {
    "embed.embedding": Name("transformer.wte.weight", "same"),
    "positions.embedding": Name("transformer.wpe.weight", "same"),
    **_norm("layers.each.attention_norm", f"{_GPT2}.ln_1"),
    **_fused("layers.each.attention", f"{_GPT2}.attn.c_attn", ("query", "key", "value")),
    **linear("layers.each.attention.out", f"{_GPT2}.attn.c_proj", "in out", 2),
    **_norm("layers.each.mlp_norm", f"{_GPT2}.ln_2"),
    **linear("layers.each.mlp.up", f"{_GPT2}.mlp.c_fc", "in out"),
    **linear("layers.each.mlp.down", f"{_GPT2}.mlp.c_proj", "in out"),
    **_norm("norm", "transformer.ln_f"),
}

_LLAMA = "model.layers.{}"
_EXPERT = f"{_LLAMA}.block_sparse_moe.experts.{{}}"
LLAMA: Table = {
    "embed.embedding": Name("model.embed_tokens.weight", "same"),
    **_norm("layers.each.attention_norm", f"{_LLAMA}.input_layernorm"),
    **linear("layers.each.attention.query", f"{_LLAMA}.self_attn.q_proj"),
    **linear("layers.each.attention.key", f"{_LLAMA}.self_attn.k_proj"),
    **linear("layers.each.attention.value", f"{_LLAMA}.self_attn.v_proj"),
    **linear("layers.each.attention.out", f"{_LLAMA}.self_attn.o_proj", inputs=2),
    **_norm("layers.each.attention.query_norm", f"{_LLAMA}.self_attn.q_norm"),
    **_norm("layers.each.attention.key_norm", f"{_LLAMA}.self_attn.k_norm"),
    **_norm("layers.each.mlp_norm", f"{_LLAMA}.post_attention_layernorm"),
    **linear("layers.each.mlp.gate", f"{_LLAMA}.mlp.gate_proj"),
    **linear("layers.each.mlp.up", f"{_LLAMA}.mlp.up_proj"),
    **linear("layers.each.mlp.down", f"{_LLAMA}.mlp.down_proj"),
    **linear("layers.each.mixture.router", f"{_LLAMA}.block_sparse_moe.gate"),
    "layers.each.mixture.gate": Name(f"{_EXPERT}.w1.weight", "out in"),
    "layers.each.mixture.up": Name(f"{_EXPERT}.w3.weight", "out in"),
    "layers.each.mixture.down": Name(f"{_EXPERT}.w2.weight", "out in"),
    **_norm("norm", "model.norm"),
    **linear("head", "lm_head"),
}

_VIT = "vit.encoder.layer.{}"
VIT: Table = {
    **linear("patches", "vit.embeddings.patch_embeddings.projection", "out in places"),
    "first": Name("vit.embeddings.cls_token", "boxed"),
    "positions": Name("vit.embeddings.position_embeddings", "boxed"),
    **_norm("layers.each.attention_norm", f"{_VIT}.layernorm_before"),
    **linear("layers.each.attention.query", f"{_VIT}.attention.attention.query"),
    **linear("layers.each.attention.key", f"{_VIT}.attention.attention.key"),
    **linear("layers.each.attention.value", f"{_VIT}.attention.attention.value"),
    **linear("layers.each.attention.out", f"{_VIT}.attention.output.dense", inputs=2),
    **_norm("layers.each.mlp_norm", f"{_VIT}.layernorm_after"),
    **linear("layers.each.mlp.up", f"{_VIT}.intermediate.dense"),
    **linear("layers.each.mlp.down", f"{_VIT}.output.dense"),
    **_norm("norm", "vit.layernorm"),
    **linear("head", "classifier"),
}


def _normed(here: str, there: str) -> dict[str, Name]:
    """Name the parameters of a convolution with a batch norm."""
    return {
        f"{here}.convolution.kernel": Name(f"{there}.convolution.weight", "out in places"),
        **batch_norm(f"{here}.norm", f"{there}.normalization"),
    }


_RESNET = "resnet.encoder.stages.{}.layers.{}"
RESNET: Table = {
    **_normed("stem", "resnet.embedder.embedder"),
    **_normed("stages.parts", f"{_RESNET}.layer.{{}}"),
    **_normed("stages.shortcut", f"{_RESNET}.shortcut"),
    **linear("head", "classifier.1"),
}

# The layers of a `torch.nn.LSTM` or `torch.nn.GRU`.
RECURRENT: Table = {
    "layers.input.kernel": Name("weight_ih_l{}", "out in"),
    "layers.input.bias": Name("bias_ih_l{}"),
    "layers.recur.kernel": Name("weight_hh_l{}", "out in"),
    "layers.recur.bias": Name("bias_hh_l{}"),
}
