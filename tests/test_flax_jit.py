"""`xform.flax.jit` against `flax.nnx.jit`: values, state, and a byte budget for a whole step."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import xform
from tests.memory.rows import wrong_rows
from tests.nnx import MODES, Mlp, Plain, loss, same
from xform.errors import BudgetInfeasible, WrongArgument
from xform.policies import budget

pytestmark = pytest.mark.usefixtures("quick_compilation")

# By default Adam divides a gradient near 0 by its size, and amplifies its rounding.
ADAM = optax.adam(1e-2, eps=1e-3)
X = jnp.sin(jnp.arange(128.0 * 32).reshape(128, 32))
MOST = 2**40


class Deep(nnx.Module):
    """A loop of layers, whose activations are most of a step's memory, and running state."""

    def __init__(self, dropout: float = 0.0):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(32, 32, rngs=rngs)
        self.rest = nnx.Param(jax.random.normal(rngs.params(), (12, 32, 32)) / 6)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None

    def __call__(self, x: jax.Array) -> jax.Array:
        layer = lambda h, w: (jnp.sin(h @ w), None)
        x = self.norm(jax.lax.scan(layer, self.first(x), self.rest[...])[0])
        return x if self.dropout is None else self.dropout(x)


def start(**options: Any) -> tuple[Any, ...]:
    """A model, its optimizer and its metrics."""
    model = Deep(**options)
    return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param), nnx.metrics.Average()


def step(model: Any, optimizer: Any, metrics: Any, x: Any, **modes: Any) -> Any:
    value, grads = xform.flax.value_and_grad(loss, **modes)(model, x)
    optimizer.update(model, grads)
    metrics.update(values=value)
    return {"value": value, "scaled": 2 * value}


def compiled_bytes(function: Any, *args: Any, **options: Any) -> int:
    said: Any = nnx.jit(function, **options).lower(*args).compile().memory_analysis()
    total = said.argument_size_in_bytes + said.output_size_in_bytes + said.temp_size_in_bytes
    return total - said.alias_size_in_bytes


def jit(function: Any, size: int = MOST, **options: Any) -> Any:
    return xform.flax.jit(function, budget(size), **options)


@MODES
def test_values_and_state_equal_nnx(modes: dict[str, Any]) -> None:
    run = functools.partial(step, **modes)
    default = compiled_bytes(run, *start(), X, donate_argnums=(0, 1), **modes)
    planned = jit(run, int(0.75 * default), donate_argnums=(0, 1), **modes)
    ours, theirs, expected = start(), start(), nnx.jit(run, **modes)
    for _ in range(3):
        buffer = ours[0].rest[...]
        same(planned(*ours, X), expected(*theirs, X))
        same(nnx.state(ours), nnx.state(theirs))
        assert buffer.is_deleted()
    assert int(ours[1].step[...]) == 3
    assert planned.plan.compiled_bytes <= 0.75 * default
    assert planned.plan.recompute_flops > 0
    report = planned.memory_analysis()
    assert report.total_bytes == planned.plan.compiled_bytes
    assert wrong_rows(report) == []
    assert report.alias_bytes > 0
    first = next(iter(planned.plan)).rows[0].value
    assert planned.explain(first) == planned.plan.explain(first)


def sgd(model: Any, x: Any, **modes: Any) -> Any:
    value, grads = xform.flax.value_and_grad(loss, **modes)(model, x)
    new = jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(model, nnx.Param), grads)
    nnx.update(model, new)
    return value


@MODES
def test_a_step_of_modules_is_planned_and_compared(modes: dict[str, Any]) -> None:
    """It takes three seconds: the step is compiled under two policies, and for a budget."""
    run, args = functools.partial(step, **modes), (*start(), X)
    jitted = xform.flax.jit(run, **modes)
    free, less = xform.compare(jitted, *args, policies=[None, "save_nothing"])
    assert less.report.total_bytes < free.report.total_bytes
    assert free.report.total_bytes == compiled_bytes(run, *args, **modes)
    most = int(0.9 * free.report.total_bytes)
    plan = xform.plan(jitted, *args, policy=budget(most))
    assert plan.compiled_bytes <= most
    assert plan.recompute_flops > 0
    assert xform.plan(jitted, *args, policy=budget(most)).compiles == 0
    theirs = *start(), X
    same(jitted.under(plan)(*args), nnx.jit(run, **modes)(*theirs))
    same(nnx.state(args[:3]), nnx.state(theirs[:3]))


@pytest.mark.slow
def test_a_budget_that_nothing_fits() -> None:
    model = Deep()
    with pytest.raises(BudgetInfeasible, match="largest buffers") as caught:
        jit(sgd, 1024)(model, X)
    same(nnx.state(model), nnx.state(Deep()))
    floor = caught.value.floor_bytes
    lowest = jit(sgd, floor)
    same(lowest(model, X), nnx.jit(sgd)(Deep(), X))
    assert lowest.plan.compiled_bytes <= floor


@MODES
def test_without_a_budget(modes: dict[str, Any]) -> None:
    run = functools.partial(step, **modes)
    ours, theirs = start(), start()
    same(xform.flax.jit(run, "save_dots", **modes)(*ours, X), nnx.jit(run, **modes)(*theirs, X))
    same(nnx.state(ours), nnx.state(theirs))
    with pytest.raises(WrongArgument, match="was not called yet"):
        _ = jit(step).plan
    with pytest.raises(WrongArgument, match="not callable"):
        jit(3)


def test_jit_plans_once_for_each_set_of_input_types(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = []

    def counted(model: Any, x: Any) -> Any:
        traces.append(x.shape)
        return xform.flax.value_and_grad(loss)(model, x)[0]

    planned, model = jit(counted), Deep()
    planned(model, X)
    n, plan = len(traces), planned.plan
    planned(model, X + 1)
    assert len(traces) == n
    assert planned.plan is plan
    planned(model, X[:64])
    assert len(traces) > n
    assert planned.plan is not plan


def test_gradients_of_nnx_after_install() -> None:
    def run(model: Any, x: Any) -> Any:
        value, grads = nnx.value_and_grad(loss)(model, x)
        return value, nnx.grad(lambda m: 2 * loss(m, x))(model), grads

    want = nnx.jit(run)(Deep(), X)
    with xform.install():
        planned = jit(run)
        same(planned(Deep(), X), want)
        assert len(planned.plan) == 2
    with xform.install(policy="budget:1KiB"):  # the step's own budget counts
        planned = jit(run)
        same(planned(Deep(), X), want)
        assert len(planned.plan) == 2


def test_static_arguments() -> None:
    def run(model: Any, name: str, x: Any, *, factor: Any) -> Any:
        assert name == "a name"
        return xform.flax.value_and_grad(loss)(model, x)[0] * factor[0]

    options = {"static_argnums": 1, "static_argnames": ("factor",)}
    want = nnx.jit(run, **options)(Deep(), "a name", X, factor=(2, None))
    same(jit(run, **options)(Deep(), "a name", X, factor=(2, None)), want)


def test_decorators_methods_and_keywords() -> None:
    class Trained(Plain):
        @xform.flax.jit(policy="budget:1MiB", graph_updates=True)
        def fit(self, x: Any, factor: Any = 1.0) -> Any:
            """Take a step."""
            value, grads = xform.flax.value_and_grad(loss)(self, x)
            nnx.update(self, jax.tree.map(lambda w, g: w - factor * g, nnx.state(self, nnx.Param),
                                          grads))  # fmt: skip
            return value

    ours, theirs = Trained(), Trained()
    same(ours.fit(X[:, :3], factor=0.5), nnx.jit(Trained.fit.fun)(theirs, X[:, :3], factor=0.5))
    same(nnx.state(ours), nnx.state(theirs))
    assert Trained.fit.__doc__ == "Take a step."
    assert ours.fit.plan is Trained.fit.plan
    with pytest.raises(WrongArgument, match=r"pass Mlp\.__call__"):
        xform.flax.jit(Mlp().__call__)


def test_changes_of_structure() -> None:
    def run(model: Any, x: Any) -> Any:
        model.seen = nnx.Variable(jnp.mean(x))
        return xform.flax.grad(loss)(model, x), model.first

    ours, theirs = Deep(), Deep()
    actual, expected = jit(run)(ours, X), nnx.jit(run)(theirs, X)
    same(actual[0], expected[0])
    assert actual[1] is ours.first  # an output that is a part of an argument
    same(nnx.state(ours), nnx.state(theirs))


@MODES
def test_lower_takes_types(modes: dict[str, Any]) -> None:
    def run(model: Any, x: Any) -> Any:
        model.norm.mean[...] += 1
        return xform.flax.value_and_grad(loss, **modes)(model, x)[0]

    args = nnx.eval_shape(lambda: (Deep(), X), **modes)
    planned = jit(run, **modes)
    lowered = planned.lower(*args)
    assert lowered.plan is planned.plan
    assert lowered.memory_analysis().total_bytes == compiled_bytes(run, *args, **modes)
    assert lowered.as_text() == lowered.lowered.as_text()
    compiled = lowered.compile()
    assert compiled.compiled is lowered.lowered.compile()  # it is not compiled again
    ours, theirs = Deep(), Deep()
    same(compiled(ours, X), nnx.jit(run, **modes)(theirs, X))
    same(nnx.state(ours), nnx.state(theirs))
    assert planned.eval_shape(ours, X).shape == ()


def test_devices_that_are_not_attached() -> None:
    planned = jit(lambda m, x: xform.flax.grad(loss)(m, x), target="cpu:8")
    assert planned.lower(Plain(), X[:, :3]).memory_analysis().total_bytes > 0
    with pytest.raises(WrongArgument, match="not attached"):
        planned.lower(Plain(), X[:, :3]).compile()
    with pytest.raises(WrongArgument, match="not attached"):
        planned(Plain(), X[:, :3])


def test_shardings() -> None:
    mesh = jax.make_mesh((1,), ("data",))
    whole, rows = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
    states = nnx.StateSharding({nnx.Param: rows, ...: whole})

    def run(model: Any, flag: str, x: Any) -> Any:
        value, grads = xform.flax.value_and_grad(loss)(model, x)
        model.norm.mean[...] += value
        return value, grads

    options = {"in_shardings": (states, rows), "out_shardings": (whole, None), "static_argnums": 1}
    ours, theirs = Deep(), Deep()
    same(jit(run, **options)(ours, "flag", X), nnx.jit(run, **options)(theirs, "flag", X))
    kernels = [m.first.kernel[...].sharding.spec for m in (ours, theirs)]
    assert kernels == [PartitionSpec("data")] * 2
    plain = {"in_shardings": (whole, rows), "out_shardings": whole, "graph": False}
    tree = lambda model, x: xform.flax.value_and_grad(loss, graph=False)(model, x)[0]
    same(jit(tree, **plain)(Deep(), X), nnx.jit(tree, **plain)(Deep(), X))


def test_cached_partial() -> None:
    ours, theirs = start(), start()
    planned = nnx.cached_partial(jit(step), *ours)
    expected = nnx.cached_partial(nnx.jit(step), *theirs)
    for _ in range(2):
        same(planned(X), expected(X))
    same(nnx.state(ours), nnx.state(theirs))


def test_inside_another_jit_the_budget_is_ignored() -> None:
    planned, ours, theirs = jit(step), start(), start()
    with pytest.warns(UserWarning, match="is ignored"):
        actual = nnx.jit(lambda *args: planned(*args))(*ours, X)
    same(actual, nnx.jit(step)(*theirs, X))
    same(nnx.state(ours), nnx.state(theirs))


@pytest.mark.slow
def test_a_plan_is_kept_on_disk(tmp_path: Path) -> None:
    size = int(0.75 * compiled_bytes(sgd, Deep(), X))
    first, again = (jit(sgd, size, plans=tmp_path) for _ in range(2))
    same(first(Deep(), X), again(Deep(), X))
    assert len(list(tmp_path.iterdir())) == 1
    assert first.plan.compiles > 1
    assert again.plan.seconds == 0  # it was read
    same(xform.flax.jit(sgd, first.plan)(Deep(), X), first(Deep(), X))


def test_a_training_loop_of_flax() -> None:
    """Flax's examples/nnx_toy_examples/05_vae.py, on random images; the decorator is exchanged."""

    class Loss(nnx.Variable):
        pass

    class Encoder(nnx.Module):
        def __init__(self, din: int, dmid: int, dout: int, *, rngs: nnx.Rngs):
            self.linear1 = nnx.Linear(din, dmid, rngs=rngs)
            self.linear_mean = nnx.Linear(dmid, dout, rngs=rngs)
            self.linear_std = nnx.Linear(dmid, dout, rngs=rngs)
            self.rngs = rngs

        def __call__(self, x: jax.Array) -> jax.Array:
            x = jax.nn.relu(self.linear1(x.reshape((x.shape[0], -1))))
            mean = self.linear_mean(x)
            std = jnp.exp(self.linear_std(x))
            kl_loss = 0.5 * jnp.mean(-jnp.log(std**2) - 1.0 + std**2 + mean**2, axis=-1)
            self.kl_loss = Loss(jnp.mean(kl_loss))
            return mean + std * jax.random.normal(self.rngs.noise(), mean.shape)

    class VAE(nnx.Module):
        def __init__(self, shape: tuple[int, ...], *, rngs: nnx.Rngs):
            self.shape = shape
            self.encoder = Encoder(int(np.prod(shape)), 64, 8, rngs=rngs)
            self.decoder = nnx.Sequential(
                nnx.Linear(8, 64, rngs=rngs),
                jax.nn.relu,
                nnx.Linear(64, int(np.prod(shape)), rngs=rngs),
            )

        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.reshape(self.decoder(self.encoder(x)), (-1, *self.shape))

    def train_step(model: VAE, optimizer: nnx.Optimizer[VAE], x: jax.Array):
        def loss_fn(model: VAE):
            logits = model(x)
            losses = nnx.pop(model, Loss)
            kl_loss = sum(jax.tree_util.tree_leaves(losses), 0.0)
            return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, x)) + 0.1 * kl_loss

        value, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return value

    def run(jitted: Any) -> Any:
        model = VAE((8, 8), rngs=nnx.Rngs(0, noise=1))
        optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
        images = np.random.default_rng(0).random((4, 128, 8, 8)) > 0.5
        losses = [jitted(model, optimizer, x.astype(np.float32)) for x in images]
        return losses, nnx.state((model, optimizer))

    want = run(nnx.jit(train_step))
    with xform.install():
        planned = jit(train_step)
        same(run(planned), want)
    assert len(planned.plan) == 1
