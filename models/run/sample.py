"""Text from a trained model: `python -m models sample --out FOLDER --prompt TEXT`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.errors import InputError
from models.nets.config import TransformerConfig
from models.nets.transformer import abstract_transformer
from models.run.flags import Parser
from models.settings import replaced, setting
from models.train.config import LARGEST_SEED, read_config
from models.train.folder import CHECKPOINTS
from models.train.state import abstract_state
from models.train.store import Damaged, Store


@dataclasses.dataclass(frozen=True)
class Sampling:
    """What to draw from a run."""

    out: Path = setting(Path("runs/tiny"), "Folder of the run.")
    prompt: str = setting("def ", "Text to continue.")
    length: int = setting(400, "Bytes to add.", least=1, most=10**9)
    temperature: float = setting(0.8, "0 takes the best byte.", least=0)
    seed: int = setting(0, "Of the draws.", least=0, most=LARGEST_SEED)


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


def main(arguments: list[str]) -> int:
    """Continue a prompt with the newest checkpoint of a run."""
    parser = Parser(prog="python -m models sample", description=main.__doc__)
    parser.add_settings(Sampling())
    asked = replaced(Sampling(), parser.parse(arguments), by_flag=True)
    prompt = asked.prompt.encode()
    if not prompt:
        raise InputError("--prompt needs at least one character")
    folder = asked.out / CHECKPOINTS
    if not folder.is_dir():
        raise InputError(f"no checkpoints in {asked.out}")
    with contextlib.closing(Store(folder, read_only=True)) as store:
        if not (steps := store.steps()):
            raise InputError(f"no checkpoints in {asked.out}")
        try:
            run = read_config(store.meta(steps[-1])["config"], "the checkpoint")
            params = store.restore(steps[-1], abstract_state(run.model, run.optim)).params
        except Damaged as error:
            raise InputError(
                f"checkpoint {steps[-1]} in {asked.out} is damaged ({error})"
            ) from None
    text = generate(
        run.model, params, prompt, length=asked.length, temperature=asked.temperature,
        seed=asked.seed,
    )  # fmt: skip
    print(text.decode(errors="replace"))
    return 0
