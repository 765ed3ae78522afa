"""Reports of empty programs, and of programs that a compiler refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import xform
from tests.memory.rows import reports_in, wrong_rows
from tests.memory.test_buffers import message
from xform.memory.capacity import LargestBatch, Reason, _next_batch
from xform.memory.report import MemoryReport
from xform.memory.targets import parse_target
from xform.steps.compare import Comparison, Entry

TPU = parse_target("tpu:v5e:1x1")


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def shown(report: MemoryReport, folder: Path) -> str:
    """Check that every view of a report exists, and return its text."""
    report.plot(folder / "report.svg")
    report.save_html(folder / "report.html")
    assert json.loads(report.to_json())["total_bytes"] == report.total_bytes
    assert "change" in str(report.diff(report))
    assert isinstance(report.advice, list)
    return str(report)


def key() -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), jax.random.key(0).dtype)


SMALL: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "no product": (lambda x: jnp.sum(x**2), (f32(8),)),
    "identity": (lambda x: x, (f32(8),)),
    "constants": (lambda: jnp.arange(5.0) * 2, ()),
    "unread": (lambda x: jnp.zeros(3), (f32(8),)),
    "no output": (lambda x: (), (f32(8),)),
    "nothing": (lambda: (), ()),
    "an empty tree": (lambda tree: tree, ({"a": None, "b": ()},)),
    "no elements": (lambda x: x * 2, (f32(0, 4),)),
    "integers": (lambda i: i > 1, (jax.ShapeDtypeStruct((8,), jnp.int32),)),
    "keys": (lambda k: jax.random.split(k), (key(),)),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_program_with_little_in_it(name: str, tmp_path: Path) -> None:
    f, args = SMALL[name]
    report = xform.memory_analysis(f, *args, capacity="1 MiB")
    assert f"on {report.target}" in shown(report, tmp_path)
    assert sum(row.bytes for row in report.peak) == report.total_bytes
    assert report.fits


def test_a_program_of_collectives_alone(tmp_path: Path) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    at = jax.sharding.PartitionSpec("data")
    total = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=at,
                          out_specs=jax.sharding.PartitionSpec())  # fmt: skip
    given = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.NamedSharding(mesh, at))
    assert "all-reduce" in shown(xform.memory_analysis(total, given), tmp_path)


def scanned(ws: Any, x: Any) -> Any:
    return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0])


def unrolled(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def trained(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step of Adam, whose last argument is the policy of its derivative."""

    def step(ws: Any, state: Any, x: Any, policy: Any = None) -> Any:
        value, grads = xform.value_and_grad(loss, policy=policy)(ws, x)
        updates, state = optax.adam(1e-3).update(grads, state)
        return optax.apply_updates(ws, updates), state, value

    return step


LAYERS, ROWS = f32(12, 16, 16), f32(64, 16)
OF_LAYERS = LAYERS, jax.eval_shape(optax.adam(1e-3).init, LAYERS), ROWS
LIST = [f32(16, 16)] * 6
OF_LIST = LIST, jax.eval_shape(optax.adam(1e-3).init, LIST), ROWS
DONATED = {"donate_argnums": (0, 1)}


def of_step(loss: Any, args: Any, policy: Any = None) -> MemoryReport:
    return xform.jit(trained(loss), policy, **DONATED).lower(*args).memory_analysis()


def on_device() -> Any:
    ws, x = (jnp.ones(t.shape) / 32 for t in (LAYERS, ROWS))
    return xform.memory.compare_with_device(GRADIENT, ws, x)


GRADIENT = xform.grad(scanned)
WITH_REPORTS: dict[str, Callable[[], Any]] = {
    "analysis": lambda: xform.memory_analysis(trained(scanned), *OF_LAYERS, **DONATED),
    "step": lambda: of_step(scanned, OF_LAYERS),
    "step in a budget": lambda: of_step(scanned, OF_LAYERS, "budget:100KiB"),
    "unrolled step": lambda: of_step(unrolled, OF_LIST),
    "comparison": lambda: xform.compare(scanned, LAYERS, ROWS, policies=["min_cut", "save_dots"]),
    "largest batch": lambda: xform.memory.max_batch(
        GRADIENT, LAYERS, ROWS, target="cpu", batch_argnums=1, capacity="200KiB"
    ),
    "reason": lambda: xform.memory.why_oom(GRADIENT, LAYERS, ROWS, target="cpu", capacity="100KiB"),
    "difference": lambda: of_step(scanned, OF_LAYERS).diff(
        xform.memory_analysis(GRADIENT, LAYERS, ROWS)
    ),
    "device": on_device,
}


@pytest.mark.parametrize("name", WITH_REPORTS)
def test_rows_of_every_result_that_holds_a_report(name: str, tmp_path: Path) -> None:
    result = WITH_REPORTS[name]()
    reports = list(reports_in(result))
    assert reports
    assert [wrong for report in reports for wrong in wrong_rows(report)] == []
    result.save(tmp_path / "result.json")
    loaded = list(reports_in(xform.load(tmp_path / "result.json")))
    assert [report.buffers for report in loaded] == [report.buffers for report in reports]


@pytest.mark.parametrize("entry", [0, 9])
def test_a_memory_that_is_not_used(entry: int, tmp_path: Path) -> None:
    """libtpu's answer may name memories that are not used.

    For a program without products libtpu has a block of no bytes and no buffers on the chip. For a
    program that it splits in two for complex numbers, the entry computation has id 0.
    """
    f32_8 = message(f2=11, f3=8)
    made = [message(f1=b"x", f2=b"parameter", f3=f32_8, f35=1),
            message(f1=b"y", f2=b"add", f3=f32_8, f35=2, f36=[1])]  # fmt: skip
    module = message(f1=b"f", f6=entry, f3=message(f1=b"main", f2=made, f5=entry, f6=2))
    buffers = [message(f1=n, f2=32, f3=message(f4=n)) for n in (1, 2)]
    blocks = [message(f1=0, f2=32, f5=1, f9=message(f1=1, f3=32)),
              message(f1=1, f2=32, f7=1, f9=message(f1=2, f3=32)),
              message(f1=2, f2=0, f8=1)]  # fmt: skip
    proto = message(f1=module, f3=message(f1=buffers, f3=blocks))
    sizes = {"argument": 32, "output": 32}
    report = MemoryReport("f", TPU, 1, sizes, 0, 0.0, proto, ("x",))
    assert "x" in shown(report, tmp_path)
    assert [row.bytes for row in report.peak] == [32, 32]


def refusal(needed: int | None = None) -> MemoryReport:
    return MemoryReport("f", TPU, 1, {}, 7, 1.0, None, (), "too big", needed)


def test_a_size_that_the_compiler_does_not_say_is_not_known(tmp_path: Path) -> None:
    report = refusal()
    text = shown(report, tmp_path)
    assert text == (
        "f on tpu:v5e:1x1 (TPU v5e)\n\n"
        "total    not known  as far as the compiler says\n"
        "over by  not known  of 15.8 GiB\n"
        "flops       7 FLOP\n"
        "compile     1.00 s\n\n"
        "the compiler refused it and reports nothing else: use xform.memory.why_oom"
    )
    assert not report.fits
    kinds = ("argument", "output", "temp", "alias", "total", "constant", "host", "code")
    assert [report.to_dict()[f"{kind}_bytes"] for kind in kinds] == [None] * 8
    assert report.to_dict()["refused"] == "too big"
    assert report.head_room_bytes is None
    assert report.over_bytes is None
    verdict = ("the compiler refused f for TPU v5e, which has 15.8 GiB: the bytes that it needs "
               "are not known")  # fmt: skip
    assert report.verdict() == verdict
    assert str(Reason(report, report)).startswith(verdict)
    assert "not known of 15.8 GiB: the compiler refused it" in (tmp_path / "report.svg").read_text()
    page = (tmp_path / "report.html").read_text()
    assert '"total_bytes":null' in page
    assert '"refused":"too big"' in page


def test_a_size_that_the_compiler_says_is_shown() -> None:
    report = refusal(2**35)
    assert "32.0 GiB  as far as the compiler says" in str(report)
    assert report.total_bytes == 2**35
    assert "argument" not in str(report)
    assert "not known" in str(report.diff(refusal()))


def test_a_report_without_a_buffer_assignment_says_so() -> None:
    made = MemoryReport("f", TPU, 1, {"argument": 8, "temp": 8}, 1, 0.1, None)
    assert "the buffers at the peak are not known" in str(made)


def test_comparison_table_marks_unknown_sizes_as_not_known(tmp_path: Path) -> None:
    fits = xform.memory_analysis(jnp.sin, f32(8))
    table = Comparison("f", (Entry("a", "tpu", refusal()), Entry("b", "cpu", fits),
                             Entry("c", "tpu", None)))  # fmt: skip
    a, b, c = str(table).splitlines()[1:]
    assert a.split()[2:5] == ["not", "known", "refused"]
    assert "not known" not in b
    assert "floor not known" in c
    table.plot(tmp_path / "table.svg")
    table.save_html(tmp_path / "table.html")


def test_a_batch_whose_size_is_not_known_is_over() -> None:
    small = MemoryReport("f", TPU, 1, {"temp": 2**30}, 0, 0.0, None)
    tried = {8: small, 64: refusal()}
    sizes = {n: r.total_bytes for n, r in tried.items()}
    assert "64  not known  over" in str(LargestBatch(8, small, None, sizes))
    # The line through one batch alone would give more than 64.
    assert _next_batch(tried, 8, 64, True) == 22
    assert _next_batch({64: refusal()}, 0, 64, True) == 1


def test_a_plan_that_is_refused_without_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        return type("Refused", (), {"counted_bytes": math.inf})

    monkeypatch.setattr("xform.memory.compilation.compile_for", refuse)
    monkeypatch.setattr("xform.planner.measure._known", {})
    f = lambda x: jnp.sum(jnp.sin(x) @ jnp.sin(x))
    made = xform.plan(f, f32(16, 16))
    assert (made.compiled_bytes, made.refused) == (None, True)
    assert "refused by the compiler" in str(made)
    with pytest.raises(xform.errors.BudgetInfeasible) as caught:
        xform.plan(f, f32(16, 16), policy=xform.policies.budget("1 MiB"))
    assert "(simulated; the compiler refuses the program)" in str(caught.value)
    assert math.isfinite(caught.value.floor_bytes)
