"""The training step of Keras's own trainer for a GPT of its layers, built without running it."""

from __future__ import annotations

import contextlib
import os
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
import jax
import keras  # pyright: ignore[reportMissingImports]

from experiments.trainers import keras_gpt

SIZES = {"width": 256, "tokens": 256, "vocabulary": 512}
BATCH = 16
# Keras's modes of remat for a block: everything is recomputed, and everything is saved.
MODES = {"full": "list_of_layers", "minimal": None}


class Step:
    """Keras's training step: its function, arguments and options of `jit`."""

    def __init__(self, remat_policy: str) -> None:
        blocks = [f"block_{i}" for i in range(keras_gpt.LAYERS)]
        with keras.RematScope(mode=MODES[remat_policy], layer_names=blocks):
            self._model: Any = keras_gpt.model(**SIZES)
        self._model.optimizer.build(self._model.trainable_variables)
        tokens = jax.ShapeDtypeStruct((BATCH, SIZES["tokens"]), "int32")
        self._model._symbolic_build(data_batch=(tokens, tokens))
        state = self._model._get_jax_state(
            trainable_variables=True, non_trainable_variables=True, optimizer_variables=True,
            metrics_variables=True,
        )  # fmt: skip
        self.args = jax.eval_shape(lambda: state), (tokens, tokens)
        self.run, self.options = self._model.train_step, {"donate_argnums": 0}

    def on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        """Enter no mesh: the step runs on one device."""
        return contextlib.nullcontext()
