"""What is known of each backend's compiler, by which `liveness` simulates its memory.

Each fact of XLA:CPU has a test against that compiler's own buffer assignment
(`tests/planner/test_profiles.py`).
"""

from __future__ import annotations

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Profile:
    """One compiler.

    Attributes:
      name: of the backend.
      breadth_first: operations run as soon as their operands are there, whatever memory that takes;
        else in the order of the program, so far as memory goes.
      host_is_device: the host's memory is the device's: what is sent there stays where it is.
      light_ties: a tie marked light is nothing.
      selects_ties: a tie is a select for each value that it holds back.
      library: reductions of so many elements are library calls, which take in what is computed
        around them; 0: there is no such library.
      widens: products of numbers of 16 bits are run with 32, which are written; what makes such
        numbers is not repeated.
    """

    name: str
    breadth_first: bool = False
    host_is_device: bool = False
    light_ties: bool = False
    selects_ties: bool = False
    library: int = 0
    widens: bool = False


CPU = Profile(
    "cpu",
    breadth_first=True,
    host_is_device=True,
    light_ties=True,
    selects_ties=True,
    library=4096,
    widens=jax.__version_info__ < (0, 12),
)
GPU = Profile("gpu")
TPU = Profile("tpu")


def profile(backend: str) -> Profile:
    """The profile of a backend."""
    return {"cpu": CPU, "gpu": GPU, "tpu": TPU}[backend]
