"""Tunix's own trainer on a small Llama with unrolled layers, on random tokens, for a few steps."""

import os
import sys

os.environ["WANDB_MODE"] = "disabled"
import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.llama3 import model
from tunix.sft import peft_trainer

LAYERS, TOKENS, BATCH, VOCABULARY = 4, 64, 8, 128
config = model.ModelConfig(
    num_layers=LAYERS, vocab_size=VOCABULARY, embed_dim=64, hidden_dim=256, num_heads=4,
    head_dim=16, num_kv_heads=2, rope_theta=500_000, norm_eps=1e-5,
    remat_config=model.RematConfig[os.environ.get("REMAT", "NONE")],
)  # fmt: skip
steps = int(sys.argv[2])
text = np.random.default_rng(0).integers(VOCABULARY, size=(steps, BATCH, TOKENS))
mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))


class Printer(peft_trainer.PeftTrainer):
    """A trainer that prints its losses."""

    def _log_metrics(self, loss, *args, **kwargs):
        print(f"loss {self.train_steps} {float(loss)!r}", flush=True)


def inputs(batch):
    """Return the arguments of the loss."""
    shape = batch.input_tokens.shape
    causal = np.broadcast_to(np.tril(np.ones((TOKENS, TOKENS), bool)), (BATCH, TOKENS, TOKENS))
    return {
        "input_tokens": batch.input_tokens, "input_mask": batch.input_mask,
        "positions": np.broadcast_to(np.arange(TOKENS), shape), "attention_mask": causal,
    }  # fmt: skip


with mesh:
    trainer = Printer(
        model.Llama3(config, rngs=nnx.Rngs(0)),
        optax.adamw(1e-3),
        peft_trainer.TrainingConfig(eval_every_n_steps=1000, max_steps=steps),
    ).with_gen_model_input_fn(inputs)
    batches = [peft_trainer.TrainingInput(tokens, np.ones_like(tokens)) for tokens in text]
    trainer.train(batches)
