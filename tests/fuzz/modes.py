"""Compositions of transforms, by xform or by JAX: a level maps a function to another.

All functions here take flat arrays and return a tuple of arrays. A level differentiates by some of
the arguments, along fixed directions, or along directions that depend on the arguments. So
the next level also differentiates through tangents and cotangents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xform
from xform._jax import match_weak_type
from xform._jax.symbolic import is_symbolic
from xform.program.arithmetic import float0_zeros

Fun = Callable[..., tuple[Any, ...]]
POLICIES = {
    "": None,
    "save_nothing": xform.policies.save_nothing,
    "save_everything": xform.policies.save_everything,
    "save_dots": xform.policies.save_dots,
    "save_only_h": xform.policies.save_only_these_names("h"),
    "save_any_but_h": xform.policies.save_any_names_but_these("h"),
}
REVERSE = ("vjp", "grad", "jacrev")
PLANNED = ("vjp", "grad")
KINDS = {"jvp": 0.23, "vjp": 0.32, "grad": 0.17, "linearize": 0.17,
         "jacfwd": 0.05, "jacrev": 0.04, "hessian": 0.02}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Level:
    """One transform: `kind` is one of `KINDS`, vmap or jit.

    `active` are the arguments to differentiate (or, for vmap, to batch). `both` also returns the
    value; `moving` makes directions depend on the arguments; `calls` is how often a map is called,
    and `lanes` makes these calls one call under vmap. `by` is "jax" if xform's and JAX's
    transforms are mixed.
    """

    kind: str
    active: tuple[int, ...] = ()
    both: bool = False
    moving: bool = False
    calls: int = 1
    lanes: bool = False
    policy: str = ""
    by: str = ""

    def __str__(self) -> str:
        extra = [name for name in ("both", "moving", "lanes") if getattr(self, name)]
        extra += [f"calls={self.calls}"] if self.calls > 1 else []
        extra += [x for x in (self.policy, self.by) if x]
        return f"{self.kind}{list(self.active)}" + (f"({', '.join(extra)})" if extra else "")


def order(levels: Sequence[Level]) -> int:
    """Return the order of the derivative."""
    return sum(_order(level.kind) for level in levels)


def _order(kind: str) -> int:
    return {"vmap": 0, "jit": 0, "hessian": 2}.get(kind, 1)


def levels(
    random: np.random.Generator, kinds: Sequence[str], reverse_first: bool, n: int
) -> tuple[Level, ...]:
    """Return a random composition of order `n`, for arguments of some kinds.

    With `reverse_first` some function has only reverse mode. If all later levels are active in
    nothing else, that level removes it.
    """
    floats = [i for i, k in enumerate(kinds) if k == "f"]
    allowed = floats
    out: list[Level] = []
    mixed = n > 1 and not reverse_first and random.random() < 0.1
    while n:
        if random.random() < 0.14 and len(out) < 4:
            wrap = "vmap" if random.random() < 0.7 else "jit"
            some = [i for i in range(len(kinds)) if random.random() < 0.6] or [0]
            out.append(Level(wrap, tuple(some) if wrap == "vmap" else ()))
            continue
        first = not any(level.kind not in ("vmap", "jit") for level in out)
        kind = str(random.choice(list(KINDS), p=list(KINDS.values())))
        kind = "grad" if _order(kind) > n else kind
        if first and reverse_first and kind not in REVERSE:
            kind = "vjp"
        active = [i for i in allowed if random.random() < 0.65]
        active = active or [allowed[int(random.integers(len(allowed)))]]
        if first and reverse_first:
            allowed = active
        if kind in ("jvp", "vjp") and random.random() < 0.15:
            active = sorted({*active, *(i for i, k in enumerate(kinds) if k != "f")})
        both, moving = bool(random.random() < 0.4), bool(random.random() < 0.35)
        maps = kind in ("vjp", "linearize") and n < 3
        calls = 2 if maps and random.random() < 0.2 else 1
        lanes = bool(kind != "grad" and random.random() < 0.12)
        names = list(POLICIES)
        policy = str(random.choice(names)) if kind in PLANNED and random.random() < 0.5 else ""
        by = "jax" if mixed and random.random() < 0.5 else ""
        out.append(Level(kind, tuple(active), both, moving, calls, lanes, policy, by))
        n -= _order(kind)
    return tuple(out)


def compose(f: Fun, levels: Sequence[Level], own: bool) -> Fun:
    """Return `f` under all levels, the first innermost; by xform if `own`, else by JAX."""
    for k, level in enumerate(levels):
        f = _apply(f, level, k, own and level.by != "jax")
    return f


def _apply(f: Fun, level: Level, k: int, own: bool) -> Fun:
    if level.kind == "vmap":
        return _vmap(f, level.active)
    if level.kind == "jit":
        return jax.jit(f)
    kinds = {"jvp": _jvp, "vjp": _vjp, "grad": _grad, "linearize": _linearize, "hessian": _hessian}
    kind = kinds.get(level.kind, _jacobian)

    def transformed(*args: Any) -> tuple[Any, ...]:
        def held(*some: Any) -> tuple[Any, ...]:
            full = list(args)
            for i, x in zip(level.active, some, strict=True):
                full[i] = x
            return f(*full)

        scale = 1.0
        if level.moving:
            scale = sum(jnp.sum(jnp.cos(x)) / np.size(x) for x in args if _float(x) and np.size(x))
        points = [args[i] for i in level.active]
        return kind(held, points, level, _Directions(k, scale), xform if own else jax)

    return transformed


@dataclasses.dataclass
class _Directions:
    """Tangents and cotangents of a level: fixed numbers, times one that may depend on the point.

    They have the weak type of their primals: Python floats for weakly typed scalars.
    """

    seed: int
    scale: Any

    def like(self, values: Any, call: int = 0, salt: float = 0.0) -> Any:
        """Return a direction for each value; float0 for a value without derivatives."""

        def one(i: int, x: Any) -> Any:
            if not _float(x):
                return float0_zeros(np.shape(x))
            phase = 0.7 + 1.3 * self.seed + 2.1 * call + 0.9 * i + salt
            numpy: Any = jnp if is_symbolic(np.size(x)) else np
            direction = numpy.cos(phase + 1.7 * numpy.arange(np.size(x))).reshape(np.shape(x))
            weak = jax.typeof(x).weak_type
            if isinstance(self.scale, float):
                if not weak:
                    return direction
                if not np.ndim(x):
                    return float(direction)
            return match_weak_type(jnp.asarray(self.scale * direction), jax.typeof(x))

        return [one(i, x) for i, x in enumerate(values)]


def _wide(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype == np.float64


def _float(x: Any) -> bool:
    return jnp.issubdtype(_dtype(x), np.floating)


def _dtype(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype


def _some(values: Any) -> tuple[Any, ...]:
    """Return the compared values: all except the zeros of integers."""
    return tuple(x for x in values if _dtype(x) != jax.dtypes.float0)


def _derivatives(values: Any, of: Any) -> tuple[Any, ...]:
    """Return tangents or cotangents `of` some values for comparison, with the weak type of these.

    Their own weak types are accidental: JAX's rule for `lax.sin` loses the weak type of arrays and
    keeps that of scalars; in `jnp.sin`, which is jitted, it comes back.
    """
    pairs = zip(values, of, strict=True)
    return tuple(
        match_weak_type(d, jax.typeof(x)) for d, x in pairs if _dtype(d) != jax.dtypes.float0
    )


def _values(f: Fun, xs: Any, ys: Any, ad: Any) -> Any:
    """Return outputs with the weak types of `f` here: JAX loses that of `lax.cumprod` and others.

    Under `vmap`, a `cond` may have other weak types than alone.
    """
    if ad is xform:
        return ys
    return tuple(match_weak_type(y, jax.typeof(plain)) for y, plain in zip(ys, f(*xs), strict=True))


def _mapped(call: Callable[[Any], Any], directions: list[Any], lanes: bool, of: Any) -> list[Any]:
    """Apply a linear map to several directions, in turn or under vmap: derivatives `of` values."""
    if not lanes:
        return [out for d in directions for out in _derivatives(call(d), of)]
    moving = [i for i, d in enumerate(directions[0]) if _dtype(d) != jax.dtypes.float0]
    last = [d * 0.5 if i in moving else d for i, d in enumerate(directions[-1])]

    def lane(*some: Any) -> Any:
        full = list(directions[0])
        for i, d in zip(moving, some, strict=True):
            full[i] = d
        return _derivatives(call(full), of)

    stacks = [jnp.stack([d[i] for d in (*directions, last)]) for i in moving]
    return list(jax.vmap(lane)(*stacks)) if stacks else []


def _jvp(f: Fun, xs: Any, level: Level, d: _Directions, ad: Any) -> tuple[Any, ...]:
    if level.lanes:
        ys = f(*xs)
        call = lambda dxs: ad.jvp(f, tuple(xs), tuple(dxs))[1]
        return (*(_some(ys) if level.both else ()), *_mapped(call, [d.like(xs)], True, ys))
    dxs = tuple(d.like(xs))
    if ad is jax:  # JAX's rule for reduce_max warns about 64-bit NumPy numbers
        dxs = tuple(jnp.asarray(dx) if _wide(dx) else dx for dx in dxs)
    ys, dys = ad.jvp(f, tuple(xs), dxs)
    ys = _values(f, xs, ys, ad)
    return (*(_some(ys) if level.both else ()), *_derivatives(dys, ys))


def _vjp(f: Fun, xs: Any, level: Level, d: _Directions, ad: Any) -> tuple[Any, ...]:
    ys, pull = ad.vjp(f, *xs, **_policy(level, ad))
    ys = _values(f, xs, ys, ad)
    cts = [d.like(ys, call) for call in range(level.calls)]
    results = _mapped(lambda ct: pull(tuple(ct)), cts, level.lanes, xs)
    return (*(_some(ys) if level.both else ()), *results)


def _loss(f: Fun, d: _Directions) -> Callable[..., Any]:
    def loss(*xs: Any) -> Any:
        ys = [y for y in f(*xs) if _float(y)]
        weights = _Directions(d.seed, 1.0).like(ys, salt=0.4)
        return sum(
            (jnp.sum(w * jnp.sin(y)) for w, y in zip(weights, ys, strict=True)), 0.0 * d.scale
        )

    return loss


def _grad(f: Fun, xs: Any, level: Level, d: _Directions, ad: Any) -> tuple[Any, ...]:
    loss, argnums = _loss(f, d), tuple(range(len(xs)))
    if level.both:
        value, grads = ad.value_and_grad(loss, argnums, **_policy(level, ad))(*xs)
        return (value, *_derivatives(grads, xs))
    return _derivatives(ad.grad(loss, argnums, **_policy(level, ad))(*xs), xs)


def _jacobian(f: Fun, xs: Any, level: Level, d: _Directions, ad: Any) -> tuple[Any, ...]:
    """Return the Jacobian times a number that may depend on the point."""

    def floats(*xs: Any) -> tuple[Any, ...]:
        return tuple(y for y in f(*xs) if _float(y))

    blocks = getattr(ad, level.kind)(floats, tuple(range(len(xs))))(*xs)
    return tuple(_strong(d.scale * block) for block in jax.tree.leaves(blocks))


def _hessian(f: Fun, xs: Any, level: Level, d: _Directions, ad: Any) -> tuple[Any, ...]:
    blocks = ad.hessian(_loss(f, d), tuple(range(len(xs))))(*xs)
    return tuple(map(_strong, jax.tree.leaves(blocks)))


def _strong(x: Any) -> Any:
    """Return `x` strongly typed, because the weak type of a Jacobian is accidental too."""
    return match_weak_type(jnp.asarray(x), jax.typeof(x).update(weak_type=False))


def _linearize(f: Fun, xs: Any, level: Level, d: _Directions, ad: Any) -> tuple[Any, ...]:
    ys, push = ad.linearize(f, *xs)
    ys = _values(f, xs, ys, ad)
    dxs = [d.like(xs, call) for call in range(level.calls)]
    results = _mapped(lambda dx: push(*dx), dxs, level.lanes, ys)
    return (*(_some(ys) if level.both else ()), *results)


def _policy(level: Level, ad: Any) -> dict[str, Any]:
    return {"policy": POLICIES[level.policy]} if level.policy and ad is xform else {}


def _vmap(f: Fun, batched: tuple[int, ...]) -> Fun:
    """Map over two lanes: the point, and one near it."""

    def lanes(*args: Any) -> tuple[Any, ...]:
        def pair(x: Any) -> Any:
            return jnp.stack([x, 0.7 * x + 0.11 if _float(x) else x])

        given = [pair(x) if i in batched else x for i, x in enumerate(args)]
        axes = tuple(0 if i in batched else None for i in range(len(args)))
        return jax.vmap(f, in_axes=axes)(*given)

    return lanes
