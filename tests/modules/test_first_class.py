"""Every function of the core that takes a loss, for every kind of module."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import xform
from tests.modules.kinds import KINDS, OPTIMIZER, WIDTH, Kind, X
from tests.nnx import same
from xform.errors import OtherProgram, WrongArgument

pytestmark = pytest.mark.usefixtures("quick_compilation")
EVERY = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
# Compiling takes long: `make slow` tests the functions that compile with the other kinds.
ONE_OF_EACH = ("nnx", "nn.scan", "equinox")
COMPILED = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=name, marks=[] if name in ONE_OF_EACH else pytest.mark.slow)
        for name, kind in KINDS.items()
    ],
)


def arrays(tree: Any) -> Any:
    """Return the arrays of a module, or of a gradient by it, as a list."""
    return [x for x in jax.tree.leaves(tree) if eqx.is_array(x)]


@EVERY
def test_a_plan_is_for_the_gradient_of_the_library(kind: Kind) -> None:
    plan = xform.plan(kind.loss, kind.build(), X, verify=False)
    # A plan also counts what a recomputed remat region saves.
    assert plan.saved_bytes >= xform.residuals(kind.loss, kind.build(), X, argnums=0).total_bytes
    planned = kind.jit(kind.gradient(kind.loss, policy=plan))
    expected = kind.jit(kind.gradient(kind.loss))
    same(arrays(planned(kind.build(), X)), arrays(expected(kind.build(), X)))
    other = xform.plan(lambda module, x: kind.loss(module, jnp.sin(x)), kind.build(), X,
                       verify=False)  # fmt: skip
    with pytest.raises(OtherProgram):
        kind.jit(kind.gradient(kind.loss, policy=other))(kind.build(), X)


def test_residuals_have_the_names_of_parts() -> None:
    kind = KINDS["nnx"]
    rows = xform.residuals(kind.loss, kind.build(), X, argnums=0, policy="save_nothing")
    names = {row.operation for row in rows if row.kind == "argument"}
    assert {"x", "model.enter.kernel", "model_state[0].dropout.rngs.key"} <= names


@COMPILED
def test_compiled_reports(kind: Kind) -> None:
    module = kind.build()
    table = xform.compare(kind.loss, module, X, policies=["min_cut", "save_nothing"])
    totals = [entry.report.total_bytes for entry in table if entry.report is not None]
    gradient = xform.memory_analysis(kind.gradient(kind.loss), module, X)
    n = sum(x.nbytes for x in arrays((module, X)) if not _is_key(x))
    assert len(totals) == 2
    assert gradient.argument_bytes >= n
    assert gradient.total_bytes
    assert xform.fits(kind.loss, module, X, target="cpu", capacity="1 GiB").fits
    curve = xform.pareto(kind.loss, module, X, points=1, verify=False)
    assert len(curve) == 5
    budget = xform.plan(kind.loss, module, X, policy=xform.policies.budget(min(totals) + 4096))
    assert budget.compiled_bytes <= min(totals) + 4096


@COMPILED
def test_health_finds_the_layers(kind: Kind) -> None:
    report = xform.health(kind.loss, kind.build(), X, update=OPTIMIZER, steps=2, power_iterations=0)
    assert report.losses[0] == pytest.approx(float(kind.jit(kind.loss)(kind.build(), X)), rel=1e-5)
    assert report.losses[1] < report.losses[0]


@COMPILED
def test_a_sliced_loss_has_the_same_value_and_changes(kind: Kind) -> None:
    ours, theirs = kind.build(), kind.build()
    whole = xform.memory_analysis(kind.loss, ours, X).total_bytes
    sliced = xform.sliced(kind.loss, whole)
    for _ in range(2):
        same(sliced(ours, X), kind.loss(theirs, X))
        same(arrays(ours), arrays(theirs))
    assert isinstance(sliced.regions(ours, X), list)


@COMPILED
def test_the_largest_batch(kind: Kind) -> None:
    module = kind.build()
    room = 4 * xform.memory_analysis(kind.loss, module, X).total_bytes
    largest = xform.memory.max_batch(kind.loss, module, X, target="cpu", capacity=room, max_size=32)
    assert largest.size == 32
    assert largest.of == "axis 0 of x"


NNX = pytest.mark.parametrize("name", ["nnx", "nnx.scan"])


def _separate(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
    value, grads = xform.flax.value_and_grad(KINDS["nnx"].loss)(model, x)
    optimizer.update(model, grads)
    return value


def _trained(name: str, wrt: Any = nnx.Param) -> tuple[Any, Any]:
    model = KINDS[name].build()
    return model, nnx.Optimizer(model, OPTIMIZER, wrt=wrt)


@NNX
@pytest.mark.parametrize("wrap", [nnx.jit, lambda f: f], ids=["jit", "eager"])
def test_a_fused_update_of_a_module(name: str, wrap: Any) -> None:
    ours, theirs = _trained(name), _trained(name)
    step, separate = wrap(xform.flax.fused_update(KINDS[name].loss)), nnx.jit(_separate)
    for _ in range(2):
        same(step(*ours, X), separate(*theirs, X))
        same(nnx.state(ours), nnx.state(theirs))


def test_a_fused_update_has_auxiliary_output_and_a_filter() -> None:
    only = nnx.All(nnx.Param, nnx.PathContains("leave"))

    def pair(model: Any, x: jax.Array) -> Any:
        return KINDS["nnx"].loss(model, x), x.sum()

    @xform.flax.fused_update(has_aux=True, policy="save_dots")
    def step(model: Any, x: jax.Array) -> Any:
        return pair(model, x)

    (model, optimizer), (other, its_optimizer) = _trained("nnx", only), _trained("nnx", only)
    (value, aux) = step(model, optimizer, X)
    expected, grads = nnx.jit(
        xform.flax.value_and_grad(pair, nnx.DiffState(0, only), has_aux=True)
    )(other, X)
    its_optimizer.update(other, grads)
    same((value, aux), expected)
    same(nnx.state((model, optimizer)), nnx.state((other, its_optimizer)))
    assert {row.name for row in step.where(model, optimizer, X).rows} == {
        "['leave']['bias']", "['leave']['kernel']"
    }  # fmt: skip


def test_layers_of_nnx_scan_are_updated_in_the_loop() -> None:
    model, optimizer = _trained("nnx.scan")
    rows = xform.flax.fused_update(KINDS["nnx.scan"].loss).where(model, optimizer, X).rows
    assert {row.place for row in rows} == {"backward loop"}


def test_a_fused_update_of_the_core_names_the_one_of_flax() -> None:
    model, optimizer = _trained("nnx")
    with pytest.raises(WrongArgument, match=r"use xform.flax.fused_update"):
        xform.fused_update(KINDS["nnx"].loss, OPTIMIZER)(model, optimizer, X)


def test_a_fused_update_of_an_equinox_module() -> None:
    kind = KINDS["equinox"]
    model = kind.build()
    state = OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))
    step = eqx.filter_jit(xform.fused_update(kind.loss, OPTIMIZER))
    new, _, value = step(model, state, X)
    expected, grads = xform.equinox.filter_value_and_grad(kind.loss)(model, X)
    updates, _ = OPTIMIZER.update(grads, state)
    same(value, expected)
    same(arrays(new), arrays(eqx.apply_updates(model, updates)))
    assert new.activation is model.activation


def test_memory_analysis_counts_the_state_that_a_step_updates() -> None:
    model, optimizer = _trained("nnx")
    report = xform.memory_analysis(_separate, model, optimizer, X)
    state = nnx.state((model, optimizer), (nnx.Param, nnx.BatchStat, nnx.optimizer.OptState))
    changed = sum(x.nbytes for x in jax.tree.leaves(state))
    assert report.output_bytes >= changed
    donated = xform.memory_analysis(_separate, model, optimizer, X, donate_argnums=(0, 1))
    assert donated.alias_bytes >= changed
    jitted = nnx.jit(_separate, donate_argnums=(0, 1))
    assert xform.memory_analysis(jitted, model, optimizer, X).temp_bytes == donated.temp_bytes


def test_argnums_filter_selects_the_planned_parameters() -> None:
    kind, only = KINDS["nnx"], nnx.DiffState(0, nnx.PathContains("leave"))
    plan = xform.plan(kind.loss, kind.build(), X, argnums=only, verify=False)
    assert plan.saved_bytes < xform.plan(kind.loss, kind.build(), X, verify=False).saved_bytes
    gradient = nnx.jit(xform.flax.grad(kind.loss, only, policy=plan))(kind.build(), X)
    same(gradient, nnx.jit(nnx.grad(kind.loss, argnums=only))(kind.build(), X))
    assert len(xform.compare(kind.loss, kind.build(), X, policies=["min_cut"], argnums=only)) == 1


def test_abstract_modules_and_types_are_enough() -> None:
    kind = KINDS["nnx"]
    model, x = nnx.eval_shape(kind.build), jax.ShapeDtypeStruct((4, WIDTH), jnp.float32)
    assert xform.plan(kind.loss, model, x, verify=False).saved_bytes
    assert xform.residuals(kind.loss, model, x).total_bytes
    assert xform.compare(kind.loss, model, x, policies=["min_cut"]).entries[0].report is not None


def test_nothing_reaches_the_callers_module() -> None:
    kind, module, untouched = KINDS["nnx"], KINDS["nnx"].build(), KINDS["nnx"].build()
    xform.plan(kind.loss, module, X, verify=False)
    xform.residuals(kind.loss, module, X)
    xform.health(kind.loss, module, X, power_iterations=0)
    same(nnx.state(module), nnx.state(untouched))


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
