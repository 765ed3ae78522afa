"""Peaks that were saved, and reports that are compared with them."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import xform
from xform.errors import WrongArgument
from xform.memory.saved_peaks import Peak, PeakGrowth, growth, save_peaks

F32 = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def small(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def large(w, x):
    return jnp.sum(jnp.tanh(jnp.concatenate([x, x, x, x]) @ w) ** 2)


@pytest.fixture(scope="module")
def report():
    return xform.memory_analysis(xform.grad(small), F32, F32)


def test_an_unchanged_program_has_not_grown(report, tmp_path) -> None:
    save_peaks(tmp_path / "peaks.json", report)
    (same,) = growth(tmp_path / "peaks.json", report, tolerance=0)
    assert (same.bytes, same.exceeds) == (0, False)
    assert str(same) == "small on cpu, min_cut: the total unchanged"


def test_other_arguments_are_told(report, tmp_path) -> None:
    """A smaller batch may hide a program that grew."""
    save_peaks(tmp_path / "peaks.json", report)
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    (found,) = growth(tmp_path / "peaks.json", xform.memory_analysis(xform.grad(small), F32, x))
    assert not found.exceeds
    told = "it was saved for w f32[64,64], x f32[64,64]; now they are w f32[64,64], x f32[8,64]"
    assert f"the arguments differ: {told}" in str(found)


def test_the_lines_that_grew_are_those_of_today(report, tmp_path) -> None:
    save_peaks(tmp_path / "peaks.json", report)
    larger = xform.memory_analysis(xform.grad(large), F32, F32)
    larger = dataclasses.replace(larger, function="small")
    (grown,) = growth(tmp_path / "peaks.json", larger)
    assert grown.exceeds
    assert grown.bytes == larger.total_bytes - report.total_bytes
    first = large.__code__.co_firstlineno + 1
    head, _, *rows = str(grown).splitlines()
    assert "more than the accepted" in head
    assert any(f"test_saved_peaks.py:{first} (large)" in row and "+" in row for row in rows)


def test_the_numbers_of_lines_are_not_saved(report, tmp_path) -> None:
    save_peaks(tmp_path / "peaks.json", report)
    (peak,) = json.loads((tmp_path / "peaks.json").read_text())["peaks"]
    assert "tanh at tests/memory/test_saved_peaks.py (small)" in {
        place.replace("\\", "/") for place in peak["lines"]
    } or any(place.endswith("test_saved_peaks.py (small)") for place in peak["lines"])
    assert sum(peak["lines"].values()) == peak["sizes"]["total"] == report.total_bytes


@pytest.mark.parametrize(
    ("tolerance", "allowed"), [("2%", 20), (0, 0), ("1KiB", 1024), (" 150 %", 1500)]
)
def test_a_tolerance_is_a_share_or_bytes(report, tmp_path, tolerance, allowed) -> None:
    save_peaks(tmp_path / "peaks.json", report)
    data = json.loads((tmp_path / "peaks.json").read_text())
    data["peaks"][0]["sizes"]["total"] = 1000
    (tmp_path / "peaks.json").write_text(json.dumps(data))
    (found,) = growth(tmp_path / "peaks.json", report, tolerance=tolerance)
    assert found.allowed_bytes == allowed


@pytest.mark.parametrize("tolerance", ["much", "-2%", "nan%", "inf%", -1, "", "5"])
def test_another_tolerance_is_an_error(report, tmp_path, tolerance) -> None:
    save_peaks(tmp_path / "peaks.json", report)
    with pytest.raises(WrongArgument, match="neither a share nor a number of bytes"):
        growth(tmp_path / "peaks.json", report, tolerance=tolerance)


@pytest.mark.parametrize("text", ["", "[]", '{"format": "xform peaks 0"}',
                                  '{"format": "xform peaks 1", "peaks": [{}]}'])  # fmt: skip
def test_a_file_without_peaks_is_an_error(report, tmp_path, text) -> None:
    (tmp_path / "peaks.json").write_text(text)
    with pytest.raises(WrongArgument, match="the file holds no peaks"):
        growth(tmp_path / "peaks.json", report)


def test_a_peak_that_was_not_saved_is_named(report, tmp_path) -> None:
    save_peaks(tmp_path / "peaks.json", report)
    other = xform.memory_analysis(small, F32, F32)
    with pytest.raises(WrongArgument, match=r"no peak of small on cpu\n.*small on cpu, min_cut"):
        growth(tmp_path / "peaks.json", other)


def test_a_program_that_the_compiler_refuses_has_grown(report) -> None:
    before = Peak.of(report)
    refused = dataclasses.replace(before, sizes=dict.fromkeys(before.sizes))
    found = PeakGrowth(before, refused, 10**9, {})
    assert found.exceeds
    assert "the compiler refused the program" in str(found)


def test_another_version_of_jax_is_named(report) -> None:
    after = Peak.of(report)
    found = PeakGrowth(dataclasses.replace(after, jax="0.9"), after, 0, {})
    assert f"saved with JAX 0.9, now {jax.__version__}" in str(found)
