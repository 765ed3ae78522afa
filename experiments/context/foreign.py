"""Ring attentions of other projects, with and without their hand-written backward passes."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import xform
from experiments.report import write_table

HERE = Path(__file__).parent
KIB = 2**10
DEVICES, BATCH, TOKENS, HEADS, WIDTH = 8, 2, 512, 4, 16
MESH = {"data": 1, "context": DEVICES, "tensor": 1}
SPEC = P("data", "context", "tensor")
SHAPE = (BATCH, TOKENS, HEADS, WIDTH)
FILES = {
    "haoliuhl/ringattention": "ringattention/ringattention/ringattention_jax.py",
    "jondeaton/ring-attention-jax-pallas": "ring-attention-jax-pallas/ring_attention/ring.py",
}
Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def loaded(path: Path) -> Any:
    """Load one file of a project, without the rest of it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        sys.exit(f"cannot read {path}: --sources must be a folder with the checkouts of the README")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def old_shard_map() -> None:
    """Let sources import `shard_map` from where it was before JAX 0.8."""
    old: Any = types.ModuleType("jax.experimental.shard_map")
    old.shard_map = lambda f, *, check_rep, **more: jax.shard_map(f, check_vma=check_rep, **more)
    sys.modules["jax.experimental.shard_map"] = old


def haoliuhl(module: Any, by_hand: bool, mesh: Any) -> Attention:
    """Return the causal attention of haoliuhl/ringattention, 16 queries and keys at a time."""
    options = {
        "causal_block_size": 1, "query_chunk_size": 16, "key_chunk_size": 16, "precision": None,
        "deterministic": True, "dropout_rng": None, "attn_pdrop": 0.0, "dtype": jnp.float32,
        "policy": jax.checkpoint_policies.nothing_saveable, "prevent_cse": True,
    }  # fmt: skip
    forward = lambda *args: module._ring_attention_fwd(*args)[0]
    attention = module.ring_attention if by_hand else forward

    def on_device(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention(q, k, v, None, None, None, "context", True, options)

    specs: Any = {"in_specs": (SPEC,) * 3, "out_specs": SPEC}
    return jax.shard_map(on_device, mesh=mesh, check_vma=False, **specs)


def jondeaton(module: Any, by_hand: bool, mesh: Any) -> Attention:
    """Return the causal attention of jondeaton/ring-attention-jax-pallas, without its kernels."""
    if not by_hand:
        forward = module._ring_attention_fwd
        module._ring_attention = lambda *args, **options: forward(*args, **options)[0]
    places = jnp.broadcast_to(jnp.arange(TOKENS), (BATCH, TOKENS))
    options = {"causal": True, "positions": places, "block_impl": "jax"}
    return lambda *qkv: module.ring_self_attention(*qkv, mesh, P("data", "context"), **options)


def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Compute causal attention on one device."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def loss_of(attention: Attention) -> Callable[..., jax.Array]:
    """Return a loss of the queries, keys, values and of weights of the results."""
    return lambda q, k, v, weights: jnp.sum(weights * attention(q, k, v))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=Path, required=True, help="the folder of the checkouts")
    sources = parser.parse_args().sources
    if jax.device_count() < DEVICES:
        sys.exit(f"this needs {DEVICES} devices: set JAX_PLATFORMS=cpu and"
                 f" XLA_FLAGS=--xla_force_host_platform_device_count={DEVICES}")  # fmt: skip
    old_shard_map()
    args = [jax.random.normal(key, SHAPE) for key in jax.random.split(jax.random.key(0), 4)]
    expected = jax.jit(jax.grad(loss_of(dense), (0, 1, 2)))(*args)
    automatic = (AxisType.Auto,) * len(MESH)
    mesh = jax.make_mesh((*MESH.values(),), (*MESH,), automatic, devices=jax.devices()[:DEVICES])
    rows: list[list[str]] = []
    for name, make in zip(FILES, (haoliuhl, jondeaton), strict=True):
        for by_hand in (True, False):
            attention = make(loaded(sources / FILES[name]), by_hand, mesh)
            row = [name, "theirs, by hand" if by_hand else "derived"]
            for grad in (jax.grad, xform.grad):
                compiled = jax.jit(grad(loss_of(attention), (0, 1, 2))).lower(*args).compile()
                found = compiled(*args)
                far = max(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True))
                temporary = compiled.memory_analysis().temp_size_in_bytes / KIB
                row += [f"{temporary:,.0f}", f"{far:.0e}"]
            rows.append(row)
            print(*row, sep=" | ", flush=True)
    head = ["ring attention", "backward pass", "jax.grad: temporary KiB on each device",
            "largest error of a gradient", "xform.grad", "error"]  # fmt: skip
    write_table(HERE, head, rows, "foreign", f"{DEVICES} devices of one CPU, float32")


if __name__ == "__main__":
    main()
