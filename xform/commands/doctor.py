"""`python -m xform doctor`: list the installed packages, and the targets that work."""

from __future__ import annotations

import argparse
import json
import os
import platform
from typing import Any

import jax

from xform.introspection import packages
from xform.memory.compilation import compile_for
from xform.memory.targets import install, missing, names, parse_target
from xform.terminal.text import columns, human_bytes

_PACKAGES = (
    "jax", "jaxlib", "numpy", "scipy", "flax", "optax", "matplotlib", "rich", "libtpu",
    "jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12", "flatbuffers",
)  # fmt: skip


def run(args: argparse.Namespace) -> str:
    """List the installed packages, the targets that work here, and what other targets need."""
    known = {packages.DISTRIBUTION: packages.own_version()}
    known |= {name: packages.version(name) for name in _PACKAGES}
    targets = [_target(name, args.compile) for name in ("cpu", "cpu:2", *names())]
    backend = f"{jax.default_backend()}, {len(jax.devices())} x {jax.devices()[0].device_kind}"
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if args.json:
        return json.dumps({"python": python, "backend": backend, "packages": known,
                           "targets": targets}, indent=1)  # fmt: skip
    table = [["target", "device", "memory", ""]]
    table += [[t["name"], t["device"], t["memory"], t["state"]] for t in targets]
    versions = [["python", python], ["backend", backend]]
    versions += [[k, v or "not installed"] for k, v in known.items()]
    return "\n\n".join(filter(None, (columns(versions), columns(table), _quieter())))


def _quieter() -> str:
    """Return advice if JAX reports at each start that a plugin found no device; else ""."""
    plugins = [name for name in ("libtpu", "jax-cuda12-plugin") if packages.version(name)]
    if not plugins or jax.default_backend() != "cpu" or os.environ.get("JAX_PLATFORMS"):
        return ""
    return (
        f"{' and '.join(plugins)} found no device here. JAX prints errors about that when it "
        "starts;\nset JAX_PLATFORMS=cpu in your shell to avoid them. This setting does not affect "
        "the targets that xform can compile for."
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    about = "compile a small function for each installed target"
    parser.add_argument("--compile", action="store_true", help=about)
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def _target(name: str, compiles: bool) -> dict[str, Any]:
    """Return the row of a target: its name, device, memory and state.

    With `compiles`, an installed target must compile a small function to be called working.
    """
    target = parse_target(name)
    absent = missing(target)
    state = "installed"
    if absent:
        state = f"pip install {install(target)}  (lacks {', '.join(absent)})"
    elif compiles:
        x = jax.ShapeDtypeStruct((128, 128), "float32")
        compilation = compile_for(lambda x: x @ x, [x], target=target)
        state = f"works: compiled in {compilation.compile_seconds:.1f} s"
    memory = human_bytes(target.device.capacity_bytes) if target.device.capacity_bytes else ""
    return {"name": name, "device": target.device.name, "memory": memory, "state": state}
