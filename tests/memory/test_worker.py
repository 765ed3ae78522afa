"""The worker's code, run in this process."""

import os
import threading
import types

import jax
import numpy as np
import pytest

from xform.memory import worker


def test_bytes_and_the_program(tmp_path) -> None:
    lowered = jax.jit(lambda x: jax.numpy.sin(x @ x) @ x).lower(np.ones((64, 64), np.float32))
    said, module = worker.compile_and_read(lowered, tmp_path / "dump")
    assert list(said["bytes"]) == list(worker.KINDS)
    assert said["bytes"]["argument"] == 64 * 64 * 4
    assert said["bytes"]["temp"] >= 64 * 64 * 4
    assert said["compile_seconds"] > 0
    assert b"jit__lambda" in module


@pytest.mark.parametrize("refused", [False, True])
def test_of_several_programs_the_largest_after_the_last_pass_is_read(tmp_path, refused) -> None:
    for name, size in {
        "a.before_optimizations": 9,
        "a.x_after_optimizations": 8,
        "a.x_after_optimizations_after_buffer_assignment": 12,
        "helper.x_after_optimizations": 2,
    }.items():
        (tmp_path / f"{name}.hlo.pb").write_bytes(name[:1].encode() * size)

    class LoweredProgram:
        def compile(self, compiler_options):
            if refused:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too big")
            return self

        def memory_analysis(self):
            return types.SimpleNamespace(temp_size_in_bytes=5, output_size_in_bytes=None)

    said, module = worker.compile_and_read(LoweredProgram(), tmp_path)
    if refused:
        assert said["error"] == "RESOURCE_EXHAUSTED: too big"
        assert module is None
    else:
        assert (said["bytes"]["temp"], said["bytes"]["output"]) == (5, 0)
        assert module == b"aaaaaaaa"


@pytest.mark.parametrize("dtype", [
    "float32", "bfloat16", "complex64", "int8", "bool", jax.random.key(0).dtype,
    jax.random.key(0, impl="rbg").dtype,
])  # fmt: skip
def test_an_argument_that_is_not_read_has_any_dtype(dtype) -> None:
    types = [jax.ShapeDtypeStruct((3,), d) for d in ("float32", dtype)]
    exported = jax.export.export(jax.jit(lambda x, unread: x + 1))(*types)
    request = {"target": {"platform": "cpu"}, "axes": [], "donated": []}
    assert len(worker.lower(exported, request).in_avals[0]) == 1


def test_it_notices_that_nobody_waits() -> None:
    reads, writes = os.pipe()
    alone = threading.Event()
    thread = threading.Thread(target=worker.call_at_end, args=(reads, alone.set))
    thread.start()
    assert not alone.wait(0.05)
    os.close(writes)
    assert alone.wait(10)
    thread.join()
    os.close(reads)
