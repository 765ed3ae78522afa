"""Run a jaxpr primitive by primitive, with loops, branches and calls interpreted here.

Compiling thousands of derivatives of derivatives would take hours. Most primitives run in NumPy
(`in_numpy.py`), the others in JAX, one by one, which compiles each for each shape once. With
`noise` the last bits of each rounding are disturbed, in the same way for the same value. A result
that changes is ill-conditioned. Noise is given for float64, and is larger for float32. A value that
is converted to a narrower float is disturbed before, by half the last bit of the narrower type: a
cotangent that is a sum may be rounded once, or term by term if its value is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core.primitives import convert_element_type_p

from tests.fuzz.in_numpy import IN_NUMPY, ROUNDS, SPECIAL
from xform._jax import (
    JaxprEqn,
    Literal,
    Primitive,
    Trace,
    Var,
    equation,
    jaxpr_and_consts,
    scan_counts,
    set_current_trace,
)
from xform._jax.contexts import wide_if_needed
from xform._jax.symbolic import is_symbolic, value_of

Step = tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]
_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_LANES = 32
_TOO_MANY = 10_000


class Machine:
    """Evaluate programs, with a cache for each program.

    `sizes` are the sizes of the symbolic dimensions of the programs, by name.
    """

    def __init__(self, noise: float = 0.0, sizes: Mapping[str, int] | None = None):
        self.noise, self.sizes = noise, sizes or {}
        self.known: dict[int, tuple[Any, ...]] = {}

    def run(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        """Return the outputs of a jaxpr, closed or not."""
        start, inputs, steps, outputs, _ = self.known.get(id(jaxpr)) or self._read(jaxpr)
        env = start.copy()
        for (i, aval), x in zip(inputs, args, strict=True):
            env[i] = _plain(x, aval)
        for f, reads, writes in steps:
            ys = f(*[env[i] for i in reads])
            for i, y in zip(writes, ys, strict=True):
                env[i] = y
        return [env[i] for i in outputs]

    def _read(self, jaxpr: Any) -> tuple[Any, ...]:
        """Return a jaxpr as numbered places and steps, and hold it, so that its id stays unique."""
        opened, consts = jaxpr_and_consts(jaxpr)
        env: list[Any] = []
        places: dict[Any, int] = {}

        def place(atom: Any) -> int:
            if isinstance(atom, Literal):
                env.append(_plain(atom.val, atom.aval))
                return len(env) - 1
            if atom not in places:
                places[atom] = len(env)
                env.append(None)
            return places[atom]

        inputs = [(place(v), v.aval) for v in opened.invars]
        for v, x in zip(opened.constvars, consts, strict=True):
            env[place(v)] = _plain(x, v.aval)
        steps = [
            (self.step(e), tuple(map(place, e.invars)), tuple(map(place, e.outvars)))
            for e in opened.eqns
        ]
        outputs = [place(v) for v in opened.outvars]
        self.known[id(jaxpr)] = read = (env, inputs, steps, outputs, jaxpr)
        return read

    def step(self, eqn: JaxprEqn) -> Callable[..., list[Any]]:
        """Return an equation as a function from its inputs to a list of outputs."""
        name, params = eqn.primitive.name, eqn.params
        if self.sizes:
            params = {k: sized(v, self.sizes) for k, v in params.items()}
            eqn = eqn.replace(params=params)
        many = eqn.primitive.multiple_results
        if name == "dim_as_value":  # the size of a symbolic dimension
            dim = np.asarray(params["dim"], eqn.outvars[0].aval.dtype)
            return lambda: [dim]
        if (make := _STRUCTURED.get(name)) is not None:
            return make(self, eqn)
        plain = IN_NUMPY.get(name)
        noisy = self.noise if name in ROUNDS or name in SPECIAL else 0.0
        loss = _loss(eqn) if self.noise else 0.0

        def run(*xs: Any) -> list[Any]:
            if loss:
                xs = (_moved(xs[0], loss), *xs[1:])
            out = plain(params, *xs) if plain is not None else NotImplemented
            if out is NotImplemented:
                out = by_jax(eqn, xs)
            if noisy:
                out = _disturbed(out, noisy)
            return list(out) if many else [out]

        return run

    # Equations that hold programs.

    def _call(self, eqn: JaxprEqn) -> Callable[..., list[Any]]:
        body = next(eqn.params[k] for k in _BODIES if k in eqn.params)
        return lambda *xs: self.run(body, xs)

    def _custom_vmap(self, eqn: JaxprEqn) -> Callable[..., list[Any]]:
        return lambda *xs: self.run(eqn.params["call"], xs)

    def _cond(self, eqn: JaxprEqn) -> Callable[..., list[Any]]:
        branches = eqn.params["branches"]
        top = len(branches) - 1
        return lambda i, *xs: self.run(branches[min(max(int(i), 0), top)], xs)

    def _while(self, eqn: JaxprEqn) -> Callable[..., list[Any]]:
        cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        a = eqn.params["cond_nconsts"]
        b = a + eqn.params["body_nconsts"]

        def step(*xs: Any) -> list[Any]:
            state = list(xs[b:])
            for _ in range(_TOO_MANY):
                alive = self.run(cond, [*xs[:a], *state])[0]
                if np.ndim(alive):
                    if not np.any(alive):
                        return state
                    new = self.run(body, [*xs[a:b], *state])
                    state = [_where(alive, y, x) for y, x in zip(new, state, strict=True)]
                elif not alive:
                    return state
                else:
                    state = self.run(body, [*xs[a:b], *state])
            raise RuntimeError("a loop does not end")

        return step

    def _scan(self, eqn: JaxprEqn) -> Callable[..., list[Any]]:
        params = eqn.params
        n, m = scan_counts(params)
        body, length = params["jaxpr"], params["length"]
        order = range(length)[::-1] if params["reverse"] else range(length)
        types = [v.aval for v in eqn.outvars[m:]]

        def step(*args: Any) -> list[Any]:
            consts, carry, xs = args[:n], list(args[n : n + m]), args[n + m :]
            stacks = [np.empty(sized(t.shape, self.sizes), t.dtype) for t in types]
            for i in order:
                out = self.run(body, [*consts, *carry, *(x[i] for x in xs)])
                carry = out[:m]
                for stack, y in zip(stacks, out[m:], strict=True):
                    stack[i] = y
            return [*carry, *stacks]

        return step

    def _solve(self, eqn: JaxprEqn) -> Callable[..., list[Any]]:
        lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
        start = lengths.matvec + lengths.vecmat
        end = sum(lengths)
        return lambda *xs: self.run(jaxprs.solve, [*xs[start : start + lengths.solve], *xs[end:]])


_STRUCTURED: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("jit", "pjit", "closed_call", "core_call", "core_closed_call", "checkpoint", "remat2",
         "remat", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "composite",
         "remat_opt"),
        Machine._call,
    ),
    "custom_vmap_call": Machine._custom_vmap,
    "cond": Machine._cond,
    "while": Machine._while,
    "scan": Machine._scan,
    "custom_linear_solve": Machine._solve,
}  # fmt: skip


def sized(x: Any, sizes: Mapping[str, int]) -> Any:
    """Return a parameter with numbers in place of symbolic dimensions."""
    if is_symbolic(x):
        return value_of(x, sizes)
    if type(x) in (tuple, list):
        return type(x)(sized(part, sizes) for part in x)
    return x


_COMPILED: dict[Any, Any] = {}


def by_jax(eqn: JaxprEqn, xs: Sequence[Any]) -> Any:
    """Return the outputs of an equation from XLA, compiled once for its parameters and types."""
    prim, params = eqn.primitive, eqn.params
    size, shape = 0, ()
    if prim.name in SPECIAL:
        xs = np.broadcast_arrays(*xs)
        shape, size = xs[0].shape, xs[0].size
        if size <= _LANES:
            xs = [np.concatenate([x.ravel(), np.full(_LANES - size, 0.5, x.dtype)]) for x in xs]
    with jax.core.eval_context(), eqn.ctx.manager:
        out = _compiled(prim, params, xs)(*xs)
    if prim.multiple_results:
        return [_plain(y) for y in out]
    return _plain(out)[:size].reshape(shape) if size and size <= _LANES else _plain(out)


def _compiled(prim: Primitive, params: dict[str, Any], xs: Sequence[Any]) -> Callable[..., Any]:
    """Return a primitive as a function of arrays; `jax.clear_caches` does not clear this cache."""

    def run(*xs: Any) -> Any:
        return prim.bind(*xs, **prim.get_bind_params(params))

    try:
        key = (prim, tuple(sorted(params.items())), tuple(map(jax.typeof, xs)))
        if key not in _COMPILED:
            _COMPILED[key] = jax.jit(run).lower(*xs).compile()
    except TypeError:  # a parameter that cannot be hashed or ordered
        return run
    return _COMPILED[key]


def _plain(x: Any, aval: Any = None) -> Any:
    """Return a value as NumPy's, if NumPy has its type."""
    dtype = getattr(aval if aval is not None else x, "dtype", None)
    if dtype is not None and not isinstance(dtype, np.dtype):
        return x
    return np.asarray(x, dtype)


def _where(alive: Any, new: Any, old: Any) -> Any:
    """Return a choice for each lane."""
    return np.where(
        np.reshape(alive, (*alive.shape, *(1,) * (np.ndim(new) - alive.ndim))), new, old
    )


def _loss(eqn: JaxprEqn) -> float:
    """Return half the last bit, at 1, of the narrower float that an equation makes, else 0."""
    if eqn.primitive.name != "convert_element_type":
        return 0.0
    old, new = (v.aval.dtype for v in (*eqn.invars, *eqn.outvars))
    if not all(isinstance(t, np.dtype) and jnp.issubdtype(t, np.inexact) for t in (old, new)):
        return 0.0
    eps = float(jnp.finfo(new).eps)  # NumPy does not know the types of 8 bits
    return eps / 2 if eps > jnp.finfo(old).eps else 0.0


def _disturbed(y: Any, noise: float) -> Any:
    """Return a float with its last bits moved up or down, depending on its bits."""
    if isinstance(y, list) or y.dtype.kind not in "fc":
        return y
    return _moved(y, noise * float(np.finfo(y.dtype).eps / np.finfo(np.float64).eps))


def _moved(y: Any, noise: float) -> Any:
    """Return a float moved up or down by a fraction of itself, depending on its bits."""
    if y.dtype.kind == "c":
        return _moved(np.real(y), noise) + 1j * _moved(np.imag(y), noise)
    bits = np.ascontiguousarray(y, np.float64).view(np.uint64)
    odd = (bits * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
    unit = odd.astype(np.float64) / 2.0**23 - 1.0
    return (y * (1.0 + noise * unit.reshape(np.shape(y)))).astype(y.dtype)


class Eager(Trace):
    """A trace in which a machine runs every operation at once: like outside `jit`, uncompiled."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine()
        self.requires_low = False

    def process_primitive(self, primitive: Primitive, args: Any, params: Any, /) -> Any:
        avals = [jax.typeof(x) for x in args]
        types, _ = primitive.abstract_eval(*avals, **params)
        eqn = equation(primitive, list(map(Var, avals)), params)
        ys = self.machine.step(eqn)(*map(_plain, args, avals))
        out = list(map(_array, ys, types if primitive.multiple_results else [types]))
        return out if primitive.multiple_results else out[0]

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, args: Any, /, **_: Any):
        with set_current_trace(self):  # JAX 0.12 no longer sets it here
            return fun.call_wrapped(*args)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, args: Any, /, **_: Any
    ):
        with set_current_trace(self):  # JAX 0.12 no longer sets it here
            return fun.call_wrapped(*args)

    def process_shard_map(self, primitive: Any, f: Any, args: Any, /, **params: Any) -> Any:
        with jax.core.eval_context():
            return primitive.bind(*args, subfuns=(f,), **params)

    def stage_value(self, val: Any) -> Any:
        return _array(val, jax.typeof(val))


def _array(x: Any, aval: Any) -> Any:
    """Return a value as JAX's own evaluation would return it."""
    if isinstance(x, jax.Array) or aval.dtype == jax.dtypes.float0:
        return x
    with jax.core.eval_context(), wide_if_needed([aval]):
        if aval.weak_type:
            return convert_element_type_p.bind(
                x, new_dtype=aval.dtype, weak_type=True, sharding=None
            )
        return jnp.asarray(x)
