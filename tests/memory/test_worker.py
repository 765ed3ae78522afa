"""The worker's code, run in this process."""

import os
import subprocess
import sys
import threading
import types

import jax
import numpy as np
import pytest

from tests.processes import cpu_environment
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


def test_function_is_called_when_the_requesting_pipe_closes() -> None:
    reads, writes = os.pipe()
    alone = threading.Event()
    thread = threading.Thread(target=worker.call_at_end, args=(reads, alone.set))
    thread.start()
    assert not alone.wait(0.05)
    os.close(writes)
    assert alone.wait(10)
    thread.join()
    os.close(reads)


# A report whose table names the line of the product, unless a flag of the user hides the program.
REPORT = """
import sys, jax, jax.numpy as jnp, xform
f = jax.jit(lambda x: jnp.sin(x @ x) @ x, compiler_options=eval(sys.argv[1]))
print(xform.memory_analysis(f, jax.ShapeDtypeStruct((64, 64), "float32")))
"""
# What users and trainers ask the compiler to dump. MaxText sets the first.
DUMPED = [
    "--xla_dump_hlo_module_re=jit_train_step",
    "--xla_dump_max_hlo_modules=1",
    "--xla_dump_compress_protos=true --xla_dump_hlo_to_subfolder=true",
]


@pytest.mark.parametrize("flags", DUMPED)
def test_report_has_the_peak_table_if_xla_flags_set_dumps(flags, tmp_path) -> None:
    env = {**cpu_environment(1), "XLA_FLAGS": f"{flags} --xla_dump_to={tmp_path}"}
    command = [sys.executable, "-c", REPORT, "None"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert "live at the peak, by category" in done.stdout
    assert "dot_general" in done.stdout


def test_report_has_the_peak_table_if_compiler_options_of_jit_set_dumps(tmp_path) -> None:
    asked = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_module_re": "another"}
    command = [sys.executable, "-c", REPORT, repr(asked)]
    env = cpu_environment(1)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert "live at the peak, by category" in done.stdout
