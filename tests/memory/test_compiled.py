"""Compiled memory: sizes that are known, and what reads them."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import xform
from xform.errors import WrongArgument, XformError
from xform.memory.compiled import MemoryReport

KEYS = [
    "argument_bytes",
    "output_bytes",
    "temp_bytes",
    "alias_bytes",
    "total_bytes",
    "host_bytes",
    "code_bytes",
    "flops",
    "compile_seconds",
]


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def chain(x: Any) -> Any:
    return jnp.sin(x @ x) @ x


def test_bytes_and_flops() -> None:
    report = xform.memory_analysis(chain, f32(128, 128))
    assert report.argument_bytes == report.output_bytes == 128 * 128 * 4
    assert report.temp_bytes >= 128 * 128 * 4
    assert report.alias_bytes == report.host_bytes == 0
    assert report.total_bytes == 2 * 128 * 128 * 4 + report.temp_bytes
    assert report.flops == 2 * 2 * 128**3 + 128**2
    assert report.compile_seconds > 0


def test_arrays_and_types_give_the_same() -> None:
    one, other = (
        xform.memory_analysis(chain, x).to_dict() for x in (jnp.ones((16, 16)), f32(16, 16))
    )
    one.pop("compile_seconds"), other.pop("compile_seconds")
    assert one == other


def test_keywords_trees_and_nothing_allocated() -> None:
    def f(tree: Any, *, scale: Any) -> Any:
        return jax.tree.map(lambda x: jnp.sum(x * scale), tree)

    huge = f32(2**18, 2**18)
    report = xform.memory_analysis(f, {"a": huge, "b": [f32(3)]}, scale=f32())
    assert report.argument_bytes == 2**38 + 12 + 4


def test_a_jitted_function_keeps_its_donation_and_static_arguments() -> None:
    @functools.partial(jax.jit, donate_argnums=0, static_argnames="by")
    def step(state: Any, by: int) -> Any:
        return state + by

    report = xform.memory_analysis(step, f32(256, 256), by=2)
    assert report.alias_bytes == 256 * 256 * 4
    assert report.total_bytes == 256 * 256 * 4 + report.temp_bytes


def test_nnx_jit() -> None:
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    report = xform.memory_analysis(nnx.jit(lambda m, x: m(x)), model, f32(2, 8))
    assert report.flops >= 2 * 2 * 8 * 4
    assert report.argument_bytes == 4 * (8 * 4 + 4 + 2 * 8)


def test_loops_count_every_trip() -> None:
    def f(ws: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, w: (x @ w, None), x, ws)[0]

    assert xform.memory_analysis(f, f32(12, 64, 64), f32(8, 64)).flops == 12 * 2 * 8 * 64 * 64


def test_the_table() -> None:
    report = MemoryReport(3 * 2**30, 1536, 2**20, 512, 0, 7, 1_500_000_000, 1.25)
    assert str(report).splitlines() == [
        "argument    3.0 GiB",
        "output      1.5 KiB",
        "temp        1.0 MiB",
        "alias         512 B  outputs in the memory of donated arguments",
        "total       3.0 GiB  argument + output + temp - alias",
        "host            0 B",
        "code            7 B",
        "flops     1.5 GFLOP",
        "compile      1.25 s",
    ]
    assert list(report.to_dict()) == KEYS
    assert report.to_dict()["total_bytes"] == 3 * 2**30 + 1536 + 2**20 - 512


class _Backend:
    """A jitted function on a backend that reports `stats`."""

    def __init__(self, stats: Any):
        self._compiled = SimpleNamespace(memory_analysis=lambda: stats)

    def __call__(self) -> None:
        """Never called: only compiled."""

    def trace(self) -> Any:
        return SimpleNamespace(jaxpr=jax.make_jaxpr(jnp.sin)(1.0), lower=self.lower)

    def lower(self) -> Any:
        return SimpleNamespace(compile=lambda: self._compiled)


def test_fields_that_a_backend_leaves_out_are_zero() -> None:
    report = xform.memory_analysis(_Backend(SimpleNamespace(temp_size_in_bytes=None,
                                                           output_size_in_bytes=4)))  # fmt: skip
    assert (report.temp_bytes, report.output_bytes, report.host_bytes, report.flops) == (0, 4, 0, 1)


def test_a_backend_without_statistics_is_an_error() -> None:
    with pytest.raises(XformError, match="reports no memory statistics"):
        xform.memory_analysis(_Backend(None))


def test_not_a_function() -> None:
    with pytest.raises(WrongArgument, match="3 is not callable"):
        xform.memory_analysis(3)  # type: ignore[arg-type]
