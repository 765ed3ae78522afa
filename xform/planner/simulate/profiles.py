"""Facts about each backend's compiler. `liveness` uses them to simulate its memory.

Tests compare each fact with the compiler's own buffer assignment. They are in
`tests/planner/simulate`: `test_profiles.py` for XLA:CPU, `test_chips.py` for GPUs and TPUs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax

from xform.interpret.cost import aval_bytes


@dataclasses.dataclass(frozen=True)
class Profile:
    """Facts about the compiler of one backend.

    Attributes:
      name: of the backend.
      breadth_first: operations run as soon as their operands are available, whatever memory that
        takes. Otherwise the compiler tries several orders, and uses the one of least memory.
      host_is_device: the memory of the host is the memory of the device, so offloading moves
        nothing.
      repeats: the compiler repeats recomputed operations that fuse in each of their readers, and
        does not merge them with the forward pass. They behave as if they had a barrier, even if
        the program has none on this backend.
      selects_barriers: a barrier is compiled to one select for each value that it delays.
      library_elements: reductions of at least this many elements become library calls. A call
        includes the operations around the reduction. 0: there is no such library.
      library_sines: the library has sines, cosines and tangents.
      widens_products: products of 16-bit floats are computed with 32-bit floats, which are written
        to memory. Operations that make 16-bit floats are not repeated in several readers.
      kernel_bytes: bytes that the memory moves while a kernel starts. An operation is fused into
        all of its readers or into none, whichever takes less time. 0: an operation may be fused
        into some readers and also be written for others.
      merge_bytes: products that share an operand and take at most this many bytes, operands
        included, run as one product, and their results are slices of it. 0: products are never
        merged.
      processors: number of processors that a product should keep busy. A product with few rows and
        columns is split into parts, which are written to memory and added up. 0: products are
        never split.
      on_chip_bytes: bytes of a memory beside the processor. Values in it take no device memory.
      margin: the share of a budget that is kept free, if possible, when the simulation alone
        decides, because it does not simulate everything. Source: `experiments/planner`, the budgets
        by simulation alone.
      lowers: the compiler is given the program of `Traits.lowered` in place of an operation.
      tiles: arrays are padded to tiles of 8 rows and 128 columns.
      fused_save_price: the default for `MinCut.fused_save_price`: extra price of saving a value
        that would otherwise be fused. Such a value takes memory beside the product that it is
        computed from.
      rounds_operands: the default for `MinCut.rounds_operands`: 32-bit operands of products are
        rounded to 16 bits right after they are computed.
      slow_price: the default for `MinCut.slow_price`. On a CPU, `exp` takes longer than to read
        its result.
    """

    name: str
    breadth_first: bool = False
    host_is_device: bool = False
    repeats: bool = False
    selects_barriers: bool = False
    library_elements: int = 0
    library_sines: bool = False
    widens_products: bool = False
    kernel_bytes: int = 0
    merge_bytes: int = 0
    processors: int = 0
    on_chip_bytes: int = 0
    margin: float = 0.05
    lowers: bool = True
    tiles: bool = False
    fused_save_price: float = 0.0
    rounds_operands: bool = False
    slow_price: float = 0.0

    def bytes(self, aval: object) -> int:
        """Return the bytes of a value in memory."""
        size, dims = aval_bytes(aval), getattr(aval, "shape", ())
        return size * tiled_elements(dims) // max(1, math.prod(dims)) if self.tiles else size

    def table_bytes(self, n: int) -> int:
        """Return the bytes of the table of pointers to `n` results; a single one needs none."""
        if n == 1:
            return 0
        return 4 * _up(n, 128) if self.tiles else 8 * n


def tiled_elements(dims: tuple[int, ...]) -> int:
    """Return the elements of an array, padded to tiles of 8 rows and 128 columns.

    An array of fewer rows has tiles of 1, 2 or 4 rows. The compiler chooses the two axes that make
    the tiles, so that the array takes the fewest elements.
    """
    if len(dims) < 2 or 0 in dims:
        return _up(math.prod(dims), 128)
    rest = lambda a, b: math.prod(dims) // (dims[a] * dims[b])
    rows = lambda n: _up(n, min(8, 2 ** (n - 1).bit_length()))
    ways = itertools.permutations(range(len(dims)), 2)
    return min(rest(a, b) * rows(dims[a]) * _up(dims[b], 128) for a, b in ways)


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


CPU = Profile(
    "cpu",
    breadth_first=True,
    host_is_device=True,
    selects_barriers=True,
    library_elements=4096,
    library_sines=jax.__version_info__ >= (0, 12),
    widens_products=jax.__version_info__ < (0, 12),
    margin=0.01,
    slow_price=1 / 4,
)
# For an H100, on which a kernel starts in a microsecond. Other GPUs are assumed to be alike.
GPU = Profile("gpu", kernel_bytes=3_350_000, merge_bytes=32 * 2**20, processors=132)
# For a TPU v5e, whose compiler leaves 112 of 128 MiB to values. Fusion is modelled as on a GPU.
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


def profile(backend: str) -> Profile:
    """Return the profile of a backend: "cpu", "gpu" or "tpu"."""
    return {"cpu": CPU, "gpu": GPU, "tpu": TPU}[backend]
