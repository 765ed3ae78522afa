"""Fine-tune GPT-2 (124M) within 4 GiB: a training step planned as a whole.

Weights are random here, because nothing is downloaded; `models.nets.huggingface.load` reads real
ones. Weights, gradients and AdamW's moments take 1.9 GiB, so 2.1 GiB are left for activations and
everything else. The compiler verifies the plan.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import xform
from models.nets.presets import PRESETS
from models.train.config import OptimConfig
from models.train.state import abstract_state, init_state
from models.train.step import make_step

BUDGET, BATCH, CONTEXT, STEPS = 4 * 2**30, 4, 512, 2


def main() -> tuple[int, int, list[float]]:
    """Return the bytes of the step with the plan and with the default, and the losses."""
    config: Any = dataclasses.replace(PRESETS["gpt2-124m"], context=CONTEXT, dropout=0.0)
    optim = OptimConfig(learning_rate=1e-4, warmup_steps=0)

    step = make_step(config, optim)

    tokens = jax.random.randint(jax.random.key(0), (1, BATCH, CONTEXT + 1), 0, config.vocab)
    types = abstract_state(config, optim), jax.ShapeDtypeStruct(tokens.shape, tokens.dtype)
    run = xform.jit(step, xform.policies.budget(BUDGET), donate_argnums=0)
    plan = xform.plan(run, *types)
    usual = xform.memory_analysis(xform.jit(step, "save_everything", donate_argnums=0), *types)
    state, losses = init_state(config, optim, seed=0), []
    for _ in range(STEPS):
        state, metrics = run(state, tokens)
        losses.append(float(jnp.asarray(metrics["loss"])))
    gib = lambda n: f"{(n or 0) / 2**30:.2f} GiB"
    print(f"{gib(plan.compiled_bytes)}, saving everything {gib(usual.total_bytes)}; {losses}")
    return plan.compiled_bytes or 0, usual.total_bytes or 0, losses


if __name__ == "__main__":
    main()
