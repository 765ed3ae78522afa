"""The steps of other people's trainers whose remat policies `run.py` compares with xform."""

from __future__ import annotations

import dataclasses
from typing import Any

# The bars: how much of the work of `full` may be recomputed within its bytes, how much of the
# temporary bytes of `minimal` a step without their policies may take, and how much more work.
HALF, SHARE, MORE = 0.5, 0.7, 0.05
# Settings of MaxText. Its Llama is in `maxtext_step.py`.
LLAMA = {"decoder_block": "llama2"}
GEMMA = {
    "decoder_block": "gemma2", "mlp_activations": ["gelu", "linear"], "logits_via_embedding": True,
    "final_logits_soft_cap": 30.0, "attn_logits_soft_cap": 50.0, "sliding_window_size": 128,
    "use_post_attn_norm": True, "use_post_ffw_norm": True,
}  # fmt: skip
EXPERTS = {
    "decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 1024, "sparse_matmul": False, "megablox": False, "capacity_factor": 1.25,
}  # fmt: skip
# Proportions of a trained model of 1.1 billion parameters, for eight devices.
REALISTIC = {
    "base_num_decoder_layers": 22, "base_emb_dim": 2048, "base_mlp_dim": 5632, "head_dim": 64,
    "base_num_query_heads": 32, "base_num_kv_heads": 4, "max_target_length": 2048,
    "per_device_batch_size": 4, "vocab_size": 32000,
}  # fmt: skip


LARGE = {"mixture of experts": {"base_moe_mlp_dim": 5632}}


@dataclasses.dataclass(frozen=True)
class Cell:
    """A step on a target.

    Attributes:
      trainer, model, size: the names of the step.
      settings: the settings of the trainer.
      devices: how many devices the step runs on.
      target: the target that compiles the step.
    """

    trainer: str
    model: str
    size: str
    settings: dict[str, Any]
    devices: int
    target: str

    @property
    def name(self) -> str:
        """The name of the cell in the file of results."""
        return f"{self.trainer}, {self.model}, {self.size}, {self.target}"

    @property
    def share_of_full(self) -> float:
        """How much of the temporary bytes of `full` the first budget grants."""
        return 1.5 if self.target.startswith("tpu") else 1.0


def _cells() -> list[Cell]:
    """Return all cells, the most telling first."""
    one = ("cpu", "gpu:h100", "tpu:v5e:1x1")
    eight = ("cpu:8", "gpu:h100:8", "tpu:v5e:2x4")
    models = {"Llama": LLAMA, "Gemma": GEMMA, "mixture of experts": EXPERTS}
    small = [Cell("MaxText", model, "small", given, 1, target)
             for model, given in models.items() for target in one]  # fmt: skip
    large = [Cell("MaxText", name, "realistic", REALISTIC | given | LARGE.get(name, {}), 8, target)
             for name, given in models.items() for target in eight]  # fmt: skip
    tunix = [Cell("Tunix", "Llama", "small", {}, 1, target) for target in one]
    keras = [Cell("Keras", "GPT", "small", {}, 1, target) for target in one]
    return [*small, *tunix, *keras, *large]


CELLS = {cell.name: cell for cell in _cells()}
