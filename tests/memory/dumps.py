"""Small programs, compiled once for all tests that read their dumps."""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import xform


def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    with jax.named_scope("layer"):
        return jnp.tanh(x @ w), None


def scanned(ws: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jax.lax.scan(layer, x, ws)[0] ** 2)


def unrolled(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    for _ in range(3):
        x = jnp.sin(jnp.exp(x @ p["w"]) @ p["w"])
    return jnp.sum(x)


def doubled(x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda x: jnp.sum(x) < 1e3, lambda x: jnp.sin(x) @ x + x, x)


def counted_down(n: jax.Array, x: jax.Array) -> jax.Array:
    more, less = lambda s: s[0] > -1, lambda s: (s[0] - 1, jnp.sin(s[1]) @ s[1])
    return jax.lax.while_loop(more, less, (n, x))[1]


def update(p: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    value, ct = xform.value_and_grad(scanned)(p, x)
    return p - 0.1 * ct, value


def odd(x: jax.Array, none: jax.Array, scale: jax.Array) -> Any:
    return (x @ x) * scale, none + 1, scale * 2


def branches(x: jax.Array) -> jax.Array:
    """Several branches in a loop, in a function that XLA calls."""
    choose = lambda i, c: jax.lax.switch(i % 2, [jnp.sin, lambda c: c @ jnp.cos(c) / 9], c)
    return jnp.sum(jax.lax.scan(lambda c, i: (choose(i, c), i), x, jnp.arange(6))[0])


def in_place(x: jax.Array, y: jax.Array) -> jax.Array:
    put = lambda i, c: jax.lax.dynamic_update_slice(c, y[None] * i, (i, 0))
    return jax.lax.fori_loop(0, 64, put, x)


def ones(*shape: int) -> jax.Array:
    return jnp.ones(shape)


WS, X = (4, 64, 64), (32, 64)
nothing = xform.policies.save_nothing
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "scan": (xform.value_and_grad(scanned), (ones(*WS), ones(*X)), {}),
    "scan, JAX": (jax.value_and_grad(scanned), (ones(*WS), ones(*X)), {}),
    "recompute": (xform.grad(unrolled, policy=nothing), ({"w": ones(64, 64)}, ones(*X)), {}),
    "while": (doubled, (ones(64, 64),), {}),
    "down": (counted_down, (jnp.int32(3), ones(64, 64)), {}),
    "donated": (update, (ones(*WS), ones(*X)), {"donate_argnums": 0}),
    "branches": (xform.grad(branches), (ones(64, 64),), {}),
    "in place": (in_place, (ones(64, 64), ones(64)), {"donate_argnums": 0}),
    "odd": (odd, (ones(8, 8), ones(0, 3), ones()), {}),
}


@functools.cache
def dumped(name: str) -> tuple[bytes, Any]:
    """Return a program's dump, and the compiler's memory statistics."""
    f, args, options = PROGRAMS[name]
    jax.clear_caches()  # JAX keeps the source line of the first call of a jitted function
    lowered = jax.jit(f, **options).lower(*args)
    with tempfile.TemporaryDirectory() as folder:
        # A unique option makes JAX's compilation cache miss: a cached program is not dumped.
        unique = {"xla_dump_emitter_re": Path(folder).name}
        flags = {"xla_dump_to": folder, "xla_dump_hlo_as_proto": True, **unique}
        stats = lowered.compile(compiler_options=flags).memory_analysis()
        (path,) = Path(folder).glob("*after_optimizations.hlo.pb")
        return path.read_bytes(), stats
