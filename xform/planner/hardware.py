"""Data of TPUs and GPUs: memory, speed, and the facts XLA needs to compile for an absent GPU.

The planner takes a device's memory and speed from here. `TPUS` and `GPUS` are the devices that
xform can compile for although they are absent. Each number is for one device, as JAX counts
devices: one chip of a TPU v4, v5e, v5p or v6e; one of the two cores of a chip for a TPU7x. Speeds
are peaks of dense products, without structured sparsity.
"""

from __future__ import annotations

import dataclasses
import re

_GIB, _KIB = 2**30, 2**10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """A kind of device. A number is None if it is unknown.

    Attributes:
      name: display name.
      kind: text that JAX's `Device.device_kind` contains.
      capacity_bytes: memory that a program can use.
      recompute_bytes: memory above which XLA recomputes operations by itself, see `limit_bytes`;
        None if only `capacity_bytes` counts.
      flops_per_second: speed of matrix products in bfloat16.
      f32_flops_per_second: speed of matrix products in float32 at JAX's default precision: one
        bfloat16 pass on a TPU, TF32 on a GPU.
      bytes_per_second: memory bandwidth.
      host_bytes_per_second: bandwidth of the link to host memory, in one direction.
    """

    name: str
    kind: str = ""
    capacity_bytes: int | None = None
    recompute_bytes: int | None = None
    flops_per_second: float | None = None
    f32_flops_per_second: float | None = None
    bytes_per_second: float | None = None
    host_bytes_per_second: float | None = None

    def limit_bytes(self, io_bytes: int) -> int | None:
        """Return the size above which a program does not fit, or XLA recomputes a part of it.

        `io_bytes` are the bytes of its arguments and outputs; an output in the memory of a donated
        argument does not count. On a GPU, XLA recomputes operations if the temporary bytes exceed
        95% of the difference between `recompute_bytes` and `io_bytes`. The flag
        `xla_gpu_memory_limit_slop_factor` changes the 95%. None: the size is unknown.
        Source: XLA, xla/service/gpu/gpu_hlo_schedule.cc, `GetSchedulerMemoryLimit`.
        """
        if self.recompute_bytes is None:
            return self.capacity_bytes
        planned = io_bytes + max(0, self.recompute_bytes - io_bytes) * 95 // 100
        return planned if self.capacity_bytes is None else min(planned, self.capacity_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tpu(Hardware):
    """A TPU.

    Attributes:
      axes: number of axes of the chips' interconnect: 2 for a slice such as 4x4, 3 for 2x2x4.
      per_chip: number of devices on a chip.
      chip_config: the name of libtpu's configuration that makes the cores of a chip one device; ""
        if libtpu needs none.
    """

    axes: int
    per_chip: int = 1
    chip_config: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu(Hardware):
    """A GPU, with the facts that the XLA compiler needs.

    Attributes:
      capability: CUDA compute capability, major and minor.
      processors: number of streaming multiprocessors.
      clock_ghz: boost clock.
      l2_bytes: size of the second level cache.
    """

    capability: tuple[int, int]
    processors: int
    clock_ghz: float
    l2_bytes: int

    def target_config(self) -> str:
        """Return XLA's GpuTargetConfig, as protocol buffer text."""
        threads, float_units, shared_bytes = _CAPABILITIES[self.capability]
        major, minor = self.capability
        fields = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 48 * _KIB,
            "shared_memory_per_core": shared_bytes,
            "threads_per_core_limit": threads,
            "core_count": self.processors,
            "fpus_per_core": float_units,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 2**16 - 1,
            "block_dim_limit_z": 2**16 - 1,
            "memory_bandwidth": round(self.bytes_per_second or 0),
            "l2_cache_size": self.l2_bytes,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": self.capacity_bytes,
            "shared_memory_per_block_optin": shared_bytes - _KIB,
            "cuda_compute_capability": f"{{ major: {major} minor: {minor} }}",
            "registers_per_core_limit": 2**16,
            "registers_per_block_limit": 2**16,
        }
        lines = "".join(f"  {k}{'' if '{' in str(v) else ':'} {v}\n" for k, v in fields.items())
        return (
            f"gpu_device_info {{\n{lines}}}\n"
            'platform_name: "CUDA"\n'
            "dnn_version_info { major: 9 minor: 10 }\n"
            f'device_description_str: "{self.name}"\n'
        )


# For each compute capability: threads, float32 units and bytes of shared memory of one
# multiprocessor.
# Source: NVIDIA, CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
_CAPABILITIES = {
    (8, 0): (2048, 64, 164 * _KIB),
    (8, 9): (1536, 128, 100 * _KIB),
    (9, 0): (2048, 128, 228 * _KIB),
    (10, 0): (2048, 128, 228 * _KIB),
}


def _tpu(name: str, kind: str, gib: float, teraflops: float, gigabytes: float, axes: int,
         per_chip: int = 1, chip_config: str = "") -> Tpu:  # fmt: skip
    """Return a Tpu, from its memory in GiB, its teraFLOPs and its gigabytes per second."""
    flops = teraflops * 1e12
    return Tpu(name=name, kind=kind, capacity_bytes=round(gib * _GIB), flops_per_second=flops,
               f32_flops_per_second=flops, bytes_per_second=gigabytes * 1e9,
               host_bytes_per_second=16e9,
               axes=axes, per_chip=per_chip, chip_config=chip_config)  # fmt: skip


# Memory: the available memory that the compiler reports when a program is too large. Speeds: Google
# Cloud, "TPU versions", the page of each version; halved for TPU7x. Links to the host:
# https://jax-ml.github.io/scaling-book/tpus gives 16 GB/s for v4; later versions are not slower.
TPUS = {
    "v4": _tpu("TPU v4", "TPU v4", 30.75, 275, 1228, axes=3, chip_config="megacore"),
    "v5e": _tpu("TPU v5e", "TPU v5 lite", 15.75, 197, 819, axes=2),
    "v5p": _tpu("TPU v5p", "TPU v5", 95.74, 459, 2765, axes=3),
    "v6e": _tpu("TPU v6e", "TPU v6 lite", 31.25, 918, 1640, axes=2),
    "tpu7x": _tpu("TPU7x", "TPU7x", 94.75, 2307 / 2, 7380 / 2, axes=3, per_chip=2),
}


def _gpu(name: str, kind: str, gib: float, bf16: float, tf32: float, gigabytes: float,
         capability: tuple[int, int], processors: int, clock: float,
         l2_mib: int) -> Gpu:  # fmt: skip
    """Return a Gpu, from its memory in GiB, its teraFLOPs and its gigabytes per second."""
    memory = round(gib * _GIB)
    return Gpu(name=name, kind=kind, capacity_bytes=memory, recompute_bytes=memory * 80 // 100,
               flops_per_second=bf16 * 1e12,
               f32_flops_per_second=tf32 * 1e12, bytes_per_second=gigabytes * 1e9,
               host_bytes_per_second=_PCI_EXPRESS[5 if capability >= (9, 0) else 4],
               capability=capability, processors=processors, clock_ghz=clock,
               l2_bytes=l2_mib * 2**20)  # fmt: skip


# Bytes per second of PCI Express with 16 lanes, by generation: four fifths of the peak in one
# direction (15.8, 31.5 and 63 GB/s).
_PCI_EXPRESS = {3: 12e9, 4: 25e9, 5: 50e9}

# Memory: the total that CUDA reports, which is less than the nominal size. JAX uses only 0.75 of it
# unless XLA_PYTHON_CLIENT_MEM_FRACTION is set. All other numbers: NVIDIA's data sheet of each GPU
# (the SXM module if there is one). Speeds that a data sheet states for sparse matrices are halved.
GPUS = {
    "a100-40": _gpu("NVIDIA A100 40GB", "A100", 39.39, 312, 156, 1555, (8, 0), 108, 1.41, 40),
    "a100-80": _gpu("NVIDIA A100 80GB", "A100", 79.15, 312, 156, 2039, (8, 0), 108, 1.41, 40),
    "h100": _gpu("NVIDIA H100 80GB", "H100", 79.11, 989.4, 494.7, 3352, (9, 0), 132, 1.98, 50),
    "h200": _gpu("NVIDIA H200", "H200", 139.81, 989.4, 494.7, 4800, (9, 0), 132, 1.98, 50),
    "b200": _gpu("NVIDIA B200", "B200", 178.35, 2250, 1125, 8000, (10, 0), 148, 1.965, 126),
    "l4": _gpu("NVIDIA L4", "L4", 22.03, 121, 60, 300, (8, 9), 58, 2.04, 48),
    "rtx4090": _gpu("NVIDIA RTX 4090", "RTX 4090", 23.64, 165.2, 82.6, 1008, (8, 9), 128, 2.52, 72),
}

# Devices that xform cannot compile for if they are absent. Their plans are made on the device.
_OTHERS = (
    Hardware(
        name="NVIDIA V100",
        kind="V100",
        flops_per_second=125e12,
        bytes_per_second=900e9,
        host_bytes_per_second=_PCI_EXPRESS[3],
    ),
)


def find_hardware(kind: str) -> Hardware | None:
    """Return the Hardware with this `device_kind` of JAX, or with this name; None if unknown.

    Some GPUs come in two memory sizes under one `device_kind`. The result is the smaller one, so
    ask the actual device for its memory.

    >>> from xform.planner.hardware import find_hardware
    >>> find_hardware("TPU v5 lite").name
    'TPU v5e'
    >>> find_hardware("NVIDIA H100 80GB HBM3").name
    'NVIDIA H100 80GB'
    """
    known = (*TPUS.values(), *GPUS.values(), *_OTHERS)
    by_name = (d for d in known if d.name == kind)
    by_kind = (d for d in known if re.search(rf"\b{d.kind}\b", kind))
    return next(by_name, None) or next(by_kind, None)
