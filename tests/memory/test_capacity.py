"""Does it fit, how large a batch fits, and why not: on a CPU with a small given capacity."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import xform
from xform.errors import BudgetInfeasible, WrongArgument
from xform.memory import capacity as capacity_module
from xform.memory.capacity import LargestBatch
from xform.memory.report import MemoryReport
from xform.memory.targets import parse_target


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def loss(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)


step = xform.value_and_grad(loss)


def test_fits() -> None:
    report = xform.fits(step, f32(64, 64), f32(32, 64), target="cpu", capacity="1 MiB")
    assert report.fits
    needed = report.total_bytes + report.constant_bytes
    assert report.head_room_bytes == 2**20 - needed
    over = xform.fits(step, f32(64, 64), f32(32, 64), target="cpu", capacity=needed - 1)
    assert not over.fits
    assert over.head_room_bytes == -1
    assert "it is over by 1 B" in over.verdict()
    assert "over by" in str(over)


def test_a_report_is_neither_true_nor_false() -> None:
    report = xform.fits(step, f32(64, 64), f32(32, 64), target="cpu", capacity="1 KiB")
    with pytest.raises(WrongArgument, match=r"ask whether it fits with `\.fits`"):
        bool(report)


def test_a_batch_of_too_few_arguments_is_named() -> None:
    error = lambda w, x, y: jnp.sum((x @ w - y) ** 2)
    shapes = f32(64, 64), f32(32, 64), f32(32, 64)
    with pytest.raises(WrongArgument, match="name all arguments that have the batch"):
        xform.memory.max_batch(error, *shapes, target="cpu", capacity="1 MiB", batch_argnums=1)


def test_fits_needs_a_capacity() -> None:
    with pytest.raises(WrongArgument, match="the memory of that device is not known") as caught:
        xform.fits(step, f32(64, 64), f32(32, 64), target="cpu")
    assert "give its memory, such as capacity='14 GiB'" in str(caught.value)


@pytest.mark.parametrize("capacity", [300_000, 1_000_000, 4_000_000])
@pytest.mark.parametrize("multiple_of", [1, 8])
def test_the_next_batch_does_not_fit(capacity: int, multiple_of: int) -> None:
    seen: list[tuple[int, str]] = []
    saw = lambda *at: seen.append(at)
    found = xform.memory.max_batch(step, f32(64, 64), f32(4, 64), target="cpu", capacity=capacity,
                            multiple_of=multiple_of, progress=saw)  # fmt: skip
    assert found.compiles <= 8
    assert sorted(seen) == [(n, "cpu") for n in sorted(found.tried)]
    assert found.size % multiple_of == 0
    assert found.fits.total_bytes <= capacity
    for size, fits in ((found.size, True), (found.size + multiple_of, False)):
        report = xform.memory_analysis(step, f32(64, 64), f32(size, 64), capacity=capacity)
        assert report.fits == fits
    assert found.over is not None
    assert not found.over.fits
    assert f"the largest batch is {found.size}" in str(found)


def test_another_axis_several_arguments_and_a_limit() -> None:
    f = lambda w, x, y: jnp.sum(w @ x + y["a"])
    args = f32(8, 8), f32(8, 2), {"a": f32(8, 2)}
    found = xform.memory.max_batch(f, *args, target="cpu", capacity="1 MiB", batch_axis=1,
                            batch_argnums=(1, 2), max_size=20)  # fmt: skip
    assert found.size == 20
    assert found.over is None


def test_where_bytes_jump_the_largest_is_not_claimed() -> None:
    """Bytes jump in the middle, so the line through two batches misses the largest batch."""

    def jumps(x: Any) -> Any:
        return jnp.sum(jnp.sin(jnp.tile(x, (64, 1))) @ x[0]) if len(x) > 700 else jnp.sum(x)

    found = xform.memory.max_batch(jumps, f32(4, 64), target="cpu", capacity=4_000_000)
    assert found.compiles <= 8
    assert found.fits.fits
    if found.over is None:
        assert "known to fit" in str(found)
    else:
        assert not found.over.fits


@pytest.mark.parametrize("start", [4, 1024])
def test_a_batch_without_a_plan_is_too_large(start: int) -> None:
    """Each batch has a budget of its own."""

    def deep(w: Any, x: Any) -> Any:
        for _ in range(8):
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    planned = xform.grad(deep, policy=xform.policies.budget("300 KiB"))
    found = xform.memory.max_batch(
        planned, f32(64, 64), f32(start, 64), target="cpu", capacity="1 GiB"
    )
    assert found.compiles <= 8
    assert found.size > 32
    for size, said in found.tried.items():
        lower = lambda n: jax.jit(planned).lower(f32(64, 64), f32(n, 64))
        if size <= found.size:
            lower(size)
            assert said is not None
        else:
            with pytest.raises(BudgetInfeasible):
                lower(size)
            assert said is None
    assert found.over is None or isinstance(found.over, BudgetInfeasible)


def test_no_batch_has_a_plan() -> None:
    planned = xform.grad(loss, policy=xform.policies.budget("10 KiB"))
    with pytest.raises(BudgetInfeasible):
        xform.memory.max_batch(planned, f32(64, 64), f32(1, 64), target="cpu", capacity="1 GiB")


def test_not_even_one() -> None:
    with pytest.raises(WrongArgument, match="a batch of 1 does not fit"):
        xform.memory.max_batch(step, f32(64, 64), f32(4, 64), target="cpu", capacity="16 KiB")


def test_arguments_without_one_batch() -> None:
    with pytest.raises(WrongArgument, match="different sizes on that axis: 4, 64"):
        xform.memory.max_batch(step, f32(64, 64), f32(4, 64), target="cpu", capacity=10**6,
                        batch_argnums=(0, 1))  # fmt: skip
    with pytest.raises(WrongArgument, match="name the arguments that have a batch"):
        xform.memory.max_batch(
            step, f32(64, 64), f32(4, 64), target="cpu", capacity=10**6, batch_axis=2
        )


def test_a_number_has_no_batch() -> None:
    with pytest.raises(WrongArgument, match="has no such axis"):
        xform.memory.max_batch(lambda x: x, 3, target="cpu", capacity=100)


def test_a_batch_of_all_arguments() -> None:
    f = lambda x, y: x + y
    found = xform.memory.max_batch(f, f32(4, 8), f32(4, 8), target="cpu", capacity="1 MiB",
                            batch_argnums=None, max_size=2)  # fmt: skip
    assert found.size == 2


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        (0, {}, "the function is given 0 positional arguments"),
        (2, {"batch_argnums": 7}, "the function is given 2 positional arguments"),
        (2, {"batch_argnums": (1, -3)}, "the function is given 2 positional arguments"),
        (2, {"batch_argnums": ()}, "has no such axis"),
        (2, {"multiple_of": 0}, "there is no positive multiple"),
        (2, {"multiple_of": -2}, "there is no positive multiple"),
        (2, {"multiple_of": 8, "max_size": 4}, "multiple_of=8, max_size=4"),
    ],
)
def test_a_batch_that_cannot_be_asked_for(args: int, options: Any, message: str) -> None:
    given = (f32(64, 64), f32(4, 64))[:args]
    with pytest.raises(WrongArgument, match=message):
        xform.memory.max_batch(step, *given, target="cpu", capacity=10**6, **options)


@pytest.mark.parametrize("capacity", [None, 0])
def test_printed_batch_sizes_fit_up_to_the_largest_at_any_capacity(capacity: int | None) -> None:
    target = parse_target("cpu:1")
    device = dataclasses.replace(target.device, capacity_bytes=capacity)
    target = dataclasses.replace(target, device=device)
    fits = MemoryReport("f", target, 1, {}, 0, 0.0, None)
    lines = str(LargestBatch(8, fits, None, {4: 100, 8: 200, 16: 400})).splitlines()
    assert [line.split()[-1] for line in lines[-3:]] == ["fits", "fits", "over"]


def test_why_not() -> None:
    reason = xform.memory.why_oom(step, f32(64, 64), f32(512, 64), target="cpu", capacity="100 KiB")
    assert reason.report is reason.target_report
    text = str(reason)
    for part in ("it is over by", "live at the peak", "test_capacity.py:", "- "):
        assert part in text


@pytest.mark.parametrize(
    ("asked", "installed", "others"),
    [
        ("tpu:v5e:1x1", True, ["tpu:v5p:1x1x1", "cpu:1"]),
        ("tpu:v5e:2x6", True, ["cpu:12"]),
        ("gpu:h100:8", True, ["gpu:b200:8", "cpu:8"]),
        ("gpu:h100:8", False, ["cpu:8"]),
    ],
)
def test_where_else_a_refused_program_is_compiled(
    asked: str, installed: bool, others: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks = lambda target: [] if installed or target.platform == "cpu" else ["a package"]
    monkeypatch.setattr(capacity_module, "missing", lacks)
    target = parse_target(asked)
    report = MemoryReport("f", target, target.count, {}, 0, 0.0, None, refused="too big")
    assert [*capacity_module._larger_targets(report)] == others


def test_a_target_that_is_no_name() -> None:
    with pytest.raises(WrongArgument, match="it is not the name of a target"):
        xform.fits(step, f32(64, 64), f32(4, 64), target=7)  # type: ignore[arg-type]


def test_nothing_fits_no_room() -> None:
    report = xform.fits(step, f32(64, 64), f32(4, 64), target="cpu", capacity=0)
    assert not report.fits
    assert "it is over by" in report.verdict()


@pytest.mark.parametrize("capacity", ["a lot", -1, 1.5])
def test_a_capacity_that_is_none(capacity: Any) -> None:
    with pytest.raises(WrongArgument, match="it is not a number of bytes"):
        xform.memory_analysis(step, f32(64, 64), f32(4, 64), capacity=capacity)
