"""Operations that XLA recomputes by itself, by the names that it gives them.

XLA:CPU never does so, so the tests give the instructions of compiled programs such names.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import xform
from xform import policies
from xform.memory.recomputed import Recomputed, product_flops, recomputed
from xform.memory.traffic import run_counts
from xform.planner.hardware import Hardware
from xform.terminal.text import human_bytes

N = 48


def report_of(f: Any, *shapes: tuple[int, ...]) -> Any:
    return xform.memory_analysis(f, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))


def layers(x: Any, w: Any) -> Any:
    x = jnp.sin(x @ w)
    return jnp.cos(x @ w).T @ w


def rename_products(module: Any, *names: str) -> None:
    """Give the first instructions that compute matrix products these names."""
    products = [i for i, _ in run_counts(module) if product_flops(module, i)]
    for i, name in zip(products, names, strict=False):
        i.name = name


def with_clones(report: Any, *names: str) -> Any:
    """Return the report after its first products got these names."""
    rename_products(report.assignment.module, *names)
    # The report looks for clones only if the bytes have such a name.
    object.__setattr__(report, "module", report.module + b".remat")
    return report


def test_clones_are_counted_if_the_original_is_there() -> None:
    report = report_of(layers, (N, N), (N, N))
    module = report.assignment.module
    assert recomputed(module) == ()
    rename_products(module, "dot.7", "dot.7.remat2", "dot.8.remat")
    where = f"{__file__}:{layers.__code__.co_firstlineno + 2} (layers)"
    assert recomputed(module) == (Recomputed("dot_general", where, 1, 2 * N**3, 4 * N**2),)
    rename_products(module, "dot.7", "dot.7.remat2", "dot.7.remat3")
    assert sum(row.flops for row in recomputed(module)) == 4 * N**3


def test_a_value_in_another_layout_is_not_recomputed() -> None:
    module = report_of(layers, (N, N), (N, N)).assignment.module
    rename_products(module, "dot.7", "dot.7.remat_compressed", "dot.7.remat_uncompressed")
    assert recomputed(module) == ()


def test_clones_in_a_loop_count_in_each_iteration() -> None:
    def looped(x: Any, w: Any) -> Any:
        return lax.scan(lambda h, _: (layers(h, w), None), x, None, length=5)[0]

    module = report_of(looped, (N, N), (N, N)).assignment.module
    rename_products(module, "dot.7", "dot.7.remat", "dot.7.remat2")
    (row,) = recomputed(module)  # both are on one line
    assert (row.count, row.flops, row.bytes) == (2 * 5, 2 * 5 * 2 * N**3, 2 * 4 * N**2)


def test_the_report_says_it() -> None:
    assert "recomputed by the compiler" not in str(report_of(layers, (N, N), (N, N)))
    report = with_clones(report_of(layers, (N, N), (N, N)), "dot.7", "dot.7.remat2")
    size, flops = "9.0 KiB of results", "221.2 kFLOP of matrix products and convolutions"
    summary = f"1 operation, {flops}, {size}"
    assert f"recomputed by the compiler, because memory is short: {summary}" in str(report)
    assert any(f"the compiler recomputes {summary}, most at" in text for text in report.advice)
    (row,) = report.to_dict()["recomputed"]
    assert row == dataclasses.asdict(report.recomputed[0])


PRODUCTS = {
    "batches": (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (3, 4, 5), (3, 5, 6), 3 * 4 * 5 * 6),
    "transposed": (lambda a, b: a.T @ b, (8, 4), (8, 6), 8 * 4 * 6),
    "two axes": (lambda a, b: jnp.tensordot(a, b, 2), (4, 5, 6), (5, 6, 7), 4 * 5 * 6 * 7),
    "convolution": (
        lambda x, k: lax.conv(x, k, (1, 1), "VALID"),
        (2, 3, 8, 8), (5, 3, 3, 3), 2 * 5 * 6 * 6 * 3 * 3 * 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_flops_of_products_are_those_of_their_sizes(name: str) -> None:
    f, a, b, multiplications = PRODUCTS[name]
    module = report_of(f, a, b).assignment.module
    found = sum(times * product_flops(module, i) for i, times in run_counts(module))
    assert found == 2 * multiplications


def test_a_program_above_what_xla_plans_for_does_not_fit() -> None:
    report = report_of(layers, (N, N), (N, N))
    io_bytes = report.argument_bytes + report.output_bytes
    gpu = lambda memory: dataclasses.replace(
        report.compiled_for,
        device=Hardware(name="GPU", capacity_bytes=2**20, recompute_bytes=memory),
    )
    planned = io_bytes + report.temp_bytes * 100 // 95
    below, above = (
        dataclasses.replace(report, compiled_for=gpu(planned + n)) for n in (1000, -1000)
    )
    assert below.fits
    assert "it fits, " in below.verdict()
    assert not above.fits
    assert f"above {human_bytes(above.limit_bytes)}: it is over by" in above.verdict()
    of_device = dataclasses.replace(policies.budget(2**20), device="GPU")
    assert above.limit(of_device).bytes == above.limit_bytes < above.total_bytes
    assert above.limit(policies.budget(2**20)).bytes == 2**20


def test_what_xla_recomputes_counts_against_a_budget() -> None:
    report = report_of(layers, (N, N), (N, N))
    assert report.counted_bytes == report.total_bytes
    device = Hardware(name="GPU", capacity_bytes=2**30)
    target = dataclasses.replace(report.compiled_for, device=device)
    report = with_clones(dataclasses.replace(report, compiled_for=target), "dot.7", "dot.7.remat2")
    assert report.counted_bytes == report.total_bytes + 4 * N**2
    assert not report.fits
    assert "so small because XLA recomputes 1 operation" in report.verdict()
