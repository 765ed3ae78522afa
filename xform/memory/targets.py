"""Targets: the devices that a program is compiled for, by name, such as "tpu:v5e:2x2".

The devices of a target belong to this process, or need not be attached at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.util
import math
import re
import shutil
from collections.abc import Generator, Iterator
from typing import Any

import jax

from xform.errors import MissingExtra, WrongArgument
from xform.introspection.packages import pip_argument
from xform.memory.cudnn import naming_cudnn
from xform.planner.device import planning_for
from xform.planner.hardware import GPUS, TPUS, Gpu, Hardware, Tpu, find_hardware

# TPU slices that messages suggest, by the number of axes of the interconnect.
_SLICES = {2: "1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16", 3: "1x1x1, 2x2x1, 2x2x2, 2x2x4, 4x4x4"}
# The most CPU devices. Each takes threads and memory in the process that compiles.
_MOST_CPUS = 4096
_GPUS_PER_HOST = 8
# An option for one chip. Without it, libtpu assumes that the chip is one of several on a host.
_ONE_CHIP_OPTION = {"chips_per_host_bounds": [1, 1, 1]}

# The argument of `pip install` for each platform.
_INSTALL = {"tpu": pip_argument("tpu"), "cuda": pip_argument("gpu-aot"), "cpu": "flatbuffers"}


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices to compile for.

    Attributes:
      name: as the user wrote it, or the name of JAX's default backend.
      platform: the platform that JAX lowers for: "cpu", "tpu" or "cuda".
      device: the properties of each device.
      count: the number of devices; None for devices of this process.
      topology: arguments of `jax.experimental.topologies.get_topology_desc`.
    """

    name: str
    platform: str
    device: Hardware
    count: int | None = None
    topology: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any], hash=False)

    def for_file(self) -> Target:
        """Return the target without the facts that only its compiler needs."""
        names = [f.name for f in dataclasses.fields(Hardware)]
        device = Hardware(**{name: getattr(self.device, name) for name in names})
        return dataclasses.replace(self, device=device, topology={})

    @property
    def backend(self) -> str:
        """JAX's name of the backend: "cpu", "tpu" or "gpu"."""
        return "gpu" if self.platform == "cuda" else self.platform

    @property
    def absent(self) -> str | None:
        """The name of the device if it need not be attached; None for a device of this process."""
        return None if self.local else self.device.name

    @contextlib.contextmanager
    def planned_for(self) -> Generator[None]:
        """A context for traces: they are planned for this target.

        Raises:
          MissingExtra: a trace for an absent GPU needs cuDNN, which is not installed.
        """
        is_absent_gpu = self.absent is not None and self.platform == "cuda"
        cudnn = naming_cudnn(self.name) if is_absent_gpu else contextlib.nullcontext()
        with planning_for(self.backend, self.absent, self.name), cudnn:
            yield

    @property
    def local(self) -> bool:
        """Whether the devices belong to this process."""
        return self.count is None


def parse_target(name: str | None) -> Target:
    """Return the target with this name; None is JAX's default backend.

    The names are `cpu`, `cpu:8` (eight devices), `tpu:v5e:2x2` (a slice), `gpu:h100` and
    `gpu:h100:8` (eight devices). `tpu:v5p` is one chip: its full name is `tpu:v5p:1x1x1`.

    Raises:
      WrongArgument: the name is not a target, or JAX does not have this backend here.

    >>> from xform.memory.targets import parse_target
    >>> target = parse_target("tpu:v5e:4x4")
    >>> target.count, target.device.capacity_bytes / 2**30
    (16, 15.75)
    """
    if name is None:
        return _backend_target(jax.default_backend())
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _unknown(name, "it is not the name of a target")
    kind, *rest = name.split(":")
    if name in ("cpu", "gpu", "tpu"):
        return _backend_target(name)
    if kind == "cpu" and len(rest) == 1 and _is_count(rest[0]):
        return _cpu(name, int(rest[0]))
    if kind == "tpu" and len(rest) == 2 and rest[0] in TPUS:
        return _tpu(name, TPUS[rest[0]], rest[1])
    if kind == "tpu" and len(rest) == 1 and rest[0] in TPUS:
        device = TPUS[rest[0]]
        return _tpu(f"{name}:{_one_chip_slice(device)}", device, _one_chip_slice(device))
    if kind == "gpu" and 1 <= len(rest) <= 2 and rest[0] in GPUS:
        return _gpu(name, GPUS[rest[0]], rest[1] if len(rest) == 2 else "1")
    close = difflib.get_close_matches(name, [*names()], 1, cutoff=0.65)
    raise _unknown(name, "there is no such target" + "".join(f"; did you mean {x}?" for x in close))


def _backend_target(backend: str) -> Target:
    """Return the target for a backend of this process."""
    try:
        device = jax.local_devices(backend=backend)[0]
    except RuntimeError as error:
        raise _unknown(backend, f"JAX has no {backend} here") from error
    stats = device.memory_stats() or {}
    hardware = dataclasses.replace(
        find_hardware(device.device_kind) or Hardware(name=""),
        name=device.device_kind,
        capacity_bytes=stats.get("bytes_limit"),
    )
    return Target(backend, {"gpu": "cuda"}.get(backend, backend), hardware)


def _cpu(name: str, count: int) -> Target:
    """Return a target of `count` CPU devices, or raise `WrongArgument`."""
    if count > _MOST_CPUS:
        raise WrongArgument(
            f"target={name!r}",
            f"a CPU target has at most {_MOST_CPUS} devices",
            "",
            f"give a number from 1 to {_MOST_CPUS}",
        )
    return Target(name, "cpu", Hardware(name="CPU"), count)


def _tpu(name: str, device: Tpu, slice_: str) -> Target:
    """Return the target of a TPU slice such as "2x2", or raise `WrongArgument`."""
    axes = slice_.split("x")
    sizes = [int(n) for n in axes] if all(map(_is_count, axes)) else []
    is_one_chip = set(sizes) == {1}
    if len(sizes) != device.axes or not (is_one_chip or all(n % 2 == 0 for n in sizes[:2])):
        raise WrongArgument(
            f"target={name!r}",
            f"{slice_!r} is not a slice of {device.name}: a slice has {device.axes} axes, and is "
            "one chip or consists of hosts of 2x2 chips",
            "",
            f"give a slice such as {_SLICES[device.axes]}",
        )
    options: dict[str, Any] = {"topology_name": name.removeprefix("tpu:")}
    options |= _ONE_CHIP_OPTION if is_one_chip else {}
    options |= {"chip_config_name": device.chip_config} if device.chip_config else {}
    return Target(name, "tpu", device, math.prod(sizes) * device.per_chip, options)


def _gpu(name: str, device: Gpu, count: str) -> Target:
    """Return a target of `count` GPUs, or raise `WrongArgument`."""
    n = int(count) if _is_count(count) else 0
    if not n or (n > _GPUS_PER_HOST and n % _GPUS_PER_HOST):
        raise WrongArgument(
            f"target={name!r}",
            f"{count!r} is not a possible number of GPUs on hosts of {_GPUS_PER_HOST}",
            "",
            f"give a number from 1 to {_GPUS_PER_HOST}, or a multiple of {_GPUS_PER_HOST}",
        )
    hosts, per_host = (1, n) if n <= _GPUS_PER_HOST else (n // _GPUS_PER_HOST, _GPUS_PER_HOST)
    options = {"target_config": device.target_config(), "topology": f"1x{hosts}x{per_host}"}
    return Target(name, "cuda", device, n, options)


def _is_count(text: str) -> bool:
    """Return whether a text is a positive whole number."""
    return re.fullmatch(r"[1-9]\d*", text) is not None


def _unknown(name: object, problem: str) -> WrongArgument:
    """Return the error for a name that is no target."""
    return WrongArgument(
        f"target={name!r}",
        problem,
        "",
        f"give one of cpu, cpu:N, {', '.join(names())}, gpu:NAME:N, or None for JAX's default",
    )


def names() -> Iterator[str]:
    """Yield the names of the targets that need no attached device, the smallest of each kind."""
    for generation, tpu in TPUS.items():
        yield f"tpu:{generation}:{_one_chip_slice(tpu)}"
    yield from (f"gpu:{name}" for name in GPUS)


def _one_chip_slice(device: Tpu) -> str:
    """Return the slice that is one chip, such as "1x1"."""
    return "x".join("1" * device.axes)


def missing(target: Target) -> list[str]:
    """Return the packages that are needed to compile for a target and are not installed."""
    if target.local:
        return []
    installed = {"flatbuffers": _can_import("flatbuffers")}
    if target.platform == "tpu":
        installed["libtpu"] = _can_import("libtpu")
    if target.platform == "cuda":
        has_ptxas = _can_import("nvidia.cuda_nvcc") or bool(shutil.which("ptxas"))
        installed |= {
            "jax-cuda12-plugin": _can_import("jax_cuda12_plugin", "jax_cuda13_plugin"),
            "jax-cuda12-pjrt": _can_import("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"),
            "nvidia-cuda-nvcc-cu12": has_ptxas,
        }
    return sorted(package for package, found in installed.items() if not found)


def install(target: Target) -> str:
    """Return the argument of `pip install` that installs everything for a target."""
    return _INSTALL[target.platform]


def check_installed(target: Target) -> None:
    """Raise `MissingExtra` if a package that is needed to compile for the target is missing."""
    if absent := missing(target):
        raise MissingExtra(
            f"target={target.name!r}",
            f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed",
            "",
            f"pip install {install(target)}",
        )


def _can_import(*modules: str) -> bool:
    """Return whether one of these modules could be imported."""

    def exists(module: str) -> bool:
        try:
            return importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            return False

    return any(map(exists, modules))
