"""A memory report beside what a device did: here, the CPU and its resident memory."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xform
from tests.memory.test_meters import Allocator
from xform.errors import WrongArgument
from xform.memory import compare_with_device, measured

MIB = 2**20


def loss(ws, x):
    def layer(h, w):
        return jnp.tanh(h @ w), None

    return jax.lax.scan(layer, x, ws)[0].sum()


WS, X = jnp.ones((8, 128, 128)) / 128, jnp.ones((4096, 128))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports resident memory")
@pytest.mark.parametrize("policy", ["save_everything", "min_cut"])
def test_the_promise_is_kept_within_a_tenth(policy: str) -> None:
    gradient = xform.grad(loss, policy=policy)
    found = compare_with_device(gradient, WS, X, trace=False)
    assert found.report.total_bytes == xform.memory_analysis(gradient, WS, X).total_bytes
    assert found.excess_bytes is not None
    assert found.measured_bytes is not None
    assert found.measured_bytes > 16 * MIB
    assert abs(found.excess_bytes) < 0.1 * found.measured_bytes + 4 * MIB
    assert "resident memory" in found.source


def test_lines_have_bytes_and_times_of_each_pass() -> None:
    found = compare_with_device(xform.grad(loss, policy="save_nothing"), WS, X)
    first = found.lines[0]
    assert first.where.endswith("(loss.<locals>.layer)") or first.where.endswith("(layer)")
    assert min(first.forward_seconds, first.backward_seconds, first.recompute_seconds) > 0
    assert sum(x.peak_bytes for x in found.lines) == found.report.total_bytes
    text = str(found)
    assert "promised" in text.splitlines()[0]
    assert "arrays before the run" in text
    assert repr(found) == f"<DeviceComparison: {found.heading()}>"
    data = json.loads(found.to_json())
    assert data["lines"][0]["where"] == first.where
    assert data["measured_bytes"] == found.measured_bytes


def test_donated_arguments_stay_valid() -> None:
    update = lambda ws, x: ws - 0.1 * xform.grad(loss)(ws, x)
    found = compare_with_device(update, WS, X, donate_argnums=0, trace=False)
    assert found.report.alias_bytes == WS.nbytes
    assert "donated arguments were copied before each run" in found.notes
    np.testing.assert_array_equal(WS, jnp.ones((8, 128, 128)) / 128)


def test_xform_jit_step_is_measured_and_its_bytes_are_known() -> None:
    step = xform.jit(lambda ws, x: xform.grad(loss)(ws, x), "min_cut")
    found = compare_with_device(step, WS, X, trace=False)
    assert found.report.total_bytes is not None
    assert found.traced_seconds == 0
    assert found.seconds > 0


@pytest.mark.parametrize(("before", "known"), [(0, True), (10**12, False)])
def test_a_device_that_counts_is_asked(monkeypatch, before: int, known: bool) -> None:
    """No GPU is lent to the tests: a stand-in has its counters, and allocates in each run."""
    device = Allocator(1000)
    device.allocate(before)
    device.allocate(-before)

    def measure(meter, compile, run):
        compile()
        meter.start()
        device.allocate(5000)
        run()
        device.allocate(-5000)
        return meter.growth()

    monkeypatch.setattr(measured, "_device_of", lambda tree: device)
    monkeypatch.setattr(measured, "_measure", measure)
    found = compare_with_device(xform.grad(loss), WS, X, trace=False)
    assert "memory_stats" in found.source
    if known:
        assert found.measured_bytes == 5000 + found.report.argument_bytes
    else:
        assert found.measured_bytes is None
        assert "not known" in found.heading()
        assert any("new process" in note for note in found.notes)


def test_arguments_that_cannot_be_measured_are_refused() -> None:
    with pytest.raises(WrongArgument, match="an argument is a ShapeDtypeStruct"):
        compare_with_device(loss, jax.eval_shape(lambda: WS), X)
    with pytest.raises(WrongArgument, match="runs=0"):
        compare_with_device(loss, WS, X, runs=0)
    with pytest.raises(WrongArgument, match="the options are runs, trace, donate_argnums"):
        compare_with_device(loss, WS, X, target="gpu:h100")
    with pytest.raises(WrongArgument, match="did you mean trace"):
        compare_with_device(loss, WS, X, tracee=False)


def test_noncallable_error_names_compare_with_device() -> None:
    with pytest.raises(WrongArgument, match="compare_with_device"):
        compare_with_device(3, X)
