"""Facts about the XLA compiler of each backend (CPU, GPU, TPU), as data: a `Profile`.

The planner predicts the memory of a program without compiling it (`liveness.py`). These facts say
how the compiler of a backend fuses, orders and stores operations. Some fields are not facts for the
simulation but defaults of the policy `xform.policies.MinCut` on that backend.

Tests compare each fact with the compiler's own buffer assignment. They are in
`tests/planner/simulate`: `test_profiles.py` for XLA:CPU, `test_chips.py` for GPUs and TPUs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax

from xform.interpret.cost import aval_bytes
from xform.program.dimensions import numbers


@dataclasses.dataclass(frozen=True)
class Profile:
    """Facts about the compiler of one backend.

    Attributes:
      name: name of the backend: "cpu", "gpu" or "tpu".
      breadth_first: operations run as soon as their operands are available, even if another order
        takes less memory. If False, the compiler tries several orders, and uses the one that takes
        the least memory.
      host_is_device: the memory of the host is the memory of the device, so offloading moves
        nothing.
      repeats: if an operation can be fused, the compiler repeats it in each of its readers. So it
        does not merge recomputed operations with the forward pass, even without an optimization
        barrier. The simulation keeps all barriers of the program, even those that do nothing on
        this backend.
      selects_barriers: a barrier is compiled to one select for each value that it delays.
      keeps_regions: the compiler does not merge what a remat region of `jax.checkpoint` recomputes
        with the forward pass.
      library_elements: reductions of at least this many elements run in a library (YNNPACK on a
        CPU). One library call includes the operations around the reduction. 0: there is no such
        library.
      library_sines: the library has sines, cosines and tangents.
      widens_products: products of 16-bit floats are computed with 32-bit floats, which are written
        to memory. Operations that make 16-bit floats are not repeated in several readers.
      kernel_bytes: the time to start a kernel, as the bytes that the memory could move in that
        time. If it is not 0, an operation is fused into all of its readers or into none, whichever
        takes less time. 0: an operation may be fused into some readers and also be written for
        others.
      merge_bytes: products that share an operand and take at most this many bytes, operands
        included, run as one product, and their results are slices of it. 0: products are never
        merged.
      processors: number of processors that a product should keep busy. A product with few rows and
        columns is split into parts, which are written to memory and added up. 0: products are
        never split.
      on_chip_bytes: bytes of the fast memory on the chip (VMEM on a TPU). Values in it take no
        device memory. 0: values are not kept there.
      margin: the share of a budget that the planner keeps free, if possible, when no compiler
        checks the simulated peak. The margin allows for the error of the simulation, which was
        measured in `experiments/planner` (budgets by simulation alone).
      doubt: the share by which saving everything must lower the simulated peak of a minimum cut, to
        be preferred. It is 0 on a CPU, where recomputed operations cost the most time.
      lowers: xform lowers some operations to several simpler ones (`Traits.lowered`) on this
        backend. The simulation then uses the simpler operations.
      tiles: arrays are padded to tiles of 8 rows and 128 columns.
      fused_save_price: the default for `MinCut.fused_save_price`: extra price of saving a value
        that would otherwise be fused. If such a value is saved, it takes memory in addition to the
        product that it is computed from.
      rounds_operands: the default for `MinCut.rounds_operands`: 32-bit operands of products are
        rounded to 16 bits right after they are computed.
      slow_price: the default for `MinCut.slow_price`: an extra price of recomputing a slow function
        such as `exp`, for each byte of its result. On a CPU, computing the function takes longer
        than reading a saved result.
    """

    name: str
    breadth_first: bool = False
    host_is_device: bool = False
    repeats: bool = False
    selects_barriers: bool = False
    keeps_regions: bool = True
    library_elements: int = 0
    library_sines: bool = False
    widens_products: bool = False
    kernel_bytes: int = 0
    merge_bytes: int = 0
    processors: int = 0
    on_chip_bytes: int = 0
    margin: float = 0.05
    doubt: float = 0.05
    lowers: bool = True
    tiles: bool = False
    fused_save_price: float = 0.0
    rounds_operands: bool = False
    slow_price: float = 0.0

    def bytes(self, aval: object) -> int:
        """Return the bytes of a value of the type `aval` in memory, padding included."""
        size, dims = aval_bytes(aval), numbers(getattr(aval, "shape", ()))
        return size * tiled_elements(dims) // max(1, math.prod(dims)) if self.tiles else size

    def table_bytes(self, n: int) -> int:
        """Return the bytes of the table of pointers to `n` results; a single result needs none."""
        if n == 1:
            return 0
        return 4 * _round_up(n, 128) if self.tiles else 8 * n


def tiled_elements(dims: tuple[int, ...]) -> int:
    """Return the number of elements of an array, padded to tiles of 8 rows and 128 columns.

    An array of fewer rows has tiles of 1, 2 or 4 rows. The compiler chooses the two axes that are
    rows and columns of the tiles, so that the array takes the fewest elements.
    """
    if len(dims) < 2 or 0 in dims:
        return _round_up(math.prod(dims), 128)
    other_axes = lambda a, b: math.prod(dims) // (dims[a] * dims[b])
    padded_rows = lambda n: _round_up(n, min(8, 2 ** (n - 1).bit_length()))
    axis_pairs = itertools.permutations(range(len(dims)), 2)
    return min(
        other_axes(a, b) * padded_rows(dims[a]) * _round_up(dims[b], 128) for a, b in axis_pairs
    )


def _round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple


CPU = Profile(
    "cpu",
    breadth_first=True,
    host_is_device=True,
    selects_barriers=True,
    keeps_regions=jax.__version_info__ >= (0, 12),
    library_elements=4096,
    library_sines=jax.__version_info__ >= (0, 12),
    widens_products=jax.__version_info__ < (0, 12),
    margin=0.01,
    doubt=0.0,
    slow_price=1 / 4,
)
# Measured for an H100, on which a kernel starts in a microsecond. Other GPUs use the same numbers.
GPU = Profile("gpu", kernel_bytes=3_350_000, merge_bytes=32 * 2**20, processors=132)
# For a TPU v5e. Its compiler uses 112 of the 128 MiB of VMEM for values. Fusion is simulated as on
# a GPU.
TPU = Profile(
    "tpu",
    repeats=True,
    kernel_bytes=819_000,
    on_chip_bytes=112 * 2**20,
    lowers=False,
    tiles=True,
    fused_save_price=1 / 128,
    rounds_operands=True,
)


def backend_profile(backend: str) -> Profile:
    """Return the profile of a backend: "cpu", "gpu" or "tpu"."""
    return {"cpu": CPU, "gpu": GPU, "tpu": TPU}[backend]
