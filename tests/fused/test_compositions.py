"""`xform.fused_update` under other transforms, policies and meshes, and unusual parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import xform
from tests.fused.test_fused_update import assert_close, assert_equal, run, separate, tied
from xform import errors

adamw = optax.adamw(0.125, b1=0.5, b2=0.5, eps=2**-20, weight_decay=0.25)


@pytest.mark.parametrize("policy", ["save_nothing", "save_dots", "save_everything", "budget:64KiB"])
def test_policies(policy: Any) -> None:
    loss, params, tokens = tied()
    start = params, adamw.init(params), tokens
    ours = run(jax.jit(xform.fused_update(loss, adamw, policy=policy)), *start)
    assert_close(ours, run(jax.jit(separate(loss, adamw)), *start))


def test_a_loop_that_starts_from_stored_states_updates_afterwards() -> None:
    loss, params, tokens = tied(16, 8)
    start = params, adamw.init(params), tokens
    policy = xform.policies.budget("3 KiB", of="saved")
    fused = xform.fused_update(loss, adamw, policy=policy)
    assert_close(run(jax.jit(fused), *start), run(jax.jit(separate(loss, adamw)), *start))
    row = next(r for r in fused.where(*start).rows if r.name == "['layers']['w']")
    assert row.place == "after the backward loop"
    assert "stored states" in row.reason


def test_a_step_within_a_budget_of_xform_jit() -> None:
    loss, params, tokens = tied()
    start = params, adamw.init(params), tokens
    step = xform.jit(xform.fused_update(loss, adamw), policy="budget:16KiB")
    assert_close(run(step, *start), run(jax.jit(separate(loss, adamw)), *start))
    report: Any = step.memory_analysis()
    assert report.total_bytes <= 16 * 1024


def test_under_vmap() -> None:
    loss, params, tokens = tied()
    several = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), params)
    start = several, jax.vmap(adamw.init)(several), tokens
    over = lambda step: jax.jit(jax.vmap(step, (0, 0, None)))
    ours = run(over(xform.fused_update(loss, adamw)), *start, n=1)
    assert_close(ours, run(over(separate(loss, adamw)), *start, n=1))


def test_a_derivative_through_a_step() -> None:
    loss, params, tokens = tied(2, 4)
    optimizer = optax.sgd(0.1)
    state = optimizer.init(params)

    def after(step: Any) -> Any:
        return jax.jit(jax.grad(lambda p: loss(step(p, state, tokens)[0], tokens)))(params)

    assert_close(after(xform.fused_update(loss, optimizer)), after(separate(loss, optimizer)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_parameters(kind: Any) -> None:
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    def loss(w: Any, x: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            gathered = w if kind == AxisType.Auto else jax.sharding.reshard(w, PartitionSpec())
            return jnp.tanh(h @ gathered), None

        h, _ = jax.lax.scan(layer, x, w)
        return jnp.sum(h**2)

    w = jax.random.normal(jax.random.key(0), (3, 16, 16)) / 4
    w, x = place(w, None, None, "d"), place(jnp.ones((8, 16)), "d", None)
    with jax.set_mesh(mesh):
        start = w, adamw.init(w), x
        ours = run(jax.jit(xform.fused_update(loss, adamw)), *start)
        assert ours[0].sharding.spec == w.sharding.spec
        assert_close(ours, run(jax.jit(separate(loss, adamw)), *start))


def constrained(mesh: Any, spec: Any) -> Any:
    """Return a loss of a stack of layers that constrains how the stack is sharded."""
    place = NamedSharding(mesh, spec)

    def loss(w: Any, x: Any) -> Any:
        w = jax.lax.with_sharding_constraint(w, place)
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)
        return jnp.sum(h**2)

    return loss


COLUMNS, WHOLE, LAYERS = PartitionSpec(None, None, "d"), PartitionSpec(), PartitionSpec("d")


@pytest.mark.parametrize("spec", [COLUMNS, WHOLE, LAYERS], ids=str)
def test_parameters_with_a_sharding_constraint(spec: Any) -> None:
    """The gradient has the constraint of the parameter. It fits one layer, if layers are whole."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    loss, n = constrained(mesh, spec), 4
    w = jax.random.normal(jax.random.key(0), (n, 16, 16)) / 4
    start = jax.device_put(w, NamedSharding(mesh, spec)), adamw.init(w), jnp.ones((8, 16))
    fused = xform.fused_update(loss, adamw)
    other = jax.jit(separate(loss, adamw, xform.value_and_grad))
    assert_close(run(jax.jit(fused), *start), run(other, *start))
    (row,) = fused.where(*start).rows
    whole_layers = spec != LAYERS
    assert row.place == ("backward loop" if whole_layers else "after the backward loop")
    assert ("sharding_constraint" in row.reason) != whole_layers


@pytest.mark.parametrize("spec", [COLUMNS, WHOLE], ids=str)
def test_a_constrained_stack_is_overwritten_in_place(spec: Any) -> None:
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    loss, n, d = constrained(mesh, spec), 16, 128
    place = lambda *shape: jax.ShapeDtypeStruct(
        shape, "float32", sharding=NamedSharding(mesh, spec)
    )
    w = place(n, d, d)
    state = jax.tree.map(lambda x: place(*x.shape) if x.ndim else x, jax.eval_shape(adamw.init, w))

    def temporary(step: Any) -> int:
        x = jax.ShapeDtypeStruct((16, d), "float32")
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(w, state, x).compile()
        stats: Any = compiled.memory_analysis()
        return stats.temp_size_in_bytes

    stack, residuals = 4 * n * d * d // (4 if spec else 1), 4 * n * 16 * d
    fused = temporary(xform.fused_update(loss, adamw, policy="save_nothing"))
    assert temporary(separate(loss, adamw)) > stack
    # Each device gathers one layer for its forward and its backward pass.
    assert fused < residuals + 4 * (4 * d * d)


def masters(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return an optimizer whose state has float32 copies of bfloat16 parameters."""
    wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def init(params: Any) -> Any:
        return wide(params), inner.init(wide(params))

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        updates, inner_state = inner.update(wide(grads), state[1], state[0])
        new = optax.apply_updates(state[0], updates)
        return jax.tree.map(jnp.subtract, new, wide(params)), (new, inner_state)

    return optax.GradientTransformation(init, update)


def test_narrow_parameters_with_wide_masters() -> None:
    loss, params, tokens = tied()
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    optimizer = masters(adamw)
    start = params, optimizer.init(params), tokens
    fused = xform.fused_update(loss, optimizer)
    other = separate(loss, optimizer, xform.value_and_grad)
    assert_close(run(jax.jit(fused), *start), run(jax.jit(other), *start))
    places = {row.name: row.place for row in fused.where(*start).rows}
    assert places["['layers']['w']"] == "backward loop"


def test_auxiliary_output_of_any_kind() -> None:
    def loss(w: Any, x: Any) -> Any:
        y = jnp.tanh(x @ w)
        return jnp.sum(y), {"y": y, "name": "tanh"}

    w, x = jnp.ones((3, 3)), jnp.ones((2, 3))
    step = xform.fused_update(loss, adamw, has_aux=True)
    _, _, (value, aux) = step(w, adamw.init(w), x)
    assert aux["name"] == "tanh"
    np.testing.assert_allclose(value, jnp.sum(aux["y"]))


def test_trees_without_arrays_and_with_none() -> None:
    step = xform.fused_update(lambda p, x: p.get("a", 1.0) * x, adamw)
    params, _, value = step({}, adamw.init({}), 2.0)
    assert params == {}
    assert float(value) == 2.0
    start = {"a": jnp.float32(2), "b": None}
    params, _, _ = step(start, adamw.init(start), 2.0)
    assert params["b"] is None
    assert float(params["a"]) < 2


def test_complex_parameters() -> None:
    optimizer = optax.sgd(0.125)
    loss = lambda z: jnp.sum(jnp.abs(z) ** 2)
    start = jnp.array([1 + 2j]), optimizer.init(jnp.array([1j]))
    assert_close(xform.fused_update(loss, optimizer)(*start), separate(loss, optimizer)(*start))


def test_parameters_that_the_loss_does_not_read_decay() -> None:
    loss, params, tokens = tied()
    params = {**params, "unused": jnp.ones(3)}
    start = params, adamw.init(params), tokens
    ours = run(jax.jit(xform.fused_update(loss, adamw)), *start)
    assert_close(ours, run(jax.jit(separate(loss, adamw)), *start))
    assert float(ours[0]["unused"][0]) < 1


def test_several_positions_of_parameters() -> None:
    optimizer = optax.sgd(0.5)
    step = xform.fused_update(lambda x, a, b: x * a * b, optimizer, argnums=(2, 1))
    params = jnp.float32(3), jnp.float32(2)
    (b, a), _, value = step(params, optimizer.init(params), 5.0)
    assert (float(a), float(b), float(value)) == (2 - 7.5, 3 - 5, 30)
    with pytest.raises(errors.WrongArgument, match="not a tuple of 2"):
        step(params[0], optimizer.init(params), 5.0)


def test_an_integer_parameter_is_an_error() -> None:
    params = {"a": jnp.float32(2), "n": jnp.arange(3)}
    step = xform.fused_update(lambda p: p["a"] * 1.0, optax.sgd(0.1))
    with pytest.raises(errors.WrongDtype, match=r"int32\[3\]"):
        step(params, optax.sgd(0.1).init(params))


def test_a_stack_that_is_used_twice() -> None:
    """The second loop over the same layers adds its gradient, and regularization adds another."""

    def loss(w: Any, x: Any) -> Any:
        layer = lambda h, w: (jnp.tanh(h @ w), None)
        h, _ = jax.lax.scan(layer, x, w)
        h, _ = jax.lax.scan(layer, h, w)
        return jnp.sum(h**2) + 0.25 * jnp.sum(w**2) + jnp.sum(w[0])

    w = jax.random.normal(jax.random.key(0), (3, 8, 8)) / 4
    start = w, adamw.init(w), jnp.ones((2, 8))
    fused = xform.fused_update(loss, adamw)
    assert_close(run(jax.jit(fused), *start), run(jax.jit(separate(loss, adamw)), *start))


def test_a_parameter_that_the_auxiliary_output_returns_keeps_its_old_value() -> None:
    def loss(w: Any, x: Any) -> Any:
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)
        return jnp.sum(h**2), w

    w = jax.random.normal(jax.random.key(0), (3, 8, 8)) / 4
    fused = xform.fused_update(loss, adamw, has_aux=True)
    new, _, (_, old) = jax.jit(fused, donate_argnums=(1,))(w, adamw.init(w), jnp.ones((2, 8)))
    assert_equal(old, w)
    assert float(jnp.max(jnp.abs(new - w))) > 0.01
    (row,) = fused.where(w, adamw.init(w), jnp.ones((2, 8))).rows
    assert "returns the old value" in row.reason
