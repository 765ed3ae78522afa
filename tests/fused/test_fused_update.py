"""Steps of `xform.fused_update`, compared with optax and jax.grad."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xform
from xform import errors

Step = Callable[..., Any]
schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)


def label(params: Any) -> Any:
    return jax.tree.map(lambda x: "adam" if x.ndim > 2 else "sgd", params)


def matrices(params: Any) -> Any:
    numbers = optax.contrib.MuonDimensionNumbers(1, 2)
    return jax.tree.map(lambda x: numbers if x.ndim > 2 else None, params)


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(schedule, weight_decay=0.1),
    "amsgrad": optax.amsgrad(0.1),
    "lion": optax.lion(0.01),
    "rmsprop": optax.rmsprop(0.01, momentum=0.9, centered=True),
    "adagrad": optax.adagrad(0.01),
    "last gradient": optax.optimistic_gradient_descent(0.1),
    "chain": optax.chain(
        optax.clip(0.05),
        optax.scale_by_adam(),
        optax.add_decayed_weights(1e-2),
        optax.scale_by_schedule(schedule),
        optax.scale(-1.0),
    ),
    "masked": optax.masked(optax.adam(0.1), lambda p: jax.tree.map(lambda x: x.ndim > 2, p)),
    "partition": optax.partition({"adam": optax.adam(0.1), "sgd": optax.sgd(0.1)}, label),
    "inject": optax.inject_hyperparams(optax.adamw)(learning_rate=schedule),
}
# These treat all layers of a stack together.
OVER_LAYERS = {
    "adafactor": optax.adafactor(0.1),
    "block_rms": optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
    "muon": optax.contrib.muon(0.1, muon_weight_dimension_numbers=matrices),
    "lamb": optax.lamb(0.1),
}


def tied(n: int = 3, d: int = 8) -> tuple[Callable[..., Any], Any, Any]:
    """Return a loss, its parameters and a batch: scanned layers, and one embedding used twice."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "embed": jax.random.normal(keys[0], (10, d)),
        "layers": {
            "w": jax.random.normal(keys[1], (n, d, d)) / 4,
            "b": jax.random.normal(keys[2], (n, d)) / 4,
        },
        "scale": jax.random.normal(keys[3], (d,)),
    }

    def loss(params: Any, tokens: Any) -> Any:
        def layer(h: Any, p: Any) -> Any:
            return h + jnp.tanh(h @ p["w"] + p["b"]), None

        h, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
        logits = (h * params["scale"]) @ params["embed"].T
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])

    return loss, params, jnp.arange(6)


def separate(loss: Any, optimizer: Any, value_and_grad: Any = jax.value_and_grad) -> Step:
    """Return the step that computes the whole gradient before it updates."""

    def step(params: Any, state: Any, *batch: Any) -> Any:
        value, grads = value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def run(step: Step, params: Any, state: Any, *batch: Any, n: int = 3) -> Any:
    value = None
    for _ in range(n):
        params, state, value = step(params, state, *batch)
    return params, state, value


def assert_close(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        largest = float(np.max(np.abs(y), initial=0))
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * largest)


def assert_equal(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_optax(name: str) -> None:
    loss, params, tokens = tied()
    optimizer = OPTIMIZERS[name]
    start = params, optimizer.init(params), tokens
    fused = xform.fused_update(loss, optimizer)
    ours = run(jax.jit(fused), *start)
    assert_close(ours, run(jax.jit(separate(loss, optimizer)), *start))
    where = fused.where(*start)
    in_loop = {row.name for row in where.rows if row.place == "backward loop"}
    assert in_loop == {"['layers']['w']", "['layers']['b']"}


# Products with these numbers are exact, so it does not matter where XLA fuses `a * b + c`.
EXACT = {
    "sgd": optax.sgd(0.125),
    "nesterov": optax.sgd(0.125, momentum=0.5, nesterov=True),
    "adamw": optax.adamw(0.125, b1=0.5, b2=0.5, eps=2**-20, weight_decay=0.25),
    "lion": optax.lion(0.125, b1=0.5, b2=0.75, weight_decay=0.25),
}


@pytest.mark.parametrize("name", EXACT)
def test_the_values_are_those_of_the_separate_update(name: str) -> None:
    loss, params, tokens = tied()
    optimizer = EXACT[name]
    start = params, optimizer.init(params), tokens
    other = separate(loss, optimizer, xform.value_and_grad)
    assert_equal(
        run(jax.jit(xform.fused_update(loss, optimizer)), *start), run(jax.jit(other), *start)
    )


@pytest.mark.parametrize("name", OVER_LAYERS)
def test_an_update_over_all_layers_follows_the_loop(name: str) -> None:
    loss, params, tokens = tied()
    optimizer = OVER_LAYERS[name]
    start = params, optimizer.init(params), tokens
    fused = xform.fused_update(loss, optimizer)
    assert_close(run(jax.jit(fused), *start), run(jax.jit(separate(loss, optimizer)), *start))
    rows = {row.name: row for row in fused.where(*start).rows}
    row = rows["['layers']['w']"]
    assert row.place == "after the backward loop"
    assert row.reason
    assert row.gradient_bytes == params["layers"]["w"].nbytes


def skipping(inner: Any) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that changes nothing if the loss or an auxiliary value is not finite."""

    def update(grads: Any, state: Any, params: Any = None, *, value: Any, aux: Any = 0.0) -> Any:
        good = jnp.isfinite(value) & jnp.isfinite(aux)
        updates, after = inner.update(grads, state, params)
        select = lambda new, old: jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)
        return select(updates, jax.tree.map(jnp.zeros_like, updates)), select(after, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)


@pytest.mark.parametrize("bad", ["", "value", "aux"])
def test_an_optimizer_that_reads_the_value(bad: str) -> None:
    plain, params, tokens = tied()

    def loss(params: Any, tokens: Any) -> Any:
        value = plain(params, tokens)
        if bad == "value":
            value = value / 0
        return value, value / (0 if bad == "aux" else 1)

    inner = OPTIMIZERS["adamw"]
    start = params, inner.init(params), tokens
    fused = xform.fused_update(loss, skipping(inner), has_aux=True)
    new, state, (value, aux) = run(jax.jit(fused), *start)
    places = {row.place for row in fused.where(*start).rows if "layers" in row.name}
    assert places == {"backward loop"}
    if bad:
        assert_equal((new, state), start[:2])
        return
    other = run(jax.jit(separate(plain, inner)), *start)
    assert_close((new, state, value), other)
    assert_close(aux, other[2])
    step = xform.fused_update(plain, skipping(inner))
    assert_close(run(jax.jit(step), *start), other)


def test_outside_jit() -> None:
    loss, params, tokens = tied()
    optimizer = OPTIMIZERS["adamw"]
    start = params, optimizer.init(params), tokens
    fused = xform.fused_update(loss, optimizer)
    assert_close(run(fused, *start), run(jax.jit(fused), *start))


def test_a_norm_over_all_parameters_is_an_error() -> None:
    loss, params, tokens = tied()
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    step = xform.fused_update(loss, optimizer)
    with pytest.raises(errors.CoupledUpdate, match=r"4 parameters.*\['embed'\]") as caught:
        step(params, optimizer.init(params), tokens)
    assert "clip_by_previous_global_norm" in caught.value.remedy
    assert __file__ in caught.value.where


def test_accumulated_gradients_are_an_error() -> None:
    loss, params, tokens = tied()
    optimizer = optax.MultiSteps(optax.adam(0.1), 2)
    step = xform.fused_update(loss, optimizer)
    with pytest.raises(errors.CoupledUpdate, match="accumulates gradients"):
        step(params, optimizer.init(params), tokens)


def unrolled(n: int, d: int) -> tuple[Callable[..., Any], Any]:
    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    return loss, [jnp.full((d, d), 0.01)] * n


def scanned(n: int, d: int) -> tuple[Callable[..., Any], Any]:
    def loss(params: Any, x: Any) -> Any:
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)
        return jnp.sum(h**2)

    return loss, jnp.full((n, d, d), 0.01)


def test_a_deep_network_is_planned_in_linear_time() -> None:
    """Each residual layer doubles the paths from the gradient back; no walk may follow them all."""

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = x + jnp.tanh(x * w) * jnp.sin(x)
        return jnp.sum(x)

    params, optimizer = [jnp.ones(3)] * 40, OPTIMIZERS["sgd"]
    rows = xform.fused_update(loss, optimizer).where(params, optimizer.init(params), jnp.ones(3))
    assert {row.place for row in rows.rows} == {"backward pass"}


def temporary_bytes(step: Step, *args: Any) -> int:
    stats: Any = jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile().memory_analysis()
    return stats.temp_size_in_bytes


@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw", "lion"])
def test_memory_of_scanned_layers(name: str) -> None:
    (loss, params), optimizer = scanned(16, 128), OPTIMIZERS[name]
    start = params, optimizer.init(params), jnp.ones((16, 128))
    fused = temporary_bytes(xform.fused_update(loss, optimizer, policy="save_nothing"), *start)
    stack, residuals = params.nbytes, 16 * 16 * 128 * 4
    assert temporary_bytes(separate(loss, optimizer), *start) > stack
    assert fused < residuals + 3 * stack / 16


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("policy", [None, "save_nothing"])
def test_memory_of_unrolled_layers(name: str, policy: Any) -> None:
    (loss, params), optimizer = unrolled(6, 64), OPTIMIZERS[name]
    start = params, optimizer.init(params), jnp.ones((16, 64))
    fused = temporary_bytes(xform.fused_update(loss, optimizer, policy=policy), *start)
    grad = lambda f: xform.value_and_grad(f, policy=policy)
    assert fused <= temporary_bytes(separate(loss, optimizer, grad), *start)
    assert fused <= temporary_bytes(separate(loss, optimizer), *start)


def test_another_state_is_refused() -> None:
    """Forgetting the state shifts the batch to its place; another optimizer has other states."""
    w, x = jnp.ones((3, 3)), jnp.ones((2, 3))
    step = xform.fused_update(lambda w, x: jnp.sum(jnp.tanh(x @ w)), optax.adam(0.1))
    for state, *batch in ((x,), (optax.sgd(0.1).init(w), x)):
        with pytest.raises(errors.WrongArgument, match=r"not a state of this optimizer"):
            step(w, state, *batch)


def test_object_without_an_update_raises() -> None:
    with pytest.raises(errors.WrongArgument, match="type float, which has no update"):
        xform.fused_update(lambda w: w, 0.1)
