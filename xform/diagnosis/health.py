"""`health`: which layer is why a model does not train."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.arithmetic import Value
from xform.callables import check_callable
from xform.diagnosis.diagnosis import ASKED, Diagnosis, Readings
from xform.diagnosis.nonfinite import Origin, finite, origin
from xform.diagnosis.report import Report
from xform.errors import WrongArgument
from xform.ir import trace
from xform.modules import inexact, opened
from xform.policies import save_everything
from xform.transforms.function import Tree
from xform.transforms.reverse import value_and_grad


def health(
    loss: Callable[[Tree, Tree], Any],
    params: Tree,
    batch: Tree,
    *,
    steps: int = 1,
    update: Any = None,
    key: Any = None,
    iterations: int = 8,
) -> Report:
    """Why does it not train? What each layer makes, what gradient it gets, and what is wrong there.

    A layer begins where parameters meet what depends on the batch (a product, a convolution, a
    look-up), and has what follows from that alone: bias, norm, activation. Sums of layers are rows
    too. Of a scan each trip is one, as are the steps of a recurrent network. Layers are found in
    the traced program: in calls, branches, remat regions, and modules of Flax and Equinox.

    Args:
      loss: `loss(params, batch)`, a pure function that returns a scalar.
      params: pytree of floats of any shape, a module of Equinox, or a state of Flax NNX.
      batch: pytree of what the loss reads besides. The first axis of its first array is that of the
        examples, whose gradients are compared where a layer's result has that axis first.
      steps: how many steps of training are read. Numbers are means over them.
      update: how to step: an Optax transformation, or a function of parameters and gradient that
        returns new parameters. Without one there is one step, and no update to report.
      key: of the first vectors of power iterations; `jax.random.key(0)` without.
      iterations: of the power iteration for each layer's largest singular value, which it
        approaches from below; 0 leaves it out, and then all costs little more than a gradient.

    Returns:
      A `Report`: prints as a table, iterates over rows, `plot`, `save_html`, `save_jsonl`, and
      `findings`, the layers that are at fault, the worst first.

    Raises:
      NotScalar: the loss returns something other than a scalar.
      WrongArgument: no layer was found, or an argument is unusable.
      NotDifferentiable: the loss has effects, such as a print.

    Cost: a compilation; then of each step a gradient and a few passes over each layer's result, and
    for each iteration about a forward and a backward pass. If something is not finite, one more
    gradient, run operation by operation.
    In a training loop of your own, `xform.diagnosis.Diagnosis` reads layers in the step itself.
    Source: Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural
    networks", AISTATS 2010; Balduzzi et al., "The Shattered Gradients Problem", arXiv:1702.08591;
    Pascanu et al., "On the difficulty of training recurrent neural networks", arXiv:1211.5063.

    >>> def loss(ws, batch):
    ...     h = batch
    ...     for w in ws:
    ...         h = jax.nn.relu(h @ w)
    ...     return jnp.mean(h**2)
    >>> keys = jax.random.split(jax.random.key(0), 5)
    >>> ws = [jax.random.normal(k, (64, 64)) / 32**0.5 for k in keys]
    >>> ws[2] = ws[2] / 100
    >>> report = xform.health(loss, ws, jax.random.normal(keys[0], (32, 64)))
    >>> [(row.name, row.verdict) for row in report.findings]
    [('ws.2', 'vanishing')]
    """
    check_callable(loss, ASKED)
    steps = _count(steps, "steps", 1)
    iterations = _count(iterations, "iterations", 0)
    if update is None and steps > 1:
        raise WrongArgument(
            ASKED, f"there is no update to make {steps} steps with", "",
            "pass update=, such as optax.sgd(0.1) or lambda params, grads: ..., or leave out steps",
        )  # fmt: skip
    loss, (params, batch) = opened(loss, (params, batch), inexact)
    key = jax.random.key(0) if key is None else key
    of = Diagnosis(loss, params, batch, iterations)
    start, step = _stepping(update)

    @jax.jit
    def measure(params: Tree, state: Tree, key: Value) -> Any:
        value, grads, read = of.value_and_grad(params, batch, key)
        if update is None:
            return value, read, params, state
        after, state = step(params, grads, state)
        return value, of.updated(read, params, after), after, state

    state, losses, every = start(params), list[float](), list[Readings]()
    cause = None
    for k in jax.random.split(key, steps):
        before = params
        value, read, params, state = measure(params, state, k)
        losses.append(float(value))
        every.append(jax.tree.map(np.asarray, read))
        rows = of.judged(every[-1])
        if not finite(value) or any(r.nonfinite or r.gradient_nonfinite for r in rows):
            cause = _origin(of, loss, before, batch)
            every = every[-1:]  # what it had before says nothing of it
            break
    return of.report(losses, jax.tree.map(_mean, *every), cause)


def _mean(*xs: Any) -> Any:
    return np.mean(xs, axis=0)


def _count(n: Any, name: str, least: int) -> int:
    try:
        n = operator.index(n)
    except TypeError:
        n = -1
    if n < least:
        raise WrongArgument(ASKED, f"{name} is no whole number from {least} on", "",
                            f"give {name} as such, or leave it out")  # fmt: skip
    return n


def _stepping(update: Any) -> tuple[Callable[[Tree], Tree], Callable[[Tree, Tree, Tree], Any]]:
    """How to make the state of an update, and to step: new parameters and state."""
    start, move = (getattr(update, name, None) for name in ("init", "update"))
    if callable(start) and callable(move):
        moved: Callable[..., Any] = move

        def step(params: Tree, grads: Tree, state: Tree) -> Any:
            moves, state = moved(grads, state, params)
            return jax.tree.map(lambda p, m: (p + m).astype(p.dtype), params, moves), state

        return start, step
    if update is not None and not callable(update):
        raise WrongArgument(
            ASKED, f"update is a {type(update).__name__}", "",
            "pass an Optax transformation, or a function of parameters and gradient that returns "
            "new parameters",
        )  # fmt: skip
    by: Callable[..., Any] = update or (lambda params, grads: params)
    return lambda params: (), lambda params, grads, state: (by(params, grads), state)


def _origin(of: Diagnosis, loss: Callable[[Tree, Tree], Any], params: Tree, batch: Tree
            ) -> Origin | None:  # fmt: skip
    """Where what is not finite comes from: in the program of the loss, else of its gradient."""
    leaves, tree = jax.tree.flatten((params, batch))
    gradient = value_and_grad(loss, policy=save_everything)
    args = list(map(jnp.asarray, leaves))
    for f in (loss, gradient):
        prog = trace(lambda *args, f=f: jax.tree.leaves(f(*tree.unflatten(args))), *args)
        found = origin(prog, args, range(len(prog.outputs)))
        if found is not None and found.operation == "argument":
            place = int(found.where)
            name = f"parameter {of.paths[place]}" if place < len(of.paths) else "the batch"
            return Origin(found.operation, name, value=found.value)
        if found is not None:
            return found
    return None
