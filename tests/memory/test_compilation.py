"""Compile for targets: the present one, several CPU devices, and absent TPUs and GPUs."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractMesh, AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import xform
from tests.memory.dumps import dumped
from xform import errors
from xform.memory import answers, compilation
from xform.memory.answers import Answer
from xform.memory.compilation import compile_for, trace_for
from xform.memory.lowering import LoweredProgram
from xform.memory.targets import missing, parse_target
from xform.storage.bounded_cache import BoundedCache

W, X = jax.ShapeDtypeStruct((12, 64, 64), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)
BYTES = {"argument": 100, "output": 50, "temp": 30, "alias": 20, "generated_code": 5,
         "host_argument": 1, "host_output": 2, "host_temp": 4, "host_alias": 1}  # fmt: skip


def loss(w, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0].sum()


def answering(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> list[LoweredProgram]:
    """Replace the compiling process, and return its requests."""
    asked: list[LoweredProgram] = []

    def compile_there(lowered, target, timeout):
        asked.append(lowered)
        return answer

    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    monkeypatch.setattr(compilation, "check_installed", lambda target: None)
    monkeypatch.setattr(compilation, "compile_there", compile_there)
    monkeypatch.setattr(answers, "_answers", BoundedCache(5))
    monkeypatch.setattr(answers, "_answer_file", lambda name: None)
    return asked


@pytest.mark.parametrize("target", [None, "cpu"])
def test_here(target: str | None) -> None:
    made = compile_for(xform.grad(loss), (W, X), target=target, donate_argnums=0)
    stats = jax.jit(xform.grad(loss), donate_argnums=0).lower(W, X).compile().memory_analysis()
    assert made.argument_bytes == stats.argument_size_in_bytes
    assert made.temp_bytes == stats.temp_size_in_bytes
    assert made.alias_bytes == W.size * 4
    assert (
        made.total_bytes == made.argument_bytes + made.temp_bytes + made.output_bytes - W.size * 4
    )
    assert (made.function, made.devices, made.refused, made.fits) == ("loss", 1, "", True)
    assert made.flops == xform.memory_analysis(xform.grad(loss), W, X).flops
    assert b"jit_loss" in made.module
    assert made.verdict().startswith("loss needs ")


def test_trace_for_and_compile_for_agree_on_arguments_and_donation() -> None:
    step = lambda w, x, kind: (jax.grad(loss)(w, x), kind == "held" or None)
    found = trace_for(step, (W, X, "held"), {}, parse_target("cpu"), 0)
    assert [a.donated for a in jax.tree.leaves(found.args_info)] == [True, False]
    made = compile_for(step, (W, X, "held"), target="cpu", donate_argnums=0)
    assert made.argument_bytes == sum(a.size * 4 for a in found.jaxpr.in_avals)
    with pytest.raises(errors.WrongArgument, match="donate_argnums"):
        trace_for(jax.jit(loss), (W, X), {}, parse_target("cpu"), 0)


def test_here_on_a_mesh() -> None:
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    mesh = {"i": 4, "j": 2}
    made = compile_for(lambda x: x + 1, (x,), mesh=mesh, in_specs=P("i", "j"))
    assert made.devices == 8
    assert made.argument_bytes == made.output_bytes == x.size * 4 // 8
    abstract = jax.sharding.AbstractMesh((4, 2), ("i", "j"))
    at = jax.sharding.NamedSharding(abstract, P("i"))
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=at)
    assert compile_for(lambda x: x + 1, (x,)).argument_bytes == x.size * 4 // 4
    with pytest.raises(errors.WrongArgument, match="give a target with that many devices"):
        compile_for(lambda x: x, (x,), mesh={"i": 64})


def test_compilation_has_arguments_bytes_module_and_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, _ = dumped("odd")
    answering(Answer(BYTES, 2.0, module), monkeypatch)
    made = compile_for(lambda p, x: p["w"] + x, ({"w": X}, X), target="gpu:l4")
    assert made.arguments == ("p['w']", "x")
    assert made.module == module
    assert made.device_bytes == made.total_bytes + made.constant_bytes
    assert made.constant_bytes < 64
    assert (made.total_bytes, made.host_bytes, made.code_bytes) == (160, 6, 5)
    assert (made.over_bytes, made.fits, made.compile_seconds) == (0, True, 2.0)
    needs, has = f"{made.device_bytes} B of each NVIDIA L4", "which has 22.0 GiB"
    has += "; XLA recomputes operations in a program above 16.7 GiB"
    assert made.verdict() == f"<lambda> needs {needs}, {has}: it fits, 16.7 GiB are left"


def test_a_program_is_compiled_once_for_each_target(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answering(Answer(BYTES, 2.0, None), monkeypatch)
    f = lambda x: jnp.sin(x)
    for _ in range(2):
        compile_for(f, (X,), target="gpu:h100")
    assert len(asked) == 1
    compile_for(f, (X,), target="gpu:h200")
    compile_for(f, (X,), target="gpu:h100", donate_argnums=0)
    compile_for(f, (W,), target="gpu:h100")
    assert len(asked) == 4
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_any=1")
    compile_for(f, (X,), target="gpu:h100")
    assert len(asked) == 5
    compile_for(f, (X,), target="gpu:h200:2")
    assert len(answers._answers) == 5


@pytest.mark.parametrize(
    ("said", "needs"),
    [
        ("the total memory required for HLO temporaries (39.00G) exceeds available HBM (15.75G).",
         "39.0 GiB of each TPU v5e, which has 15.8 GiB: it is over by 23.2 GiB"),
        ("Ran out of memory in memory space hbm. Used 16.50G of 15.75G hbm. Exceeded by 768.00M.",
         "16.5 GiB of each TPU v5e, which has 15.8 GiB: it is over by 768.0 MiB"),
    ],
)  # fmt: skip
def test_too_big_is_a_result(said: str, needs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = f"RESOURCE_EXHAUSTED: {said}"
    answering(Answer({}, 1.0, b"hlo", error), monkeypatch)
    made = compile_for(lambda x: x, (X,), target="tpu:v5e:1x1")
    assert made.verdict() == f"<lambda> needs {needs}"
    assert made.refused == error
    assert not made.fits
    assert made.module == b"hlo"


@pytest.mark.parametrize(
    "said", ["in other words", "Ran out of memory in memory space vmem. Used 150M of 128M vmem"]
)
def test_refusal_without_a_size_has_unknown_total_bytes(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(Answer({}, 1.0, None, f"RESOURCE_EXHAUSTED: {said}"), monkeypatch)
    made = compile_for(lambda x: x, (X,), target="tpu:v5e:1x1")
    assert made.total_bytes is None
    assert made.verdict() == (
        "the compiler refused <lambda> for TPU v5e, which has 15.8 GiB: the bytes that it needs "
        "are not known"
    )
    assert not made.fits


def test_compiled_program_over_the_capacity_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(Answer({"temp": 100 * 2**30}, 1.0, None), monkeypatch)
    made = compile_for(lambda x: x, (X,), target="gpu:h100")
    assert not made.fits
    assert made.over_bytes == 100 * 2**30 - made.limit_bytes
    assert made.verdict().endswith(
        "which has 79.1 GiB; XLA recomputes operations in a program above 60.1 GiB: it is over by "
        "39.9 GiB"
    )


def test_another_error_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(Answer({}, 1.0, None, "INVALID_ARGUMENT: no\nstack"), monkeypatch)
    with pytest.raises(errors.CompilationFailed) as caught:
        compile_for(lambda x: x, (X,), target="gpu:h100")
    assert str(caught.value) == (
        "<lambda> for target='gpu:h100'\n"
        "  problem: the compiler refused it: INVALID_ARGUMENT: no\n"
        "  remedy:  fix the program; if it is correct, report this error with the program"
    )


def test_several_devices_of_another_process() -> None:
    target = parse_target("cpu:2")
    if missing(target):
        pytest.skip("needs flatbuffers")
    before = dict(os.environ), jax.devices()
    made = compile_for(lambda x: (x @ x.T).sum(), (X,), target=target, mesh={"i": 2},
                       in_specs=P("i"))  # fmt: skip
    assert (dict(os.environ), jax.devices()) == before
    assert made.devices == 2
    assert made.argument_bytes == X.size * 4 // 2
    assert b"all-gather" in made.module or b"all-reduce" in made.module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "four"), [("tpu:v5e:1x1", "tpu:v5e:2x2"), ("gpu:h100", "gpu:h100:4")]
)
def test_without_the_device(one: str, four: str) -> None:
    if absent := missing(parse_target(one)):
        pytest.skip(f"needs {', '.join(absent)}")
    w = jax.ShapeDtypeStruct((8, 1024, 1024), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((16384, 1024), jnp.bfloat16)

    def step(x, w):
        return jnp.tanh(jnp.tanh(x @ w) @ w.T)

    def layers(w, x, step=step):
        for i in range(8):
            x = step(x, w[i])
        return jnp.sum(x.astype(jnp.float32) ** 2)

    def temp(f) -> int:
        made = compile_for(xform.grad(f), (w, x), target=one)
        assert made.argument_bytes >= 2 * (w.size + x.size)
        assert b"jit_layers" in made.module or b"jit__lambda" in made.module
        return made.temp_bytes

    kept = temp(layers)
    assert temp(lambda w, x: layers(w, x, xform.remat(step))) < 0.6 * kept
    spread = compile_for(xform.grad(layers), (w, x), target=four, mesh={"data": 4},
                         in_specs=(P(), P("data")))  # fmt: skip
    assert spread.devices == 4
    assert spread.temp_bytes < 0.5 * kept
    assert b"all-reduce" in spread.module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [("tpu:v5e:1x1", 0), ("tpu:v5e:2x2", 4), ("gpu:h100", 0), ("gpu:h100", 1), ("gpu:h100:4", 4)],
)
@pytest.mark.parametrize("alone", [False, True])
def test_arguments_in_the_memory_of_the_host(name: str, mesh: int, alone: bool) -> None:
    if absent := missing(parse_target(name)):
        pytest.skip(f"needs {', '.join(absent)}")
    here = jax.devices()[0]
    there = AbstractMesh((mesh,), ("i",), axis_types=(AxisType.Auto,)) if mesh else None

    def lies(kind: str) -> Any:
        if there is None:
            return SingleDeviceSharding(here, memory_kind=kind)
        return NamedSharding(there, P("i"), memory_kind=kind)

    def step(mean, *grads):
        new = sum(grads, start=0.9 * jax.device_put(mean, jax.memory.Space.Device))
        return jax.device_put(new, jax.memory.Space.Host)

    n = 2**26
    mean, grad = (jax.ShapeDtypeStruct((n,), np.float32, sharding=lies(kind))
                  for kind in ("pinned_host", "device"))  # fmt: skip
    given = (mean,) if alone else (mean, grad)
    made = compile_for(step, given, target=name, donate_argnums=0)
    assert made.argument_bytes == (0 if alone else 4 * n // (mesh or 1))
    assert made.host_bytes == 4 * n // (mesh or 1)  # in place
    assert made.bytes["host_alias"] == made.host_bytes


@pytest.mark.slow
def test_too_big_for_a_tpu() -> None:
    if absent := missing(parse_target("tpu:v5e:1x1")):
        pytest.skip(f"needs {', '.join(absent)}")
    x = jax.ShapeDtypeStruct((2**31,), np.float32)
    made = compile_for(lambda x: jnp.sin(x) + 1, (x,), target="tpu:v5e:1x1")
    assert made.verdict() == (
        "<lambda> needs 16.0 GiB of each TPU v5e, which has 15.8 GiB: it is over by 256.0 MiB"
    )


def test_options_of_the_compiler_count() -> None:
    f = lambda x: jnp.sum(jnp.sin(jnp.sin(x) * 2) + x)
    apart = {"xla_disable_hlo_passes": "fusion,cpu-fusion,fusion-wrapper,ynn_fusion"}
    plain, options = jax.jit(f), jax.jit(f, compiler_options=apart)
    assert compile_for(plain, (X,)).module != compile_for(options, (X,)).module


def test_programs_in_jax_compilation_cache_still_have_buffer_rows(tmp_path, monkeypatch) -> None:
    settings = {"jax_compilation_cache_dir": str(tmp_path),
                "jax_persistent_cache_min_compile_time_secs": 0,
                "jax_persistent_cache_min_entry_size_bytes": -1}  # fmt: skip
    before = {name: getattr(jax.config, name) for name in settings}
    monkeypatch.setattr(answers, "_answers", BoundedCache(5))
    monkeypatch.setattr(answers, "_answer_file", lambda name: None)
    compilation_cache.reset_cache()
    for name, value in settings.items():
        jax.config.update(name, value)
    try:
        f = jax.jit(lambda x: jnp.sin(x @ x.T))
        f(jnp.ones(X.shape))
        assert list(tmp_path.iterdir())
        report = xform.memory_analysis(f, X)
        assert sum(row.bytes for row in report) == report.total_bytes > 0
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_closed_over_constants_count_against_the_capacity() -> None:
    w = jnp.arange(256.0 * 256).reshape(256, 256)
    report = xform.memory_analysis(
        lambda x: x @ w, jax.ShapeDtypeStruct((4, 256), jnp.float32), capacity="128 KiB"
    )
    assert report.constant_bytes >= w.nbytes
    assert report.total_bytes < 2**17
    assert not report.fits
    assert report.head_room_bytes == 2**17 - report.total_bytes - report.constant_bytes
    assert any("closes over" in text for text in report.advice)
    assert "in the program" in str(report)
