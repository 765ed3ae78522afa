"""Functions with a derivative rule that get references: the rule is for the content."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests.reference import close
from xform import policies
from xform.errors import NoForwardMode

X = np.float64(1.5)
VECTOR = np.arange(1.0, 4.0)


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


# The rules have other derivatives than their functions, so a derivative shows that a rule was used.


@jax.custom_vjp
def sine(ref):
    return jnp.sin(ref[...])


def _read(ref):
    x = ref[...]
    return jnp.sin(x), x


sine.defvjp(_read, lambda x, ct: (ct * 10 * jnp.cos(x),))


@jax.custom_vjp
def product(a, ref, b):
    return a * ref[...] + b


product.defvjp(
    lambda a, ref, b: (a * ref[...] + b, (a, ref[...])),
    lambda res, ct: (7 * ct * res[1], 5 * ct * res[0], 3 * ct),
)


@jax.custom_vjp
def two_references(a, b):
    return a[...] * b[...]


two_references.defvjp(
    lambda a, b: (a[...] * b[...], (a[...], b[...])),
    lambda res, ct: (10 * ct * res[1], 100 * ct * res[0]),
)


@jax.custom_vjp
def without_cotangent(ref):
    return 2 * ref[...]


without_cotangent.defvjp(lambda ref: (2 * ref[...], None), lambda _, ct: (None,))


@jax.custom_vjp
def two_elements(ref):
    return ref[0] * ref[1]


two_elements.defvjp(
    lambda ref: (ref[0] * ref[1], ref[...]),
    lambda x, ct: (jnp.zeros(3).at[0].set(ct * x[1]).at[1].set(10 * ct * x[0]),),
)


@jax.custom_vjp
def with_zeros(a, ref):
    return a * ref[...]


with_zeros.defvjp(
    lambda a, ref: (a.value * ref.value[...], (a.value, ref.value[...], ref.perturbed)),
    lambda res, ct: (ct * res[1], ct * res[0] * (2 if res[2] else 3)),
    symbolic_zeros=True,
)


@jax.custom_vjp
def outer(ref):
    return 2 * sine(ref)


outer.defvjp(lambda ref: (2 * sine(ref), ref[...]), lambda x, ct: (ct * jnp.exp(x),))


@jax.jit
@jax.custom_vjp
def calls_itself(ref):
    return 2 * sine(ref)


calls_itself.__wrapped__.defvjp(
    lambda ref: (calls_itself(ref), ref[...]), lambda x, ct: (ct * jnp.exp(x),)
)


@jax.custom_vjp
def counted(x, log):
    """Return the sine of `x`, and write to a reference that has no derivative."""
    log[...] = log[...] + 1
    return jnp.sin(x)


def _counted(x, log):
    log[...] = log[...] + 1
    return jnp.sin(x), x


counted.defvjp(_counted, lambda x, ct: (ct * 10 * jnp.cos(x), None))


@jax.custom_jvp
def pushed(ref):
    return jnp.sin(ref[...])


@pushed.defjvp
def _(primals, tangents):
    x = primals[0][...]
    return jnp.sin(x), 10 * tangents[0][...] * jnp.cos(x)


def written_between(x):
    ref = jax.new_ref(x * 2)
    y = sine(ref)
    ref[...] = y * ref[...]
    return sine(ref) + ref[...]


def written_after(x):
    ref = jax.new_ref(x)

    @jax.jit
    def double(ref):
        ref[...] = 2 * ref[...]

    y = sine(ref)
    double(ref)
    return y * sine(ref) * ref[...]


def in_scan(x):
    ref = jax.new_ref(x)

    def body(c, _):
        y = sine(ref)
        ref[...] = 0.9 * ref[...] + 0.01 * y
        return c + y, None

    return lax.scan(body, jnp.zeros_like(x), None, length=3)[0] + ref[...]


def in_cond(x):
    ref = jax.new_ref(x)
    return lax.cond(x > 0, lambda: sine(ref), lambda: 0 * x)


def in_call(x):
    ref = jax.new_ref(1.0 * x)
    return jax.jit(lambda ref, x: sine(ref) * x)(ref, x)


def not_active(x):
    return product(x, jax.new_ref(np.float64(2)), jnp.sin(x))


def passed_on(x):
    ref = jax.new_ref(x)
    return without_cotangent(ref) * x + ref[...]


def logged(x, log):
    return counted(x, log) * jnp.astype(log[...], float)


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "read": lambda x: sine(jax.new_ref(x)),
    "jitted": lambda x: jax.jit(sine)(jax.new_ref(x)),
    "written between": written_between,
    "arguments": lambda x: product(x, jax.new_ref(x * x), jnp.sin(x)),
    "not active": not_active,
    "two references": lambda x: two_references(jax.new_ref(x), jax.new_ref(jnp.sin(x))),
    "no cotangent": passed_on,
    "elements": lambda x: two_elements(jax.new_ref(x * VECTOR)),
    "symbolic zeros": lambda x: with_zeros(x, jax.new_ref(x)),
    "nested rules": lambda x: outer(jax.new_ref(x)),
    "a rule that calls its function": lambda x: calls_itself(jax.new_ref(x)),
    "written after": written_after,
    "scan": in_scan,
    "cond": in_cond,
    "call": in_call,
    "remat": jax.checkpoint(lambda x: sine(jax.new_ref(x))),
    "fori_loop": lambda x: lax.fori_loop(0, 3, lambda i, c: sine(jax.new_ref(c)), x),
    "vmap": lambda x: jnp.sum(jax.vmap(lambda x: sine(jax.new_ref(x)))(x * VECTOR)),
    "integer log": lambda x: logged(x, jax.new_ref(np.int32(1))),
    "log": lambda x: logged(x, jax.new_ref(1.0, kind="no_grad_no_remat")),
    "custom_jvp": lambda x: pushed(jax.new_ref(x)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_rule_gets_a_reference(name: str) -> None:
    f = PROGRAMS[name]
    want = jax.grad(f)(X)
    close(xform.grad(f)(X), want)
    close(jax.jit(xform.grad(f, policy=policies.save_nothing))(X), want)


def test_a_custom_jvp_rule_may_write() -> None:
    @jax.custom_jvp
    def squared(ref):
        ref[...] = ref[...] ** 2
        return 3 * ref[...]

    @squared.defjvp
    def _(primals, tangents):
        (ref,), (dref,) = primals, tangents
        dref[...] = 2 * ref[...] * dref[...]
        ref[...] = ref[...] ** 2
        return 3 * ref[...], 3 * dref[...]

    def f(x):
        ref = jax.new_ref(x)
        return squared(ref) + ref[...]

    for derivative in (xform.grad(f), jax.jit(xform.grad(f)), xform.jacfwd(f)):
        close(derivative(X), 8 * X)  # 3 x^2 + x^2


@pytest.mark.parametrize("returned", [(), (0,)])
def test_a_custom_jvp_function_may_return_nothing_that_is_used(returned) -> None:
    @jax.custom_jvp
    def add_to(ref, x):
        ref[...] += x
        return [x for _ in returned]

    @add_to.defjvp
    def _(primals, tangents):
        (ref, x), (dref, dx) = primals, tangents
        ref[...] += x
        dref[...] += dx
        return [x for _ in returned], [dx for _ in returned]

    def f(x):
        ref = jax.new_ref(jnp.zeros(()))
        add_to(ref, x)
        return ref[...] ** 2

    for derivative in (xform.grad(f), jax.jit(xform.grad(f)), xform.jacfwd(f)):
        close(derivative(X), 2 * X)


@jax.custom_vjp
def writes(ref):
    ref[...] = 3 * ref[...]
    return ref[...]


def _writes(ref):
    ref[...] = 3 * ref[...]
    return ref[...], None


writes.defvjp(_writes, lambda _, ct: (ct,))


@jax.custom_vjp
def saves_reference(ref):
    return ref[...]


saves_reference.defvjp(lambda ref: (ref[...], ref), lambda ref, ct: (ct * ref[...],))


def closes_over(x):
    ref = jax.new_ref(x)
    f = jax.custom_vjp(lambda y: y * ref[...])
    f.defvjp(lambda y: (y * ref[...], ref[...]), lambda x, ct: (ct * x,))
    return f(jnp.sin(x))


def same_twice(ref):
    return two_references(ref, ref)


REFUSED = {
    "it writes to the reference": lambda x: writes(jax.new_ref(x)),
    "its forward rule saves the reference": lambda x: saves_reference(jax.new_ref(x)),
    "it closes over the reference": jax.jit(closes_over),
    "one reference": jax.jit(lambda x: same_twice(jax.new_ref(x))),
}


@pytest.mark.parametrize("problem", REFUSED)
def test_custom_vjp_that_writes_saves_captures_or_aliases_a_ref_raises(problem: str) -> None:
    """One reference given twice is an error of JAX too, outside a jitted function or since 0.12."""
    gradient = xform.grad(REFUSED[problem])
    for g in (gradient, jax.jit(gradient)):
        with pytest.raises(ValueError, match=problem):
            g(X)


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "alone"])
def test_linearize_of_a_while_loop_is_refused_only_when_the_map_is_called(jit) -> None:
    """As in JAX. The `custom_vjp` in the loop makes a reference."""
    frozen = jax.custom_vjp(lambda x: jax.freeze(jax.new_ref(x)))
    frozen.defvjp(lambda x: (frozen(x), ()), lambda _, ct: (frozen(ct),))

    @jax.checkpoint
    def f(x):
        step = lambda s: (s[0] + 1, frozen(s[1]))
        return lax.while_loop(lambda s: s[0] < 5, step, (0, x))[1]

    assert jit(lambda x: xform.linearize(f, x)[0])(X) == X
    _, push = xform.linearize(f, X)
    for call in (lambda: push(X), lambda: jax.jit(push)(X), lambda: xform.jvp(f, (X,), (X,))):
        with pytest.raises(NoForwardMode):
            call()
    close(jit(xform.grad(f))(X), np.float64(1))
