"""A loop primitive of a user works everywhere, with one rule and nothing else.

`repeat` runs a function a given number of times. The same programs with `lax.scan` in its place say
what should come out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

import xform
from xform import passes
from xform.extend import Body, Flow
from xform.interpret.cost import program_flops
from xform.interpret.jvp import jvp
from xform.interpret.pullback import pullback
from xform.memory.batch_axes import batch_axes
from xform.program.ir import evaluate, program, trace

Loop = Callable[..., list[Any]]
repeat_p = Primitive("repeat_for_the_tests")
repeat_p.multiple_results = True


def repeat(f: Any, n: int, consts: Sequence[Any], start: Sequence[Any]) -> list[Any]:
    """Run `start = f(*consts, *start)` `n` times, by the new primitive."""
    body = jax.make_jaxpr(f)(*consts, *start)
    return repeat_p.bind(*map(jnp.asarray, [*consts, *start]), body=body, times=n)


def scanned(f: Any, n: int, consts: Sequence[Any], start: Sequence[Any]) -> list[Any]:
    """Do the same by `lax.scan`."""
    return lax.scan(lambda s, _: (f(*consts, *s), None), list(start), length=n)[0]


def as_scan(*xs: Any, body: Any, times: int) -> list[Any]:
    first = len(xs) - len(body.out_avals)
    run = lambda *inputs: evaluate(program(body), inputs)
    return scanned(run, times, xs[:first], xs[first:])


def mapped(xs: Any, axes: Any, *, body: Any, times: int) -> Any:
    """Return the loop over a batch. All of its values have the batch as axis 0."""
    size = next(x.shape[a] for x, a in zip(xs, axes, strict=True) if a is not None)
    spread = [jnp.broadcast_to(x, (size, *x.shape)) if a is None else jnp.moveaxis(x, a, 0)
              for x, a in zip(xs, axes, strict=True)]  # fmt: skip
    first = len(xs) - len(body.out_avals)
    f = jax.vmap(lambda *inputs: evaluate(program(body), inputs))
    return repeat(f, times, spread[:first], spread[first:]), [0] * len(body.out_avals)


repeat_p.def_impl(jax.jit(as_scan, static_argnames=("body", "times")))
repeat_p.def_abstract_eval(lambda *_, body, times: body.out_avals)
batching.primitive_batchers[repeat_p] = mapped
mlir.register_lowering(repeat_p, mlir.lower_fun(as_scan, multiple_results=True))


class Repeat(xform.extend.Structured):
    """The rule. Its derivatives are those of a scan."""

    def flow(self, eqn):
        n, m = len(eqn.invars), len(eqn.outvars)
        body = Body(program(eqn.params["body"]), range(n), range(m))
        return Flow((body,), carried={n - m + r: r for r in range(m)}, length=eqn.params["times"])

    def rebuild(self, eqn, xs, functions, each=None):
        first = len(eqn.invars) - len(eqn.outvars)
        step = lambda s, each: functions[0]([*xs[:first], *s], each)
        return lax.scan(step, list(xs[first:]), each, length=eqn.params["times"])

    def jvp(self, eqn, xs, dxs):
        return jvp(self._scan(eqn), xs, dxs)

    def vjp(self, eqn, xs, active, wanted):
        return pullback(self._scan(eqn), active, wanted, xs)

    def _scan(self, eqn):
        return trace(functools.partial(as_scan, **eqn.params), *[v.aval for v in eqn.invars])


xform.extend.add_rule(repeat_p, Repeat("repeat_for_the_tests", "structured", own=False))

W, X = jnp.linspace(-1.0, 1.0, 64).reshape(8, 8), jnp.linspace(0.5, 2.0, 48).reshape(6, 8)


def layers(loop: Loop) -> Any:
    def loss(w: Any, x: Any) -> Any:
        (x,) = loop(lambda a, x: [x * a], 2, [0.5], [x])  # carries no derivative
        (h,) = loop(lambda w, h: [jnp.tanh(h @ w)], 3, [w], [x])
        return jnp.mean(h**2)

    return loss


def both(f: Callable[[Loop], Any]) -> tuple[Any, Any]:
    return f(repeat), f(scanned)


def test_derivatives() -> None:
    def derivatives(loop: Loop) -> Any:
        loss = layers(loop)
        budget = xform.grad(loss, policy="saved:800B")
        return (
            xform.value_and_grad(loss)(W, X),
            jax.jit(budget)(W, X),
            xform.jvp(loss, (W, X), (W, X)),
            jax.vmap(xform.grad(loss), (None, 0))(W, X),
        )

    for a, b in zip(*map(jax.tree.leaves, both(derivatives)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_operations_of_all_iterations_count() -> None:
    a, b = both(lambda loop: program_flops(layers(loop), W, X))
    assert a == b > 3 * 2 * 6 * 8 * 8


def test_sparsity_is_that_of_three_iterations() -> None:
    def pattern(loop: Loop) -> Any:
        f = lambda x: loop(lambda y: [jnp.roll(y, 1) * y], 3, [], [x])[0]
        return np.asarray(xform.sparse.sparsity(f, jnp.ones(9)).todense())

    a, b = both(pattern)
    assert (a == b).all()
    assert a.sum(1).max() == 4


def test_batches_pass_through() -> None:
    found = lambda loop: batch_axes(trace(lambda *xs: [xform.grad(layers(loop))(*xs)], W, X))
    a, b = both(found)
    assert a == b
    assert [batch.size for batch in a] == [6]


def test_health_reads_each_iteration() -> None:
    rows = lambda loop: [(r.name, r.verdict) for r in xform.health(layers(loop), W, X)]
    a, b = both(rows)
    assert a == b
    assert len(a) == 3


def test_passes_change_its_body() -> None:
    f = lambda x: repeat(lambda a, b: [a * 1.0 + a * 1.0, b + a], 3, [], [x, jnp.cos(x)])[0]
    tidy = passes.Pipeline([passes.Simplify(), passes.Cse(), passes.Dce()])
    text = passes.listing(trace(lambda x: [tidy(f)(x)], X))
    assert text.count(" = ") == 2  # the loop, and the sum in it
    np.testing.assert_allclose(tidy(f)(X), f(X))
