"""The facts about devices."""

import dataclasses
import re

import pytest

from xform.planner.hardware import GPUS, TPUS, find_hardware


@pytest.mark.parametrize("name", [*TPUS, *GPUS])
def test_numbers_are_of_the_right_size(name: str) -> None:
    device = {**TPUS, **GPUS}[name]
    assert 15 * 2**30 < device.capacity_bytes < 200 * 2**30
    assert 1e14 < device.flops_per_second < 3e15
    assert device.flops_per_second / 4 < device.f32_flops_per_second <= device.flops_per_second
    assert 2e11 < device.bytes_per_second < 1e13


def test_a_target_config_is_protocol_buffer_text() -> None:
    text = GPUS["h100"].target_config()
    assert text.startswith("gpu_device_info {\n  threads_per_block_limit: 1024\n")
    assert "  shared_memory_per_core: 233472\n" in text
    assert "  shared_memory_per_block_optin: 232448\n" in text
    assert "  memory_bandwidth: 3352000000000\n" in text
    assert "  cuda_compute_capability { major: 9 minor: 0 }\n" in text
    assert text.count("{") == text.count("}")
    assert not re.search(r": *(None)?$", text, re.MULTILINE)


@pytest.mark.parametrize(("kind", "name"), {
    "TPU v5 lite": "TPU v5e", "TPU v5": "TPU v5p", "TPU v6 lite": "TPU v6e", "TPU7x": "TPU7x",
    "NVIDIA A100-SXM4-80GB": "NVIDIA A100 40GB", "NVIDIA A100 80GB": "NVIDIA A100 80GB",
    "NVIDIA GeForce RTX 4090": "NVIDIA RTX 4090", "Tesla V100-SXM2-16GB": "NVIDIA V100",
}.items())  # fmt: skip
def test_find_hardware_by_jax_device_kind(kind: str, name: str) -> None:
    assert find_hardware(kind).name == name


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA L40S", "", "TPU v9"])
def test_another_device_is_not_known(kind: str) -> None:
    assert find_hardware(kind) is None


def test_a_program_on_a_gpu_is_limited_by_what_xla_plans_for() -> None:
    """By the compiler of an H100, a program of 60.1 GiB is as planned, and one of 60.5 is not."""
    gib = 2**30
    h100 = GPUS["h100"]
    assert h100.limit_bytes(0) / gib == pytest.approx(0.95 * 0.8 * 79.11)
    assert h100.limit_bytes(4 * gib) / gib == pytest.approx(4 + 0.95 * (0.8 * 79.11 - 4))
    assert h100.limit_bytes(70 * gib) == 70 * gib
    assert dataclasses.replace(h100, capacity_bytes=gib).limit_bytes(0) == gib
    assert dataclasses.replace(h100, capacity_bytes=None).limit_bytes(gib) > 60 * gib
    assert TPUS["v5e"].limit_bytes(gib) == TPUS["v5e"].capacity_bytes
