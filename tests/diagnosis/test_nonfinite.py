"""The origin of the first NaN or Inf: line, iteration, and forward or backward pass."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import xform
from tests.diagnosis.networks import batch, plain, weights


def line_of(f: Callable[..., Any], text: str) -> int:
    lines, first = inspect.getsourcelines(f)
    return first + next(i for i, line in enumerate(lines) if text in line)


def divided(ws: Any, x: Any) -> Any:
    h = x @ ws[0]
    h = h / (h - h)  # here
    return jnp.mean(jax.nn.relu(h @ ws[1]))


def in_a_scan(ws: Any, x: Any) -> Any:
    def step(h: Any, w: Any) -> Any:
        h = jnp.sqrt(h - 3)  # here
        return jax.nn.relu(h @ w) + h, None

    return jnp.mean(jax.lax.scan(step, jnp.abs(x) + 40, 0 * jnp.stack(ws))[0])


def backward(ws: Any, x: Any) -> Any:
    h = x @ ws[0]
    return jnp.sum(jnp.linalg.norm(0 * h @ ws[1], axis=-1))  # here


def in_a_branch(ws: Any, x: Any) -> Any:
    h = jax.lax.cond(
        x[0, 0] < 1e9,
        lambda h: jnp.log(h - h),  # here
        lambda h: h,
        x @ ws[0],
    )
    return jnp.mean(h @ ws[1])


def in_a_loop(ws: Any, x: Any) -> Any:
    def body(state: Any) -> Any:
        i, h = state
        return i + 1, jnp.arccosh(h) @ ws[0] * 0  # here

    _, h = jax.lax.while_loop(lambda s: s[0] < jnp.int32(x.shape[0]), body, (0, 2 + x * 0))
    return jnp.mean(h @ ws[1])


def in_a_scan_with_masks(ws: Any, x: Any) -> Any:
    """The NaN reaches the loss through the carry of the next iteration."""

    def step(carry: Any, w: Any) -> Any:
        h, previous, mask = carry
        mask = jnp.where(jnp.arange(h.shape[-1]) > 3, mask, -jnp.inf)
        scores = jax.nn.softmax(previous + mask)
        h, previous = jnp.sqrt(h - 3) + 0 * h @ w, h  # here
        return (h, previous, mask), (mask, scores)

    start = jnp.abs(x) + 40, jnp.ones_like(x), jnp.zeros_like(x)
    _, (_, scores) = jax.lax.scan(step, start, jnp.stack(ws))
    return jnp.mean(scores)


@pytest.mark.parametrize(
    ("loss", "trips", "back", "value"),
    [(divided, (), False, "Inf"), (in_a_scan, (2,), False, "NaN"), (backward, (), True, "Inf"),
     (in_a_branch, (), False, "Inf"), (in_a_loop, (1,), False, "NaN"),
     (in_a_scan_with_masks, (2,), False, "NaN")],
)  # fmt: skip
def test_the_line(loss: Any, trips: tuple[int, ...], back: bool, value: str) -> None:
    ws = weights(6 if "scan" in loss.__name__ else 2)
    report = xform.health(loss, ws, batch(), power_iterations=0)
    assert report.origin is not None
    assert f":{line_of(loss, '# here')}:" in report.origin.where
    assert (report.origin.trips, report.origin.backward) == (trips, back)
    assert report.origin.value == value
    assert f"{report.origin}" in str(report)
    assert not report.healthy


def test_a_mask_of_infinities_is_no_origin() -> None:
    def loss(ws: Any, x: Any) -> Any:
        scores = jnp.where(x > 0, x @ ws[0], -jnp.inf)
        h = jax.nn.softmax(scores) @ ws[1]
        return jnp.mean(jnp.log(h * 0))  # here

    report = xform.health(loss, weights(2), batch(), power_iterations=0)
    assert report.origin is not None
    assert report.origin.operation == "log"


def test_a_parameter_or_a_batch_that_is_not_finite() -> None:
    ws = weights(2)
    ws[1] = ws[1].at[0, 0].set(jnp.nan)
    assert "parameter ws.1" in str(xform.health(plain, ws, batch(), power_iterations=0))
    report = xform.health(plain, weights(2), batch().at[0, 0].set(jnp.inf), power_iterations=0)
    assert "the batch" in str(report)
    assert report.findings[0].name == "ws.0"
