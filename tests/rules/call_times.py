"""Functions whose custom rules read state that changes while the function runs.

Each takes a library with JAX's transforms, `jax` or `xform`, and returns a function of a scalar.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

Case = Callable[[Any], Callable[[Any], Any]]
CASES: dict[str, Case] = {}


def case(f: Case) -> Case:
    CASES[f.__name__] = f
    return f


def times(factor: Callable[[], Any]) -> Callable[[Any], Any]:
    """Return an identity whose jvp rule multiplies the tangent by `factor()`."""
    f = jax.custom_jvp(lambda x: x)
    f.defjvp(lambda primals, tangents: (primals[0], tangents[0] * factor()))
    return f


def pulled_times(factor: Callable[[], Any]) -> Callable[[Any], Any]:
    """Return a function that multiplies by `factor()`, which its forward function calls."""
    f = jax.custom_vjp(lambda x: x * factor())
    forward = lambda x: (x * (k := factor()), k)
    f.defvjp(forward, lambda k, ct: (ct * k * 10,))
    return f


# The state that a rule reads.


@case
def a_loop_variable(lib):
    def f(x):
        for i in range(3):
            x = times(lambda: i + 1)(x)  # noqa: B023 - the value at the call counts
        return x

    return lib.grad(f)


@case
def an_attribute(lib):
    state = SimpleNamespace(k=1.0)
    g = pulled_times(lambda: state.k)

    def f(x):
        state.k = 2.0
        y = g(x)
        state.k = 3.0
        return y + jnp.sin(g(x))

    return lib.value_and_grad(f)


@case
def an_iterator(lib):
    def f(x):
        items = iter([1.0, 2.0, 3.0, 4.0])
        g = times(lambda: next(items))
        return g(x) * next(items) * g(x) * next(items)

    return lib.grad(f)


@case
def a_counter(lib):
    def f(x):
        log = []
        g = times(lambda: log.append(1) or len(log))
        return g(x) * g(jnp.sin(x)) * len(log)

    return lib.grad(f)


@case
def the_random_state_of_numpy(lib):
    def f(x):
        generator = np.random.default_rng(0)
        g = times(generator.random)
        return g(x) * generator.random() * g(x) * generator.random()

    return lib.grad(f)


@case
def a_context_variable(lib):
    variable = contextvars.ContextVar("variable", default=1.0)
    g = times(variable.get)

    def f(x):
        token = variable.set(5.0)
        y = g(x)
        variable.reset(token)
        return y * g(x)

    return lib.grad(f)


@case
def a_thread(lib):
    local = threading.local()
    g = times(lambda: local.k)

    def f(x):
        local.k = 2.0
        y = g(x)
        local.k = 3.0
        return y

    return lib.grad(f)


@case
def a_python_number(lib):
    power = jax.custom_jvp(lambda x, n: x**n)

    @power.defjvp
    def _(primals, tangents):
        (x, n), (dx, _) = primals, tangents
        return x ** int(n), int(n) * x ** (int(n) - 1) * dx

    return lib.grad(lambda x: power(x, 3))


@case
def a_numpy_array(lib):
    total = jax.custom_jvp(lambda x, a: x * a.sum())
    total.defjvp(lambda xs, dxs: (xs[0] * float(xs[1].sum()), dxs[0] * float(xs[1].sum())))
    return lib.grad(lambda x: total(x, np.array([1.0, 2.0], np.float32)))


@case
def a_numpy_array_behind_vmap(lib):
    """The rule gets a tracer of `vmap`, which holds the array, and calls the function again."""
    times = jax.custom_jvp(lambda n, x: n * x)
    times.defjvp(lambda xs, dxs: (times(*xs), 2 * xs[0] * dxs[1]))
    return lib.grad(lambda x: jax.vmap(lambda n: times(n, x))(np.array([4, 3])).sum())


@case
def a_known_residual(lib):
    """The backward function gets the argument itself, and an array, as values."""
    pick = jax.custom_vjp(lambda x, order: x * order[0])
    pick.defvjp(
        lambda x, order: (x * int(order[0]), (order, np.arange(3))),
        lambda kept, ct: (ct * int(np.argsort(kept[0])[0]) * int(kept[1][2]), None),
    )
    return lib.value_and_grad(lambda x: pick(x, np.array([2, 0, 1])))


# Where it is called.


def around_call(wrap: Callable[[Any, Any], Any], make: Any = times) -> Case:
    """Return a case: a function that `wrap(lib, g)` calls, between two changes of the state."""

    def build(lib):
        def f(x):
            state = [1.0]
            g = make(lambda: state[0])
            wrapped = wrap(lib, g)
            state[0] = 2.0
            y = wrapped(x)
            state[0] = 5.0
            return jnp.sum(y)

        return lib.value_and_grad(f)

    return build


WRAPS: dict[str, Callable[[Any, Any], Any]] = {
    "scan": lambda lib, g: (
        lambda x: lax.scan(lambda c, _: (jnp.sin(g(c)), c), x, None, length=3)[0]
    ),
    "cond": lambda lib, g: lambda x: lax.cond(x > 0, g, jnp.sin, x),
    "fori_loop": lambda lib, g: lambda x: lax.fori_loop(0, 3, lambda i, c: g(c) * 2, x),
    "checkpoint": lambda lib, g: lib.checkpoint(lambda x: jnp.sin(g(x))),
    "jit": lambda lib, g: jax.jit(lambda x: jnp.sin(g(x))),
    "jit in scan": lambda lib, g: (
        lambda x: lax.scan(lambda c, _: (jax.jit(g)(c), None), x, None, length=2)[0]
    ),
    "vmap": lambda lib, g: lambda x: jax.vmap(g)(x * jnp.arange(3.0)),
    "vmap of scan": lambda lib, g: (
        lambda x: jax.vmap(lambda y: lax.scan(lambda c, _: (g(c), None), y, None, 2)[0])(
            x * jnp.arange(3.0)
        )
    ),
}
for _name, _wrap in WRAPS.items():
    CASES[f"jvp rule in {_name}"] = around_call(_wrap)
    CASES[f"forward function in {_name}"] = around_call(_wrap, pulled_times)


def of_nested(order: int) -> Case:
    """Return a case with the derivative of an order: a rule that calls another function's rule."""

    def build(lib):
        def f(x):
            state = [1.0]
            cube = jax.custom_jvp(lambda x: x**3)
            cube.defjvp(lambda xs, dxs: (xs[0] ** 3, dxs[0] * xs[0] ** 2 * state[0]))
            square = jax.custom_jvp(lambda x: cube(x) ** 2)
            square.defjvp(lambda xs, dxs: (cube(xs[0]) ** 2, 2 * cube(xs[0]) * dxs[0]))
            total = 0.0
            for i in range(3):
                state[0] = i + 1.0
                total = total + square(x) * cube(x)
            return total

        for _ in range(order):
            f = lib.grad(f)
        return f

    return build


for _order in (1, 2, 3):
    CASES[f"a rule that calls a custom function, order {_order}"] = of_nested(_order)


@case
def an_inner_derivative_with_an_active_constant(lib):
    def f(x):
        state = [1.0]
        square = jax.custom_jvp(lambda x: x**2)
        square.defjvp(lambda xs, dxs: (xs[0] ** 2, dxs[0] * xs[0] * state[0]))

        def inner(y):
            state[0] = 2.0
            z = square(x) * y**2
            state[0] = 4.0
            return z

        return lib.grad(inner)(x * 3)

    return lib.grad(f)


@case
def an_inner_derivative_under_vmap(lib):
    def f(x):
        state = [1.0]
        g = times(lambda: state[0])

        def inner(y):
            state[0] = 2.0
            z = jnp.sin(g(y) * x)
            state[0] = 4.0
            return z

        return jnp.sum(jax.vmap(lib.grad(inner))(x * jnp.arange(3.0)))

    return lib.grad(f)


@case
def linearize(lib):
    def f(x):
        for i in range(3):
            x = times(lambda: i + 1)(x)  # noqa: B023 - the value at the call counts
        return x

    return lambda x: lib.linearize(f, x)[1](1.0)


# Rules that ask which inputs have a tangent.


@case
def symbolic_zeros_of_a_jvp_rule(lib):
    def f(x, y):
        state = [1.0]
        g = jax.custom_jvp(lambda x, y: x * y)

        def rule(xs, dxs):
            zero = isinstance(dxs[1], SymbolicZero)
            return xs[0] * xs[1], dxs[0] * xs[1] * (state[0] if zero else 100.0)

        g.defjvp(rule, symbolic_zeros=True)
        total = 0.0
        for i in range(3):
            state[0] = i + 1.0
            total = total + g(x, y)
        return total

    return lambda x: lib.grad(f)(x, x + 1)


@case
def symbolic_zeros_of_a_forward_function(lib):
    def f(x, y):
        state = [1.0]
        g = jax.custom_vjp(lambda x, y: x * y)

        def forward(x, y):
            k = 100.0 if y.perturbed else state[0]
            return x.value * y.value * state[0], (x.value, y.value, k)

        back = lambda kept, ct: (ct * kept[1] * kept[2], ct * kept[0])
        g.defvjp(forward, back, symbolic_zeros=True)
        total = 0.0
        for i in range(3):
            state[0] = i + 1.0
            total = total + g(x, y)
        return total

    return lambda x: lib.value_and_grad(f)(x, x + 1)


# Values of the function that a rule closes over.


def closing_over(rule: str) -> Case:
    """Return a case in which a function's rule `rule` reads a value that the caller computes."""

    def build(lib):
        def f(x, y):
            m = jnp.sin(y)
            if rule == "jvp":
                g = jax.custom_jvp(lambda x: x * m)
                g.defjvp(lambda xs, dxs: (xs[0] * m, dxs[0] * m * 2))
                return g(x)
            g = jax.custom_vjp(lambda x: x)
            k = m if rule == "forward" else 1.0
            c = m if rule == "backward" else 1.0
            g.defvjp(lambda x: (x * k, x), lambda x, ct: (ct * jnp.cos(c) * x,))
            return g(x)

        return lambda x: lib.value_and_grad(f)(x, x + 1)

    return build


for _rule in ("jvp", "forward", "backward"):
    CASES[f"a {_rule} rule that closes over a value"] = closing_over(_rule)


# Which rules run.


@case
def a_rule_of_an_inactive_call_does_not_run(lib):
    def broken():
        raise RuntimeError

    g = times(broken)
    return lib.grad(lambda x: x * g(lax.stop_gradient(x)))


@case
def the_forward_function_computes_the_value_of_an_unused_output(lib):
    g = jax.custom_vjp(lambda x: x)
    g.defvjp(lambda x: (x * 10, x), lambda x, ct: (ct,))
    return lib.grad(lambda x: (x, g(x)), has_aux=True)


@case
def each_function_runs_once(lib):
    def f(x):
        log = []
        g = jax.custom_vjp(lambda x: log.append("function") or x)
        forward = lambda x: (log.append("forward") or x, x)
        g.defvjp(forward, lambda x, ct: (log.append("backward") or ct,))
        y = lib.grad(lambda x: g(g(x)))(x)
        return y, *(log.count(name) for name in ("function", "forward", "backward"))

    return f


# Between `vjp` and the pullback.


@case
def a_backward_function_reads_its_state_when_it_is_called(lib):
    state = [1.0]
    g = jax.custom_vjp(lambda x: x**2)
    g.defvjp(lambda x: (x**2, x), lambda x, ct: (ct * x * state[0],))

    def f(x):
        state[0] = 1.0
        y, pull = lib.vjp(lambda x: jnp.sin(g(jnp.cos(x))), x)
        state[0] = 5.0
        return pull(y)[0]

    return f


@case
def a_backward_function_in_a_loop_reads_its_state_when_it_is_called(lib):
    state = [1.0]
    g = jax.custom_vjp(lambda x: x**2)
    g.defvjp(lambda x: (x**2, x), lambda x, ct: (ct * x * state[0],))

    def f(x):
        state[0] = 1.0
        step = lambda c, _: (jnp.sin(g(c)), None)
        y, pull = lib.vjp(lambda x: lax.scan(step, x, None, length=3)[0], x)
        state[0] = 5.0
        return pull(y)[0]

    return f


@case
def a_backward_function_that_fails_is_never_called(lib):
    g = jax.custom_vjp(lambda x: x)

    def broken(kept, ct):
        raise RuntimeError

    g.defvjp(lambda x: (x * 2, x), broken)
    return lambda x: lib.vjp(lambda x: jnp.sin(g(x)), x)[0]


@case
def a_pullback_under_another_precision(lib):
    g = jax.custom_vjp(lambda x: x @ x)
    g.defvjp(lambda x: (x @ x, x), lambda x, ct: (ct @ x,))

    def f(x):
        y, pull = lib.vjp(g, x)
        with jax.default_matmul_precision("highest"):
            return pull(y)

    return lambda x: str(jax.make_jaxpr(f)(jnp.full((2, 2), x))).count("HIGHEST") > 0


# Contexts around the call: what is set, and how a rule sees it.
MESH = jax.sharding.AbstractMesh((1,), ("i",))


def a_mesh_is_set() -> bool:
    try:
        lax.with_sharding_constraint(jnp.zeros(1), jax.P("i"))
    except (RuntimeError, ValueError):
        return False
    return True


CONTEXTS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "default_matmul_precision": (
        lambda: jax.default_matmul_precision("highest"),
        lambda: jax.config.jax_default_matmul_precision == "highest",
    ),
    "enable_x64": (
        lambda: jax.enable_x64(not jax.config.jax_enable_x64),
        lambda: jax.config.jax_enable_x64,
    ),
    "default_prng_impl": (
        lambda: jax.default_prng_impl("rbg"),
        lambda: jax.random.key_data(jax.random.key(0)).shape == (4,),
    ),
    "numpy_rank_promotion": (
        lambda: jax.numpy_rank_promotion("raise"),
        lambda: jax.config.jax_numpy_rank_promotion == "raise",
    ),
    "numpy_dtype_promotion": (
        lambda: jax.numpy_dtype_promotion("strict"),
        lambda: jax.config.jax_numpy_dtype_promotion == "strict",
    ),
    "use_abstract_mesh": (
        lambda: jax.sharding.use_abstract_mesh(MESH),
        lambda: jax.sharding.get_abstract_mesh() == MESH,
    ),
    "mesh": (lambda: jax.sharding.Mesh(jax.devices()[:1], ("i",)), a_mesh_is_set),
    "debug_nans": (lambda: jax.debug_nans(True), lambda: jax.config.jax_debug_nans),
    "no context": (contextlib.nullcontext, lambda: False),
}


def within(name: str) -> Case:
    """Return a case in which rules read whether the context `name` is set, before and in it."""
    context, read = CONTEXTS[name]

    def build(lib):
        g = times(lambda: np.float32(3.0 if read() else 1.0))
        h = pulled_times(lambda: np.float32(3.0 if read() else 1.0))

        def f(x):
            y = g(h(x))
            with context():
                z = g(h(x))
            return y * z

        return lib.value_and_grad(f)

    return build


for _name in CONTEXTS:
    CASES[f"within {_name}"] = within(_name)


# Symbolic zeros of a backward function.


def zero_cotangents_in(wrap: Callable[[Any, Any], Any]) -> Case:
    """Return a case whose backward function returns which cotangents are symbolic zeros."""

    def build(lib):
        f = jax.custom_vjp(lambda x: (x * 2, jnp.sin(x), jnp.arange(3)))
        forward = lambda x: ((x.value * 2, jnp.sin(x.value), jnp.arange(3)), None)
        zero = lambda ct: isinstance(ct, SymbolicZero)
        back = lambda _, cts: (jnp.float32(sum(10**i for i, ct in enumerate(cts) if zero(ct))),)
        f.defvjp(forward, back, symbolic_zeros=True)
        return lib.grad(lambda x: wrap(lib, f)(x)[0])

    return build


ZEROS: dict[str, Callable[[Any, Any], Any]] = {
    "plain": lambda lib, f: f,
    "jit": lambda lib, f: jax.jit(f),
    "jit in jit": lambda lib, f: jax.jit(lambda x: jax.jit(f)(x)),
    "checkpoint": lambda lib, f: lib.checkpoint(f),
    "scan": lambda lib, f: lambda x: lax.scan(lambda c, _: (c, f(c)), x, None, length=1)[1],
    "cond": lambda lib, f: lambda x: lax.cond(x > 0, f, lambda x: (x, x, jnp.arange(3)), x),
    "vmap": lambda lib, f: lambda x: [y[0] for y in jax.vmap(f)(x[None])],
}
for _name, _wrap in ZEROS.items():
    scalar = lambda lib, f, w=_wrap: lambda x: [jnp.sum(y) for y in w(lib, f)(x)]
    CASES[f"symbolic zeros of a backward function in {_name}"] = zero_cotangents_in(scalar)
