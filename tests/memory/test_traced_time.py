"""Seconds of instructions in a trace: of this machine's CPU, and in the forms of other devices."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from xform.errors import WrongArgument
from xform.memory.traced_time import seconds_by_instruction, trace_instructions


def plane(name: str, *events: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(name=name, lines=[SimpleNamespace(events=list(events))])


def event(name: str, nanoseconds: float, **stats: str) -> SimpleNamespace:
    return SimpleNamespace(name=name, duration_ns=nanoseconds, stats=list(stats.items()))


def test_events_are_named_as_each_device_names_them() -> None:
    """The stand-ins have the forms of XLA's traces: text of the operation, or a statistic."""
    planes = [
        plane("/host:CPU", event("dot.1", 1e9), event("dot.1", 1e9), event("python", 9e9)),
        plane("/device:TPU:0", event("%fusion.2 = f32[8]{0} fusion(f32[8]{0} %p)", 3e9)),
        plane("/device:GPU:0", event("loop_kernel", 5e9, hlo_module="m", hlo_op="add.3"),
              event("memcpy", 9e9)),
    ]  # fmt: skip
    names = {"dot.1", "fusion.2", "add.3"}
    assert seconds_by_instruction(planes, names) == {"dot.1": 2.0, "fusion.2": 3.0, "add.3": 5.0}


def test_a_run_on_this_machine_has_its_instructions() -> None:
    x = jnp.ones((256, 256))
    f = jax.jit(lambda x: x @ x + 1)
    text = f.lower(x).compile().as_text()
    names = {line.split()[0].lstrip("%") for line in text.splitlines() if " = " in line}
    jax.block_until_ready(f(x))
    found = trace_instructions(lambda: jax.block_until_ready(f(x)), names)
    assert found
    assert found.keys() <= names
    assert all(seconds >= 0 for seconds in found.values())


def test_a_running_trace_is_named(tmp_path) -> None:
    jax.profiler.start_trace(tmp_path)
    try:
        with pytest.raises(WrongArgument, match="pass trace=False"):
            trace_instructions(lambda: None, ())
    finally:
        jax.profiler.stop_trace()
