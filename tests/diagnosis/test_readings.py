"""Readings of layers, against NumPy and JAX's derivatives of the same program cut into layers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xform
from tests.diagnosis.networks import EXAMPLES, batch, plain, scanned, weights
from xform.diagnosis import readings
from xform.diagnosis.diagnosis import Diagnosis
from xform.errors import WrongArgument


def rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def reference(ws: list[Any], x: Any) -> list[dict[str, Any]]:
    """Compute the same perceptron layer by layer, with JAX's derivatives."""
    zeros = [jnp.zeros_like(x) for _ in ws]
    kept: list[Any] = []

    def run(ws: Any, zeros: Any) -> Any:
        h = x
        kept.clear()
        for w, z in zip(ws, zeros, strict=True):
            kept.append((h, h @ w))
            h = jax.nn.relu(h @ w) + z
        return jnp.mean(h**2)

    grads, cts = jax.grad(run, (0, 1))(ws, zeros)
    run(ws, zeros)
    jacobian = lambda h, w: jax.jacobian(lambda h: jax.nn.relu(h @ w).ravel())(h)
    jacobians = [jacobian(h, w).reshape(h.size, -1) for (h, _), w in zip(kept, ws, strict=True)]
    rows: list[dict[str, Any]] = []
    for (h, z), w, g, ct, j in zip(kept, ws, grads, cts, jacobians, strict=True):
        unit = np.asarray(ct) / np.linalg.norm(ct, axis=1, keepdims=True)
        rows.append({
            "activation": rms(jax.nn.relu(z)), "gradient": rms(ct), "gain": rms(z) / rms(h),
            "weight": np.linalg.norm(w),
            "gradient_to_weight": np.linalg.norm(g) / np.linalg.norm(w),
            "dead": np.mean(np.all(np.asarray(z) <= 0, 0)), "saturated": 0.0,
            "correlation": np.mean(np.abs(np.sum(unit[1:] * unit[:-1], 1))),
            "sigma": np.linalg.svd(np.asarray(j))[1][0],
        })  # fmt: skip
    return rows


def test_numbers_of_a_perceptron() -> None:
    ws, x = weights(3), batch()
    ws[1] = ws[1].at[:, :4].add(-2.0)
    report = xform.health(plain, ws, x, power_iterations=60)
    expected = reference(ws, x)
    expected[-1] |= {"activation": report.rows[-1].activation, "gradient": report.rows[-1].gradient,
                     "dead": None, "saturated": None, "sigma": report.rows[-1].sigma,
                     "correlation": report.rows[-1].correlation}  # fmt: skip
    for row, numbers in zip(report, expected, strict=True):
        for name, value in numbers.items():
            mine = getattr(row, name)
            tolerance = 2e-2 if name == "sigma" else 2e-5
            if value is None:
                assert mine is None
            else:
                np.testing.assert_allclose(mine, value, rtol=tolerance, atol=1e-7, err_msg=name)


def test_each_trip_of_a_scan_is_a_row_as_in_the_same_program_unrolled() -> None:
    ws, x = jnp.stack(weights(4, 1.0)), batch()

    def unrolled(ws: Any, h: Any) -> Any:
        for w in ws:
            h = h + jnp.tanh(h @ w)
        return jnp.mean(h**2)

    rows = xform.health(scanned, ws, x, power_iterations=0).rows
    apart = xform.health(unrolled, list(ws), x, power_iterations=0).rows
    assert [row.trip for row in rows] == [(i,) for i in range(4) for _ in range(2)]
    # The first layer's input is no layer's result, and the loss follows the last layer.
    for a, b in zip(rows[2:6], apart[1:5], strict=True):
        for name in ("activation", "gradient", "gain", "least", "correlation", "weight",
                     "gradient_to_weight", "saturated"):  # fmt: skip
            mine, theirs = getattr(a, name), getattr(b, name)
            if mine is not None:
                np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-7, err_msg=name)
            else:
                assert theirs is None


def test_the_loss_and_its_gradient_are_those_without_probes() -> None:
    ws, x = jnp.stack(weights(3)), batch()
    of = Diagnosis(scanned, ws, x, power_iterations=2)
    value, grad, _ = jax.jit(of.value_and_grad)(ws, x, jax.random.key(0))
    expected = jax.jit(xform.value_and_grad(scanned))(ws, x)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    np.testing.assert_allclose(grad, expected[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64", "float64"])
def test_other_dtypes(dtype: str, x64: None) -> None:
    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jnp.sin(x @ w)
        return jnp.sum(jnp.abs(x).astype("float32"))

    ws = [w.astype(dtype) for w in weights(2)]
    report = xform.health(loss, ws, batch().astype(dtype), power_iterations=2)
    assert all(np.isfinite([r.activation, r.gradient, r.weight or 0.0]).all() for r in report)
    assert report.healthy


def test_a_branch_that_is_not_taken_has_no_row() -> None:
    def loss(ws: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.cond(x[0, 0] > 1e9, lambda: x @ ws[0], lambda: jnp.tanh(x @ ws[1])))

    assert [row.name for row in xform.health(loss, weights(2), batch())] == ["ws.1"]


def test_trips_of_unknown_number_are_taken_together() -> None:
    def loss(ws: Any, x: Any) -> Any:
        body = lambda state: (state[0] + 1, jnp.tanh(state[1] @ ws[0]))
        return jnp.sum(jax.lax.while_loop(lambda s: s[0] < s[1].shape[0] - 5, body, (0, x))[1])

    (row,) = xform.health(loss, weights(1), batch(), power_iterations=0)
    states = [batch()]
    for _ in range(EXAMPLES - 5):
        states.append(jnp.tanh(states[-1] @ weights(1)[0]))
    np.testing.assert_allclose(row.activation, np.mean(list(map(rms, states[1:]))), rtol=1e-5)


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e10])
def test_squares_neither_overflow_nor_vanish(size: float) -> None:
    rows = batch() * size
    of = rms(np.asarray(rows, np.float64))
    np.testing.assert_allclose(readings.rms(rows), of, rtol=1e-6)
    np.testing.assert_allclose(readings.norm(rows), of * rows.size**0.5, rtol=1e-6)
    alike = jnp.stack([rows[0], 2e-3 * rows[0]])
    sink = jnp.zeros(len(readings.NAMES))
    probed = lambda x, sink: jnp.sum(readings.probe(x, sink, sink[: len(readings.FORWARD)], 2) * x)
    read = dict(zip(readings.NAMES, jax.grad(probed, 1)(alike, sink).tolist(), strict=True))
    assert read["correlation"] == pytest.approx(1.0)


@pytest.mark.parametrize("size", [0.0, np.inf, np.nan])
def test_rms_of_zero_nonfinite_and_empty_arrays(size: float) -> None:
    np.testing.assert_equal(float(readings.rms(jnp.full((2, 2), size))), size)
    assert float(readings.rms(jnp.zeros((0, 2)))) == 0.0


def test_aux_of_the_loss_is_returned_and_leaves_readings_unchanged() -> None:
    """Statistics, such as those of a batch norm, are not results of a layer."""

    def normed(ws: Any, x: Any) -> Any:
        means = []
        for w in ws:
            y = x @ w
            means.append(jnp.mean(y, 0))
            x = jnp.tanh(y - means[-1])
        return jnp.mean(x**2), {"means": means}

    ws, x, key = weights(3), batch(), jax.random.key(0)
    plain_loss = lambda ws, x: normed(ws, x)[0]
    of, alone = Diagnosis(normed, ws, x, has_aux=True), Diagnosis(plain_loss, ws, x)
    (value, aux), grads, read = jax.jit(of.value_and_grad)(ws, x, key)
    expected = jax.jit(alone.value_and_grad)(ws, x, key)
    found = jax.tree.leaves((value, grads, read))
    for a, b in zip(found, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)
    for a, b in zip(aux["means"], jax.jit(normed)(ws, x)[1]["means"], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    assert len(of.with_verdicts(jax.device_get(read))) == 3
    with pytest.raises(WrongArgument, match="not a pair"):
        Diagnosis(plain_loss, ws, x, has_aux=True)
