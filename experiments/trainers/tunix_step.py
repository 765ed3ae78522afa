"""The training step of Tunix's own trainer for its unrolled Llama, built without running it."""

from __future__ import annotations

import contextlib
import os
from typing import Any

os.environ["WANDB_MODE"] = "disabled"
import jax
import jax.numpy as jnp
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs]
from flax import nnx
from tunix.models.llama3 import model  # pyright: ignore[reportMissingImports]
from tunix.sft import peft_trainer  # pyright: ignore[reportMissingImports]

# The settings of the model, and the batch.
SETTINGS = {
    "num_layers": 4, "vocab_size": 512, "embed_dim": 256, "hidden_dim": 1024, "num_heads": 4,
    "head_dim": 64, "num_kv_heads": 4, "rope_theta": 500_000, "norm_eps": 1e-5,
}  # fmt: skip
BATCH, TOKENS = 16, 256
# Tunix's names for its policies: the one with the fewest bytes, and the one that saves everything.
POLICIES = {"full": "DECODER", "minimal": "NONE"}


def _inputs(batch: Any) -> dict[str, Any]:
    """Return the arguments of Tunix's loss."""
    n, length = batch.input_tokens.shape
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (n, length, length))
    return {
        "input_tokens": batch.input_tokens, "input_mask": batch.input_mask,
        "positions": jnp.broadcast_to(jnp.arange(length), (n, length)), "attention_mask": causal,
    }  # fmt: skip


class Step:
    """Tunix's training step with some settings: its function, arguments and options of `jit`."""

    def __init__(self, remat_policy: str) -> None:
        self.mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
        of_model = model.ModelConfig(
            **SETTINGS, remat_config=model.RematConfig[POLICIES[remat_policy]]
        )
        with self.mesh:
            config = peft_trainer.TrainingConfig(eval_every_n_steps=1000, max_steps=1)
            trainer = peft_trainer.PeftTrainer(
                model.Llama3(of_model, rngs=nnx.Rngs(0)), optax.adamw(1e-3), config
            ).with_gen_model_input_fn(_inputs)
        graph, state = nnx.split((trainer.model, trainer.optimizer))
        tokens = jax.ShapeDtypeStruct((BATCH, TOKENS), "int32")

        def run(state: Any, tokens: Any, mask: Any) -> Any:
            trained = nnx.merge(graph, state)
            batch = peft_trainer.TrainingInput(tokens, mask)
            results = trainer._train_step(*trained, batch)  # pyright: ignore[reportPrivateUsage]
            return nnx.state(trained), results

        self.run, self.options = run, {"donate_argnums": 0}
        self.args = (jax.eval_shape(lambda: state), tokens, tokens)

    def on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        """Enter the mesh of one device."""
        return self.mesh
