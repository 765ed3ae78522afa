"""`xform.equinox.filter_jit` against `equinox.filter_jit`: values, and a byte budget for a step."""

import warnings
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xform
from tests.memory.rows import wrong_rows
from xform.errors import BudgetInfeasible, WrongArgument
from xform.policies import budget

eqx = pytest.importorskip("equinox")
pytestmark = pytest.mark.usefixtures("quick_compilation")

ADAM = optax.adam(1e-2)
X = jnp.sin(jnp.arange(128.0 * 32).reshape(128, 32))
MOST = 2**40


class Deep(eqx.Module):
    """A loop of layers, whose activations are most of a step's memory, and other leaves."""

    first: Any
    rest: jax.Array
    activation: Any
    name: str

    def __init__(self):
        keys = jax.random.split(jax.random.key(0))
        self.first = eqx.nn.Linear(32, 32, key=keys[0])
        self.rest = jax.random.normal(keys[1], (12, 32, 32)) / 6
        self.activation, self.name = jnp.sin, "deep"

    def __call__(self, x: jax.Array) -> jax.Array:
        layer = lambda h, w: (self.activation(h @ w), None)
        return jax.lax.scan(layer, self.first(x), self.rest)[0]


def start() -> tuple[Any, ...]:
    """A model and the state of its optimizer."""
    model = Deep()
    return model, ADAM.init(eqx.filter(model, eqx.is_array))


def loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.vmap(model)(x) ** 2)


def step(x: Any, model: Any, state: Any) -> Any:
    value, grads = xform.equinox.filter_value_and_grad(loss)(model, x)
    updates, state = ADAM.update(grads, state)
    return eqx.apply_updates(model, updates), state, value


def sgd(model: Any, x: Any, rate: float = 0.1) -> Any:
    grads = xform.equinox.filter_grad(loss)(model, x)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -rate * g, grads)), {"rate": rate}


def compiled_bytes(function: Any, *args: Any, **options: Any) -> int:
    said = eqx.filter_jit(function, **options).lower(*args).compile().compiled.memory_analysis()
    total = said.argument_size_in_bytes + said.output_size_in_bytes + said.temp_size_in_bytes
    return total - said.alias_size_in_bytes


def filter_jit(function: Any, size: int = MOST, **options: Any) -> Any:
    return xform.equinox.filter_jit(function, budget(size), **options)


def same(actual: Any, expected: Any) -> None:
    """Check equal structure and values; leaves that are not arrays are equal."""
    arrays, others = eqx.partition(actual, eqx.is_array)
    expected_arrays, expected_others = eqx.partition(expected, eqx.is_array)
    chex.assert_trees_all_close(arrays, expected_arrays, rtol=1e-5, atol=1e-6)
    assert eqx.tree_equal(others, expected_others)


def test_values_and_donation_equal_equinox() -> None:
    default = compiled_bytes(step, X, *start(), donate="all-except-first")
    planned = filter_jit(step, int(0.75 * default), donate="all-except-first")
    ours, theirs, expected = start(), start(), eqx.filter_jit(step)
    for _ in range(3):
        given = ours[0].rest
        *ours, value = planned(X, *ours)
        *theirs, want = expected(X, *theirs)
        same((ours, value), (theirs, want))
        assert given.is_deleted()
        assert not X.is_deleted()
    assert planned.plan.compiled_bytes <= 0.75 * default
    assert planned.plan.recompute_flops > 0
    report = planned.memory_analysis()
    assert report.total_bytes == planned.plan.compiled_bytes
    assert wrong_rows(report) == []
    assert report.alias_bytes > 0
    first = next(iter(planned.plan)).rows[0].value
    assert planned.explain(first) == planned.plan.explain(first)


@pytest.mark.slow
def test_a_budget_that_nothing_fits() -> None:
    with pytest.raises(BudgetInfeasible, match="largest buffers") as caught:
        filter_jit(sgd, 1024)(Deep(), X)
    floor = caught.value.floor_bytes
    lowest = filter_jit(sgd, floor)
    same(lowest(Deep(), X), eqx.filter_jit(sgd)(Deep(), X))
    assert lowest.plan.compiled_bytes <= floor


def test_without_a_budget() -> None:
    planned = xform.equinox.filter_jit(sgd, "save_dots")
    same(planned(Deep(), X), eqx.filter_jit(sgd)(Deep(), X))
    with pytest.raises(WrongArgument, match="was not called yet"):
        _ = filter_jit(sgd).plan
    with pytest.raises(WrongArgument, match="not callable"):
        filter_jit(3)


def test_a_step_of_modules_is_planned_and_compared() -> None:
    jitted, model = xform.equinox.filter_jit(sgd), Deep()
    free, less = xform.compare(jitted, model, X, policies=[None, "save_nothing"])
    assert less.report.total_bytes < free.report.total_bytes == compiled_bytes(sgd, model, X)
    assert free.report.description.arguments == "model (3 arrays, 52.1 KiB), x f32[128,32]"
    assert {row.maker for row in free.report if row.category == "parameter"} >= {"model.rest"}
    plan = xform.plan(jitted, model, X, policy=budget(int(0.9 * free.report.total_bytes)))
    assert plan.compiled_bytes <= 0.9 * free.report.total_bytes
    same(jitted.under(plan)(model, X), eqx.filter_jit(sgd)(model, X))


def sgd_of_arrays(x: Any, w: Any) -> Any:
    return 2 * x, w - xform.grad(lambda w: jnp.sum(jnp.sin(x @ w.T)))(w)


@pytest.mark.parametrize("donate", ["all", "warn", "warn-except-first", "none"])
def test_donation(donate: str) -> None:
    scale = lambda x, y, kept: (2 * x, 3 * y, jnp.sum(kept))
    for jitted in (eqx.filter_jit(scale, donate=donate), filter_jit(scale, donate=donate)):
        x, y, kept = jnp.ones(3), jnp.ones(4), jnp.ones(5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            same(jitted(x, y, kept), scale(jnp.ones(3), jnp.ones(4), jnp.ones(5)))
        assert x.is_deleted() == (donate in ("all", "warn"))
        assert y.is_deleted() == (donate != "none")
        unusable = [w for w in caught if "donated buffers were not usable" in str(w.message)]
        assert bool(unusable) == donate.startswith("warn")
    with pytest.raises(ValueError, match="must be one of"):
        filter_jit(scale, donate="some")
    if donate != "none":
        # The step of xform knows what it donates. Equinox's own function does not tell.
        ours, theirs = (jit(sgd_of_arrays, donate=donate) for jit in (filter_jit, eqx.filter_jit))
        both = donate in ("all", "warn")
        assert xform.memory_analysis(ours, X, X).alias_bytes == (2 if both else 1) * X.nbytes
        with pytest.raises(WrongArgument, match="cannot be read from outside"):
            xform.memory_analysis(theirs, X, X)


def test_filter_jit_plans_once_per_input_types_and_static_values() -> None:
    traces = []

    def counted(model: Any, x: Any, rate: float) -> Any:
        traces.append(x.shape)
        return sgd(model, x, rate)

    planned, model = filter_jit(counted), Deep()
    planned(model, X, 0.1)
    n, plan = len(traces), planned.plan
    planned(model, X + 1, rate=0.1)
    assert len(traces) == n
    assert planned.plan is plan
    for args in ((model, X[:64], 0.1), (model, X, 0.2)):  # other types, another static value
        same(planned(*args), sgd(*args))
        assert len(traces) > n
        n = len(traces)


def test_gradients_of_equinox_after_install() -> None:
    def run(model: Any, x: Any) -> Any:
        value, grads = eqx.filter_value_and_grad(loss)(model, x)
        return value, grads, eqx.filter_grad(lambda m: 2 * loss(m, x))(model)

    want = eqx.filter_jit(run)(Deep(), X)
    with xform.install():
        planned = filter_jit(run)
        same(planned(Deep(), X), want)
        assert len(planned.plan) == 2
    with xform.install(policy="budget:1KiB"):  # the step's own budget counts
        planned = filter_jit(run)
        same(planned(Deep(), X), want)
        assert len(planned.plan) == 2


def test_decorators_methods_and_modules() -> None:
    class Trained(Deep):
        @xform.equinox.filter_jit(policy="budget:1GiB")
        def fit(self, x: Any, *, rate: float = 0.1) -> Any:
            """Take a step."""
            return sgd(self, x, rate)

    ours = Trained()
    same(ours.fit(X, rate=0.5), sgd(ours, X, 0.5))
    assert Trained.fit.__doc__ == "Take a step."
    assert len(Trained.fit.plan) == 1
    module = filter_jit(Deep())  # a callable with arrays, which are arguments of the program
    same(module(X[0]), Deep()(X[0]))
    assert module.memory_analysis().argument_bytes > Deep().rest.nbytes
    doubled = jax.tree.map(lambda x: 2 * x if eqx.is_array(x) else x, module)
    same(doubled(X[0]), jax.tree.map(lambda x: 2 * x if eqx.is_array(x) else x, Deep())(X[0]))


def test_errors_at_run_time() -> None:
    checked = lambda x: eqx.error_if(x, x < 0, "x is negative")
    assert filter_jit(checked)(jnp.float32(1)) == 1
    with pytest.raises(eqx.EquinoxRuntimeError, match="x is negative"):
        filter_jit(checked)(jnp.float32(-1))


def test_lower() -> None:
    planned = filter_jit(sgd)
    lowered = planned.lower(Deep(), X)
    assert lowered.plan is planned.plan
    assert lowered.memory_analysis().total_bytes == compiled_bytes(sgd, Deep(), X)
    assert lowered.as_text() == lowered.lowered.as_text()
    compiled = lowered.compile()
    assert compiled.compiled is lowered.lowered.compile()  # it is not compiled again
    same(compiled(Deep(), X), sgd(Deep(), X))
    there = filter_jit(sgd, target="cpu:8")
    assert there.lower(Deep(), X).memory_analysis().total_bytes > 0
    with pytest.raises(WrongArgument, match="not attached"):
        there(Deep(), X)


def test_inside_another_jit_the_budget_is_ignored() -> None:
    planned = filter_jit(sgd)
    with pytest.warns(UserWarning, match="is ignored"):
        actual = eqx.filter_jit(lambda *args: planned(*args))(Deep(), X)
    same(actual, sgd(Deep(), X))


@pytest.mark.slow
def test_a_plan_is_kept_on_disk(tmp_path: Path) -> None:
    size = int(0.75 * compiled_bytes(sgd, Deep(), X))
    first, again = (filter_jit(sgd, size, plans=tmp_path) for _ in range(2))
    same(first(Deep(), X), again(Deep(), X))
    assert len(list(tmp_path.iterdir())) == 1
    assert first.plan.compiles > 1
    assert again.plan.seconds == 0  # it was read
    same(xform.equinox.filter_jit(sgd, first.plan)(Deep(), X), first(Deep(), X))


def test_a_training_loop_of_equinox() -> None:
    """Equinox's docs/examples/train_rnn.ipynb, on random data; the decorator is exchanged."""

    class RNN(eqx.Module):
        hidden_size: int
        cell: Any
        linear: Any
        bias: jax.Array

        def __init__(self, in_size: int, out_size: int, hidden_size: int, *, key: Any):
            ckey, lkey = jax.random.split(key)
            self.hidden_size = hidden_size
            self.cell = eqx.nn.GRUCell(in_size, hidden_size, key=ckey)
            self.linear = eqx.nn.Linear(hidden_size, out_size, use_bias=False, key=lkey)
            self.bias = jnp.zeros(out_size)

        def __call__(self, input: Any) -> Any:
            hidden = jnp.zeros((self.hidden_size,))
            out, _ = jax.lax.scan(lambda carry, inp: (self.cell(inp, carry), None), hidden, input)
            return jax.nn.sigmoid(self.linear(out) + self.bias)

    def run(jit: Any) -> Any:
        @eqx.filter_value_and_grad
        def compute_loss(model: Any, x: Any, y: Any) -> Any:
            pred_y = jax.vmap(model)(x)
            return -jnp.mean(y * jnp.log(pred_y) + (1 - y) * jnp.log(1 - pred_y))

        @jit
        def make_step(model: Any, x: Any, y: Any, opt_state: Any) -> Any:
            loss, grads = compute_loss(model, x, y)
            updates, opt_state = ADAM.update(grads, opt_state, eqx.filter(model, eqx.is_array))
            return loss, eqx.apply_updates(model, updates), opt_state

        random = np.random.default_rng(0)
        model = RNN(in_size=2, out_size=1, hidden_size=16, key=jax.random.key(0))
        opt_state = ADAM.init(eqx.filter(model, eqx.is_array))
        losses = []
        for _ in range(4):
            x, y = random.random((32, 16, 2)), random.random((32, 1)) > 0.5
            loss, model, opt_state = make_step(
                model, x.astype(np.float32), y.astype(np.float32), opt_state
            )
            losses.append(loss.item())
        return losses, model, opt_state, make_step

    *want, _ = run(eqx.filter_jit)
    with xform.install():
        *actual, planned = run(xform.equinox.filter_jit(policy=budget(MOST)))
    same(actual, want)
    assert len(planned.plan) == 1
