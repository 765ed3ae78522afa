"""Text from a trained model: `python -m models.sample --out FOLDER --prompt TEXT`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import typer
from flax import nnx

from models.cli import one_line_errors
from models.config import TransformerConfig
from models.errors import InputError
from models.optim import OptimConfig
from models.step import init_state
from models.store import Damaged, Store
from models.transformer import abstract_transformer


def generate(
    config: TransformerConfig,
    params: nnx.State,
    prompt: bytes,
    *,
    length: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> bytes:
    """Continue `prompt`, which holds at least one byte, by `length` bytes.

    Each byte is drawn from the model's scores divided by `temperature`; at 0 the best one is
    taken. The model reads the last `config.context` bytes.
    """
    window = config.context
    total = max(window, len(prompt) + length)
    tokens = jnp.zeros(total, jnp.int32).at[: len(prompt)].set(jnp.array([*prompt]))
    span = (len(prompt), len(prompt) + length)
    key = jax.random.key(seed)
    filled = _extend(config, temperature <= 0, params, tokens, span, temperature, key)
    return np.asarray(filled[: span[1]]).astype(np.uint8).tobytes()


@functools.partial(jax.jit, static_argnames=("config", "greedy"))
def _extend(
    config: TransformerConfig,
    greedy: bool,
    params: nnx.State,
    tokens: jax.Array,
    span: tuple[int, int],
    temperature: float,
    key: jax.Array,
) -> jax.Array:
    """Fill positions `span[0]` up to `span[1]` of `tokens` `[N]`, `N >= config.context`."""
    graphdef, _ = nnx.split(abstract_transformer(config))
    model = nnx.merge(graphdef, params)

    def fill(position: jax.Array, tokens: jax.Array) -> jax.Array:
        # What stands after `position` in the window is not read, since attention is causal.
        start = jnp.maximum(position - config.context, 0)
        window = jax.lax.dynamic_slice_in_dim(tokens, start, config.context)
        # A vocabulary may be larger than the 256 bytes that it was trained on.
        scores = model(window[None])[0, position - 1 - start, :256]
        if greedy:
            chosen = jnp.argmax(scores)
        else:
            step_key = jax.random.fold_in(key, position)
            chosen = jax.random.categorical(step_key, scores / temperature)
        return tokens.at[position].set(chosen.astype(tokens.dtype))

    return jax.lax.fori_loop(span[0], span[1], fill, tokens)


def main(
    out: Annotated[Path, typer.Option(help="Folder of a run.")] = Path("runs/tiny"),
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "def ",
    length: Annotated[int, typer.Option(min=1, help="Bytes to add.")] = 400,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the best byte.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0,
) -> None:
    """Continue a prompt with the newest checkpoint of a run."""
    with one_line_errors():
        if not prompt:
            raise InputError("--prompt needs at least one character")
        if not (out / "checkpoints").is_dir():
            raise InputError(f"no checkpoints in {out}")
        store = Store(out / "checkpoints", read_only=True)
        if not store.steps():
            raise InputError(f"no checkpoints in {out}")
        step = store.steps()[-1]
        try:
            config = TransformerConfig(**store.meta(step)["model"])
            like = jax.eval_shape(lambda: init_state(config, OptimConfig(steps=1), seed=0))
            params = store.restore(step, like).params
        except Damaged as error:
            raise InputError(f"checkpoint {step} in {out} is damaged ({error})") from None
        text = generate(
            config, params, prompt.encode(), length=length, temperature=temperature, seed=seed
        )
        typer.echo(text.decode(errors="replace"))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
