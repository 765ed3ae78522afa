"""Targets by name, and the errors for unknown names and missing packages."""

import importlib.util

import jax
import pytest

from xform import errors
from xform.memory import targets
from xform.memory.targets import check_installed, missing, names, parse_target

ALL = (
    "cpu, cpu:N, tpu:v4:1x1x1, tpu:v5e:1x1, tpu:v5p:1x1x1, tpu:v6e:1x1, tpu:tpu7x:1x1x1, "
    "gpu:a100-40, gpu:a100-80, gpu:h100, gpu:h200, gpu:b200, gpu:l4, gpu:rtx4090, gpu:NAME:N"
)


@pytest.mark.parametrize(
    ("name", "platform", "backend", "device", "count"),
    [
        ("cpu:8", "cpu", "cpu", "CPU", 8),
        ("tpu:v5e:1x1", "tpu", "tpu", "TPU v5e", 1),
        ("tpu:v4:2x2x1", "tpu", "tpu", "TPU v4", 4),
        ("tpu:v5p:2x2x1", "tpu", "tpu", "TPU v5p", 4),
        ("tpu:v6e:2x2", "tpu", "tpu", "TPU v6e", 4),
        ("tpu:tpu7x:2x2x1", "tpu", "tpu", "TPU7x", 8),
        ("tpu:v5e:16x16", "tpu", "tpu", "TPU v5e", 256),
        ("gpu:h100", "cuda", "gpu", "NVIDIA H100 80GB", 1),
        ("gpu:a100-40:8", "cuda", "gpu", "NVIDIA A100 40GB", 8),
        ("gpu:l4:16", "cuda", "gpu", "NVIDIA L4", 16),
    ],
)
def test_names(name: str, platform: str, backend: str, device: str, count: int) -> None:
    target = parse_target(name)
    assert (target.name, target.platform, target.backend) == (name, platform, backend)
    assert (target.device.name, target.count, target.local) == (device, count, False)


def test_tpu_and_gpu_targets_give_topology_arguments() -> None:
    one = {"topology_name": "v5e:1x1", "chips_per_host_bounds": [1, 1, 1]}
    assert parse_target("tpu:v5e:1x1").topology == one
    assert parse_target("tpu:v5e:2x2").topology == {"topology_name": "v5e:2x2"}
    assert parse_target("tpu:v4:2x2x1").topology["chip_config_name"] == "megacore"
    assert parse_target("gpu:h100:4").topology["topology"] == "1x1x4"
    assert parse_target("gpu:h100:16").topology["topology"] == "1x2x8"


def test_the_default_is_the_process_s_own_backend() -> None:
    for name in (None, "cpu"):
        target = parse_target(name)
        assert target.local
        assert target.backend == jax.default_backend() == "cpu"
        assert not missing(target)


def test_every_name_that_is_listed_is_one() -> None:
    assert all(not parse_target(name).local for name in names())


@pytest.mark.parametrize(
    ("name", "similar"),
    [
        ("", ""),
        ("abacus", ""),
        ("tpu:v5", "tpu:v5e:1x1"),
        ("tpu:v9", ""),
        ("gpu:h1000", "gpu:h100"),
        ("h100", "gpu:h100"),
        ("gpu:h100:8:8", "gpu:h100"),
        ("cpu:0", ""),
        ("cpu:x", ""),
    ],
)
def test_an_unknown_target(name: str, similar: str) -> None:
    with pytest.raises(errors.WrongArgument) as caught:
        parse_target(name)
    meant = f"; did you mean {similar}?" if similar else ""
    assert str(caught.value) == (
        f"target={name!r}\n  problem: there is no such target{meant}\n"
        f"  remedy:  give one of {ALL}, or None for JAX's default"
    )


def test_a_backend_that_is_not_here() -> None:
    with pytest.raises(errors.WrongArgument) as caught:
        parse_target("tpu")
    assert str(caught.value) == (
        "target='tpu'\n  problem: JAX has no tpu here\n"
        f"  remedy:  give one of {ALL}, or None for JAX's default"
    )


@pytest.mark.parametrize("slice_", ["3x3", "2x2x1", "0x2", "02x2", "two", "1x4", ""])
def test_an_unknown_slice(slice_: str) -> None:
    with pytest.raises(errors.WrongArgument) as caught:
        parse_target(f"tpu:v5e:{slice_}")
    assert str(caught.value) == (
        f"target='tpu:v5e:{slice_}'\n"
        f"  problem: {slice_!r} is not a slice of TPU v5e: a slice has 2 axes, and is one chip or "
        "consists of hosts of 2x2 chips\n"
        "  remedy:  give a slice such as 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"
    )


def test_an_axis_of_no_chips() -> None:
    with pytest.raises(errors.WrongArgument, match="'2x2x0' is not a slice of TPU v4"):
        parse_target("tpu:v4:2x2x0")


def test_more_devices_than_a_cpu_is_taken_for() -> None:
    assert parse_target("cpu:4096").count == 4096
    with pytest.raises(errors.WrongArgument) as caught:
        parse_target("cpu:99999999999")
    assert str(caught.value) == (
        "target='cpu:99999999999'\n  problem: a CPU target has at most 4096 devices\n"
        "  remedy:  give a number from 1 to 4096"
    )


@pytest.mark.parametrize("count", ["0", "9", "-1", "many"])
def test_an_unknown_number_of_gpus(count: str) -> None:
    with pytest.raises(errors.WrongArgument) as caught:
        parse_target(f"gpu:h100:{count}")
    assert str(caught.value) == (
        f"target='gpu:h100:{count}'\n"
        f"  problem: {count!r} is not a possible number of GPUs on hosts of 8\n"
        "  remedy:  give a number from 1 to 8, or a multiple of 8"
    )


@pytest.mark.parametrize(
    ("name", "absent", "install"),
    [
        ("tpu:v5e:1x1", "flatbuffers, libtpu are", "'jax-xform[tpu]'"),
        (
            "gpu:h100",
            "flatbuffers, jax-cuda12-pjrt, jax-cuda12-plugin, nvidia-cuda-nvcc-cu12 are",
            "'jax-xform[gpu-aot]'",
        ),
        ("cpu:2", "flatbuffers is", "flatbuffers"),
    ],
)
def test_missing_packages(
    name: str, absent: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_spec(module: str) -> None:
        if "." in module:
            raise ModuleNotFoundError(module)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(targets.shutil, "which", lambda name: None)
    with pytest.raises(errors.MissingExtra) as caught:
        check_installed(parse_target(name))
    assert str(caught.value) == (
        f"target={name!r}\n  problem: {absent} not installed\n  remedy:  pip install {install}"
    )


def test_a_ptxas_of_the_machine_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    monkeypatch.setattr(targets.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert "nvidia-cuda-nvcc-cu12" not in missing(parse_target("gpu:h100"))


@pytest.mark.parametrize(
    ("name", "whole"),
    [("tpu:v5p", "tpu:v5p:1x1x1"), ("tpu:v5e", "tpu:v5e:1x1"), ("tpu:tpu7x", "tpu:tpu7x:1x1x1")],
)
def test_a_tpu_without_a_slice_is_one_chip_and_says_so(name: str, whole: str) -> None:
    assert parse_target(name) == parse_target(whole)
    assert parse_target(name).name == whole
