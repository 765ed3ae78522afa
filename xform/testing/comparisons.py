"""Tools for checks of derivatives: arguments, random tangents and cotangents, and comparisons."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from xform.errors import WrongRule
from xform.program.arithmetic import differentiable, float0_zeros

Fun = Callable[..., Any]
STEP = 1e-5  # step of central differences in 64 bits, which are then accurate to about 1e-9


@dataclasses.dataclass(frozen=True)
class CaseChecker:
    """Comparisons whose errors name the case, the dtype and the active inputs.

    Attributes:
      case: the name of the case.
      setting: what is checked, such as the dtype and the differentiated inputs, for messages.
      tolerance: the allowed difference, relative to the largest element, and absolute if that is
        below 1.
      remedy: the remedy in the errors.
    """

    case: str
    setting: str
    tolerance: float
    remedy: str = "correct the rule, or state in its Case which check does not apply"

    def fail(self, check: str, problem: str) -> NoReturn:
        """Raise `WrongRule` with the check and the problem."""
        raise WrongRule(
            f"check of {self.case}, {self.setting}",
            f"{check}: {problem}",
            "",
            self.remedy,
        )

    def close(self, check: str, actual: Any, expected: Any) -> None:
        """Fail if arrays differ by more than the tolerance."""
        leaves = jax.tree.leaves_with_path(actual)
        for (path, a), b in zip(leaves, jax.tree.leaves(expected), strict=True):
            if b.dtype == jax.dtypes.float0:
                continue
            wide = np.complex128 if np.iscomplexobj(b) else np.float64
            a, b = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
            scale = max(1.0, float(np.max(np.abs(b), initial=0.0, where=np.isfinite(b))))
            near = a.shape == b.shape and np.isclose(
                a, b, self.tolerance, self.tolerance * scale, equal_nan=True
            )
            if not np.all(near):
                self.fail(f"{check}{jax.tree_util.keystr(path)}", f"\n{a}\nis not\n{b}")

    def same(self, check: str, actual: Any, expected: Any) -> None:
        """Fail if arrays differ at all."""
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            if not np.array_equal(a, b, equal_nan=differentiable(jax.typeof(b))):
                self.fail(check, f"\n{a}\nis not\n{b}")

    def same_types(self, check: str, actual: Any, of: Any) -> None:
        """Fail if tangents or cotangents have other shapes or dtypes than their values."""
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(of), strict=True):
            dtype = b.dtype if differentiable(jax.typeof(b)) else jax.dtypes.float0
            if a.dtype != dtype or np.shape(a) != np.shape(b):
                self.fail(check, f"{a.dtype}{np.shape(a)} is not {dtype}{np.shape(b)}")


def cast(x: Any, dtype: str, position: int) -> jax.Array:
    """Convert an argument to a dtype. Integers and bools are not converted.

    Args:
      x: the argument, an array.
      dtype: name of a floating or complex dtype. For a complex dtype a real argument gets imaginary
        parts. A complex argument stays complex for a real dtype: it becomes complex64 for
        "float32", else complex128.
      position: position of the argument. The imaginary parts depend on it, so that two arguments
        differ.
    """
    x = np.asarray(x)
    if not np.issubdtype(x.dtype, np.inexact):
        return jnp.asarray(x)
    wanted = jnp.dtype(dtype)
    if np.iscomplexobj(x) and not np.issubdtype(wanted, np.complexfloating):
        wanted = np.dtype("complex64" if dtype == "float32" else "complex128")
    elif np.issubdtype(wanted, np.complexfloating) and not np.iscomplexobj(x):
        x = x + 0.25j * np.cos(1.0 + position + np.arange(x.size)).reshape(x.shape)
    return jnp.asarray(x, wanted)


def with_fixed_arguments(fun: Fun, args: Sequence[Any], active: Sequence[int]) -> Fun:
    """Return `fun` as a function of the arguments at the positions `active`; others are fixed."""

    def f(*xs: Any) -> Any:
        active_args = dict(zip(active, xs, strict=True))
        return fun(*(active_args.get(i, x) for i, x in enumerate(args)))

    return f


def direction(tree: Any, seed: int) -> Any:
    """Make a tangent or cotangent for a tree of arrays or types.

    It has random numbers for floats, and float0 zeros for integers. The numbers depend only on the
    seed. They are multiples of 1/16, which every dtype represents exactly.
    """
    random = np.random.default_rng(seed)

    def draw(x: Any) -> Any:
        if not differentiable(x):
            return float0_zeros(x.shape)
        re, im = np.round(16 * random.standard_normal((2, *x.shape))) / 16
        is_complex = np.issubdtype(x.dtype, np.complexfloating)
        return jnp.asarray(re + 1j * im if is_complex else re, x.dtype)

    return jax.tree.map(draw, tree)


def directions(f: Fun, xs: Any) -> tuple[Any, Any]:
    """Make a tangent for the inputs of a function, and a cotangent for its outputs."""
    return direction(xs, 1), direction(jax.eval_shape(f, *xs), 2)


def stack_pair(tree: Any, factor: float = -0.5) -> Any:
    """Stack each array with `factor` times itself, and each integer array with itself."""

    def stack(x: Any) -> Any:
        if not differentiable(x):
            return np.stack([x, x])
        return jnp.stack([x, x * jnp.asarray(factor, x.dtype)])

    return jax.tree.map(stack, tree)


def in_64_bits(xs: Any) -> bool:
    """Return whether all arrays have 64 bits, so that finite differences are accurate enough."""
    return all(jnp.finfo(x.dtype).bits == 64 for x in jax.tree.leaves(xs))


def differences(f: Fun, xs: Any, dxs: Any) -> Any:
    """Compute the derivative of `f` along `dxs` by central differences.

    It is float0 zeros for integer outputs.
    """

    def value_at(h: float) -> Any:
        return f(*jax.tree.map(lambda x, dx: x + h * dx if differentiable(x) else x, xs, dxs))

    def slope(after: Any, before: Any) -> Any:
        return (
            (after - before) / (2 * STEP) if differentiable(before) else float0_zeros(before.shape)
        )

    return jax.tree.map(slope, value_at(STEP), value_at(-STEP))


def dot(cts: Any, xs: Any) -> Any:
    """Compute the pairing of cotangents and tangents: the real part of Σ ct·dx.

    Nothing is conjugated.
    """
    wide = lambda x: np.asarray(x).astype(complex)
    pairs = zip(jax.tree.leaves(cts), jax.tree.leaves(xs), strict=True)
    terms = [np.sum(wide(ct) * wide(dx)).real for ct, dx in pairs if differentiable(dx)]
    return np.asarray(sum(terms, 0.0))
