"""A GPT of keras.layers, trained with model.fit on random tokens, for a few steps."""

import os
import sys

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np
from keras import layers, ops

LAYERS, WIDTH, HEADS, TOKENS, VOCABULARY, BATCH = 4, 64, 4, 64, 128, 8


@keras.saving.register_keras_serializable()
class Block(layers.Layer):
    """A block of a GPT: causal attention and a perceptron, each with its residual connection."""

    def __init__(self, width=WIDTH, heads=HEADS, **kwargs):
        super().__init__(**kwargs)
        self.norms = layers.LayerNormalization(), layers.LayerNormalization()
        self.attention = layers.MultiHeadAttention(heads, width // heads)
        self.up, self.down = layers.Dense(4 * width, activation="gelu"), layers.Dense(width)

    def build(self, shape):
        """Create the weights."""
        for norm in self.norms:
            norm.build(shape)
        self.attention.build(shape, shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 4 * shape[-1]))
        super().build(shape)

    def call(self, x):
        """Return the block's output for `[batch, tokens, width]`."""
        h = self.norms[0](x)
        x = x + self.attention(h, h, use_causal_mask=True)
        return x + self.down(self.up(self.norms[1](x)))


class Printer(keras.callbacks.Callback):
    """Print the mean of the losses after each step."""

    def on_train_batch_end(self, batch, logs=None):
        """Print the loss."""
        print(f"loss {batch} {float(logs['loss'])!r}", flush=True)


def model(width=WIDTH, tokens=TOKENS, vocabulary=VOCABULARY) -> keras.Model:
    """Return a GPT that maps tokens to logits, compiled with an optimizer and a loss."""
    inputs = keras.Input((tokens,), dtype="int32")
    x = layers.Embedding(vocabulary, width)(inputs)
    x = x + layers.Embedding(tokens, width)(ops.arange(tokens))
    for i in range(LAYERS):
        x = Block(width, name=f"block_{i}")(x)
    gpt = keras.Model(inputs, layers.Dense(vocabulary)(layers.LayerNormalization()(x)))
    gpt.compile(
        optimizer=keras.optimizers.AdamW(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return gpt


def main() -> None:
    keras.utils.set_random_seed(0)
    sizes = BATCH * int(sys.argv[2]), TOKENS + 1
    text = np.random.default_rng(0).integers(VOCABULARY, size=sizes)
    model().fit(
        text[:, :-1], text[:, 1:], batch_size=BATCH, shuffle=False, verbose=0, callbacks=[Printer()]
    )


if __name__ == "__main__":
    main()
