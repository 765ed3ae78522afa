"""Several processes on one machine: the port on which they meet, and the devices of each."""

import os
import socket
from pathlib import Path

ROOT = Path(__file__).parent.parent


def free_port() -> int:
    """A port of this machine that no process listens on."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def cpu_environment(devices: int) -> dict[str, str]:
    """The environment of a process that imports this checkout and has so many CPU devices."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
