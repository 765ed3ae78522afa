"""A carry that a loop only moves between devices is moved back by the backward pass, not saved."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import xform
from tests.sharding import agree, checked, mesh, same
from xform import policies

pytestmark = pytest.mark.usefixtures("x64")

N = 8  # devices
RING = [(i, (i + 1) % N) for i in range(N)]
Step = Callable[[Any, Any], tuple[Any, Any]]


def _inputs() -> tuple[jax.Array, jax.Array]:
    """Return queries and keys. Each device has 1 KiB of both."""
    return jnp.sin(jnp.arange(N * 32 * 4.0)).reshape(N * 32, 4), jnp.eye(N * 32, 4) + 0.1


def _ring(step: Step, check_vma: bool = True, **options: Any) -> Callable[..., Any]:
    """Return a function of queries and keys. The keys go round the ring of devices."""

    def on_device(q: Any, k: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            k, result = step(q, carry[0])
            return (k, carry[1] + result), result[0]

        start = k, jnp.zeros_like(q)
        (k, total), rows = lax.scan(body, start, None, length=N, **options)
        return total, k, rows

    specs = {"in_specs": (P("i"), P("i")), "out_specs": (P("i"), P("i"), P(None, "i"))}
    mapped = jax.shard_map(on_device, mesh=mesh(), check_vma=check_vma, **specs)

    def loss(q: Any, k: Any) -> Any:
        total, k, rows = mapped(q, k)
        return jnp.sum(total**2) + jnp.sum(jnp.cos(k)) + jnp.sum(rows**3)

    return loss


def _mix(q: Any, k: Any) -> Any:
    return jnp.sin(q @ k.T) @ k


def _move_last(q: Any, k: Any) -> tuple[Any, Any]:
    return lax.ppermute(k, "i", RING), _mix(q, k)


def _move_first(q: Any, k: Any) -> tuple[Any, Any]:
    k = lax.ppermute(k, "i", RING)
    return k, _mix(q, k)


def _read_both(q: Any, k: Any) -> tuple[Any, Any]:
    after = lax.ppermute(k, "i", RING)
    return after, _mix(q, k) * jnp.tanh(_mix(q, after))


def _lose_data(q: Any, k: Any) -> tuple[Any, Any]:
    return lax.ppermute(k, "i", RING[:-1]), _mix(q, k)


def _change_too(q: Any, k: Any) -> tuple[Any, Any]:
    return 0.9 * lax.ppermute(k, "i", RING), _mix(q, k)


STEPS = [_move_last, _move_first, _read_both, _lose_data, _change_too]


@pytest.mark.parametrize("step", STEPS)
@checked
def test_gradients_are_those_of_jax(step: Step, check_vma: bool) -> None:
    agree(_ring(step, check_vma), *_inputs())


@pytest.mark.parametrize("step", STEPS[:3])
@pytest.mark.parametrize(
    "policy", [policies.save_everything, policies.save_nothing, "saved:192KiB"]
)
def test_gradients_under_policies(step: Step, policy: Any) -> None:
    agree(_ring(step), *_inputs(), policy=policy)


def test_a_reversed_and_unrolled_loop() -> None:
    agree(_ring(_move_first, reverse=True, unroll=2), *_inputs())


def test_outside_jit_and_forward_modes() -> None:
    loss = _ring(_read_both)
    same(xform.grad(loss, (0, 1))(*_inputs()), jax.grad(loss, (0, 1))(*_inputs()))
    wanted = jax.jvp(loss, _inputs(), _inputs())[1]
    same(xform.jvp(loss, _inputs(), _inputs())[1], wanted)
    same(xform.linearize(loss, *_inputs())[1](*_inputs()), wanted)


def test_second_derivative() -> None:
    loss = _ring(_move_last)
    product = lambda grad: lambda q, k: jax.jvp(lambda k: grad(loss)(q, k), (k,), (k,))[1]
    same(jax.jit(product(xform.grad))(*_inputs()), jax.jit(product(jax.grad))(*_inputs()))


def _states(step: Step) -> list[tuple[int, str]]:
    """Return bytes and reason of each state of the loop that is saved."""
    values = xform.residuals(jax.jit(_ring(step)), *_inputs())
    return [(v.total_bytes, v.why) for v in values if "state of the loop" in v.why]


@pytest.mark.parametrize("step", STEPS[:3])
def test_one_state_is_saved(step: Step) -> None:
    why = "the last state of the loop, which the backward pass moves back between devices"
    assert _states(step) == [(1024, why)]


def test_all_states_are_saved_if_the_loop_changes_them() -> None:
    assert _states(_change_too) == [(N * 1024, "the state of the loop in each iteration")]


def test_compiled_bytes_are_fewer_than_those_of_jax() -> None:
    loss = _ring(_move_last)
    temporary = lambda grad: (
        jax.jit(grad(loss, (0, 1))).lower(*_inputs()).compile().memory_analysis().temp_size_in_bytes
    )
    assert temporary(xform.grad) < temporary(jax.grad) - 7 * 32 * 4 * 8


def test_the_plan_counts_the_communication_back() -> None:
    plan = xform.plan(_ring(_move_last), *_inputs(), argnums=(0, 1))
    (back,) = plan.repeated_collectives
    assert (back.operation, back.axes, back.count, back.bytes) == ("ppermute", ("i",), N, N * 1024)
