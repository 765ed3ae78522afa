"""What JSON lacks is written and read back, and a damaged file is refused with the place."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xform
from xform import errors
from xform.memory.targets import parse_target
from xform.storage import results

W = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def again(value: Any, kind: Any = Any) -> Any:
    return results.from_data(kind, json.loads(json.dumps(results.to_data(value))), "value")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "complex64", "int8",
                                   "bool"])  # fmt: skip
@pytest.mark.parametrize("shape", [(2, 3), (0, 4), ()])
def test_an_array(dtype: str, shape: tuple[int, ...]) -> None:
    array = jnp.ones(shape, dtype)
    read = again(array)
    assert read.dtype == array.dtype
    assert read.shape == shape
    np.testing.assert_array_equal(read, np.asarray(array))


def test_random_keys() -> None:
    keys = jax.random.split(jax.random.key(3), 2)
    read = again(keys)
    assert read.dtype == keys.dtype
    assert (jax.random.key_data(read) == jax.random.key_data(keys)).all()


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), 1.5, 2])
def test_a_number(value: float) -> None:
    assert again(value, float) == value
    assert again(value, float | None) == value


def test_nan_and_bytes_and_collections() -> None:
    assert np.isnan(again(float("nan"), float))
    assert again(b"\x00\xff", bytes | None) == b"\x00\xff"
    assert again({3: None, 4: 5}, dict[int, int | None]) == {3: None, 4: 5}
    names = frozenset([("f32", (1, 2)), ("f32", (1,))])
    assert again(names, frozenset[tuple[str, tuple[int, ...]]]) == names


def test_a_refused_budget_is_part_of_a_result(tmp_path: Path) -> None:
    error = errors.BudgetInfeasible("budget", "no plan fits", "", "give more", 512)
    fits = xform.memory_analysis(jnp.sin, W)
    largest = xform.memory.max_batch(jnp.sin, W, target="cpu", capacity="64KiB")
    for over in (error, fits, None):
        made = type(largest)(8, fits, over, {8: 256, 16: None}, "axis 0 of x")
        made.save(tmp_path / "batch.json")
        loaded = xform.load(tmp_path / "batch.json")
        assert type(loaded.over) is type(over)
        assert str(loaded.over) == str(over)
        assert loaded.tried == made.tried
    assert again(error).floor_bytes == 512


@pytest.mark.parametrize("name", ["cpu", "gpu:h100:8", "tpu:v5e:4x4"])
def test_a_target_keeps_the_properties_of_its_device(name: str) -> None:
    target = parse_target(name)
    read = again(target, type(target))
    assert (read.name, read.count, read.absent) == (target.name, target.count, target.absent)
    assert read.device.capacity_bytes == target.device.capacity_bytes
    assert read.device.bytes_per_second == target.device.bytes_per_second


def test_the_advice_of_a_report_survives_without_its_program(tmp_path: Path) -> None:
    loss = lambda w, x: jnp.mean(jax.vmap(lambda x: jnp.sum(jnp.tanh(w @ x) ** 2))(x))
    x = jax.ShapeDtypeStruct((64, 8), jnp.float32)
    report = xform.memory_analysis(xform.grad(loss), W, x, target="cpu", capacity="2KiB")
    report.save(tmp_path / "report.json")
    loaded = xform.load(tmp_path / "report.json")
    assert report.batches
    assert not loaded.batches
    assert report.advice
    assert loaded.advice == report.advice


WRONG = {
    "no JSON": ("{", "Expecting property name"),
    "another format": ('{"format": "xform poems 1"}', "the format is 'xform poems 1', which this "
                       "version does not have"),
    "no object": ("[]", "the format is None, which this version does not have"),
    "no fields": ('{"format": "xform pattern 1"}', "pattern.cols is missing"),
    "damaged bytes": ('{"format": "xform pattern 1", "rows": {"$array": ["int64", [1], "AAAA"]}, '
                      '"cols": 3, "shape": [1, 1]}', "damaged bytes"),
    "no such dtype": ('{"format": "xform pattern 1", "rows": {"$array": ["no", [1], "eJwDAAAAAAE="'
                      ']}, "cols": 3, "shape": [1, 1]}', "data type 'no' not understood"),
    "a number for an array": ('{"format": "xform pattern 1", "rows": 3, "cols": 3, "shape": '
                              '[1, 1]}', "pattern.rows is 3, not an array"),
    "a shape of three": ('{"format": "xform pattern 1", "rows": {"$array": ["int8", [0], '
                         '"eJwDAAAAAAE="]}, "cols": {"$array": ["int8", [0], "eJwDAAAAAAE="]}, '
                         '"shape": [1, 1, 1]}',
                         "pattern.shape is [1, 1, 1], not a list of 2 values"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_holds_no_result(name: str, tmp_path: Path) -> None:
    text, problem = WRONG[name]
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(errors.WrongArgument) as caught:
        xform.load(path)
    assert str(caught.value).startswith(f"load({str(path)!r})\n  problem: the file holds no result")
    assert problem in str(caught.value)
    assert "pass a file that the method save" in str(caught.value)


def test_a_class_reads_only_its_own_results(tmp_path: Path) -> None:
    xform.residuals(jnp.sin, jax.ShapeDtypeStruct((), jnp.float32)).save(tmp_path / "table.json")
    with pytest.raises(errors.WrongArgument, match="the format is 'xform residuals 1', not"):
        xform.Plan.load(tmp_path / "table.json")
    with pytest.raises(FileNotFoundError):
        xform.load(tmp_path / "none.json")


@pytest.mark.parametrize(("name", "remedy"), [("r.png", "plot"), ("r.HTML", "save_html")])
def test_a_result_is_saved_as_json_only(name: str, remedy: str, tmp_path: Path) -> None:
    report = xform.memory_analysis(jnp.sin, jnp.ones(3))
    with pytest.raises(errors.WrongArgument, match=rf"end the name in \.json; or call {remedy}\("):
        report.save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_formats_are_unique() -> None:
    formats = [text for text, _ in results.FORMATS.values()]
    assert len({*formats}) == len(formats)


def test_saved_peaks_are_no_result(tmp_path: Path) -> None:
    report = xform.memory_analysis(jnp.sin, jnp.ones(3))
    xform.memory.save_peaks(tmp_path / "peaks.json", report)
    with pytest.raises(errors.WrongArgument, match=r"saved peaks, which xform\.memory\.growth"):
        xform.load(tmp_path / "peaks.json")
