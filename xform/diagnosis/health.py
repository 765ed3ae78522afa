"""`health`: finds the layers that keep a model from training.

It runs one or more training steps. `Diagnosis` measures each layer along with the gradient. The
report names the layers whose numbers are abnormal.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform._jax import jit
from xform.diagnosis.diagnosis import CALLER, Diagnosis, Readings
from xform.diagnosis.nonfinite import Origin, find_origin, finite
from xform.diagnosis.report import Report
from xform.errors import WrongArgument
from xform.introspection.callables import check_callable
from xform.introspection.modules import is_inexact_array, take_static_out_of_modules
from xform.modules import with_arrays
from xform.modules.loss_call import LossCall
from xform.policies import save_everything
from xform.program.arithmetic import Value
from xform.program.ir import trace
from xform.transforms.function import Tree
from xform.transforms.reverse import value_and_grad


def health(
    loss: Callable[..., Any],
    params: Tree,
    *batch: Tree,
    steps: int = 1,
    update: Any = None,
    key: Any = None,
    power_iterations: int = 8,
) -> Report:
    """Measure the activations and gradients of each layer, and name the layers at fault.

    A layer begins where parameters are combined with values that depend on the batch: in a matrix
    product, a convolution or a look-up. It includes the operations that depend on its result alone:
    bias, normalization, activation. In the report, a sum of layer results has its own row. Each
    iteration of a scan has its own rows, so each step of a recurrent network does too. Layers are
    found in the traced program, including calls, branches, `jax.checkpoint`, and modules of Flax
    and Equinox.

    Args:
      loss: `loss(params, *batch)`, a pure function that returns a scalar.
      params: pytree of floating-point arrays of any shape, an Equinox module, a Flax NNX state, or
        a Flax NNX module. Of an NNX module the `nnx.Param`s are trained. All other state, such as
        running statistics, is the same in each step.
      *batch: the other inputs of the loss, pytrees. The first axis of their first array is the axis
        of examples. Gradients of neighbouring examples are compared if a layer's result has this
        axis first.
      steps: number of training steps to run. The reported numbers are means over the steps.
      update: an Optax transformation, or a function of parameters and gradient that returns new
        parameters. Without it there is one step, and no update is reported.
      key: random key for the start vectors of the power iterations; None: `jax.random.key(0)`.
      power_iterations: number of power iterations that estimate each layer's largest singular
        value, from below. 0 leaves it out; then the cost is little more than a gradient.

    Returns:
      A `Report`. It prints as a table and iterates over rows. It has `plot`, `save_html`,
      `save_jsonl`, and `findings`: the layers at fault, in execution order.

    Raises:
      NotScalar: the loss returns something other than a scalar.
      WrongArgument: no layer was found, or an argument is not valid.
      NotDifferentiable: the loss has effects, such as a print.

    Cost: one compilation. Each step costs a gradient, a few passes over each layer's result, and
    about a forward and a backward pass for each power iteration. If a value is not finite, one more
    gradient runs operation by operation, to find where the value comes from.
    In your own training loop, use `xform.diagnosis.Diagnosis` to measure layers in the step itself.
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
    check_callable(loss, CALLER)
    steps = _count(steps, "steps", 1)
    power_iterations = _count(power_iterations, "power_iterations", 0)
    if update is None and steps > 1:
        raise WrongArgument(
            f"{CALLER} with steps={steps}", "more than one step needs an update", "",
            "pass update=, such as optax.sgd(0.1) or lambda params, grads: ..., or leave out steps",
        )  # fmt: skip
    whole, params, inputs = _of_arrays(_of_one_batch(loss), params, batch)
    loss, (params, inputs) = take_static_out_of_modules(whole, (params, inputs), is_inexact_array)
    key = jax.random.key(0) if key is None else key
    diagnosis = Diagnosis(loss, params, inputs, power_iterations)
    init, step = _init_and_step(update)

    @jit
    def measure(params: Tree, state: Tree, key: Value) -> Any:
        value, grads, readings = diagnosis.value_and_grad(params, inputs, key)
        if update is None:
            return value, readings, params, state
        after, state = step(params, grads, state)
        return value, diagnosis.updated(readings, params, after), after, state

    state, losses, by_step = init(params), list[float](), list[Readings]()
    origin = None
    for step_key in jax.random.split(key, steps):
        before = params
        value, readings, params, state = measure(params, state, step_key)
        losses.append(float(value))
        by_step.append(jax.tree.map(np.asarray, readings))
        rows = diagnosis.with_verdicts(by_step[-1])
        if not finite(value) or any(r.nonfinite or r.gradient_nonfinite for r in rows):
            origin = _origin(diagnosis, loss, before, inputs)
            by_step = by_step[-1:]  # report this step alone: earlier steps were still finite
            break
    mean = lambda *xs: np.mean(xs, axis=0)
    return diagnosis.report(losses, jax.tree.map(mean, *by_step), origin)


def _of_one_batch(loss: Callable[..., Any]) -> Callable[[Tree, Sequence[Tree]], Any]:
    """Return the loss as a function of its parameters and a sequence of its other inputs."""

    @functools.wraps(loss)
    def whole(params: Tree, batch: Sequence[Tree]) -> Any:
        return loss(params, *batch)

    return whole


def _of_arrays(loss: Callable[[Tree, Tree], Any], params: Tree, batch: Tree) -> Any:
    """Replace Flax NNX modules among the arguments of a loss by pytrees of arrays.

    Return the loss of these pytrees, the parameters and the batch.
    """
    call = with_arrays(LossCall(loss, (params, batch), 0), CALLER)
    if call.f is loss:
        return loss, params, batch

    @functools.wraps(loss)
    def value(params: Tree, batch: Tree) -> Any:
        return call.f(params, *batch)[0]

    params, *rest = call.args
    return value, params, rest


def _count(n: Any, name: str, least: int) -> int:
    """Return `n` as an integer; raise an error if it is not an integer of at least `least`."""
    try:
        count = operator.index(n)
    except TypeError:
        count = -1
    if count < least:
        raise WrongArgument(
            f"{CALLER} with {name}={n!r}",
            f"{name} must be an integer of at least {least}",
            "",
            f"pass such a number, or leave {name} out",
        )
    return count


def _init_and_step(update: Any) -> tuple[Callable[[Tree], Tree], Callable[..., Any]]:
    """Return two functions for `update`, like `init` and `update` of Optax.

    The first returns the optimizer state for parameters. The second takes parameters, gradient and
    state, and returns new parameters and state.
    """
    init, transform = (getattr(update, name, None) for name in ("init", "update"))
    if callable(init) and callable(transform):
        optax_update: Callable[..., Any] = transform

        def step(params: Tree, grads: Tree, state: Tree) -> Any:
            updates, state = optax_update(grads, state, params)
            return jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates), state

        return init, step
    if update is not None and not callable(update):
        raise WrongArgument(
            f"{CALLER} with update={update!r}", f"update has type {type(update).__name__}", "",
            "pass an Optax transformation, or a function of parameters and gradient that returns "
            "new parameters",
        )  # fmt: skip
    new_params: Callable[..., Any] = update or (lambda params, grads: params)
    return lambda params: (), lambda params, grads, state: (new_params(params, grads), state)


def _origin(diagnosis: Diagnosis, loss: Callable[[Tree, Tree], Any], params: Tree, batch: Tree
            ) -> Origin | None:  # fmt: skip
    """Find the origin of a NaN or Inf, in the program of the loss or else of its gradient."""
    leaves, tree = jax.tree.flatten((params, batch))
    gradient = value_and_grad(loss, policy=save_everything)
    args = list(map(jnp.asarray, leaves))
    names = [f"parameter {path}" for path in diagnosis.paths]
    names += ["the batch"] * (len(args) - len(names))
    for f in (loss, gradient):
        prog = trace(lambda *args, f=f: jax.tree.leaves(f(*tree.unflatten(args))), *args)
        origin = find_origin(prog, args, names)
        if origin is not None:
            return origin
    return None
