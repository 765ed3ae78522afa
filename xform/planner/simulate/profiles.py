"""What is known of each backend's compiler, by which `liveness` simulates its memory.

Each fact has a test against that compiler's own buffer assignment: `test_profiles.py` in
`tests/planner/simulate` for XLA:CPU, `test_chips.py` for the compilers of GPUs and TPUs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax

from xform.cost import aval_bytes


@dataclasses.dataclass(frozen=True)
class Profile:
    """One compiler.

    Attributes:
      name: of the backend.
      breadth_first: operations run as soon as their operands are there, whatever memory that takes;
        else in the order that takes least of those that the compiler tries.
      host_is_device: the host's memory is the device's: what is sent there stays where it is.
      repeats: what is run again and fuses is repeated in what reads it, and not merged with its
        first run: as if it waited, also where it does not.
      selects_barriers: a barrier is a select for each value that it holds back.
      library: reductions of so many elements are library calls, which take in what is computed
        around them; 0: there is no such library.
      sines: that library knows sines, cosines and tangents.
      widens: products of numbers of 16 bits are run with 32, which are written; what makes such
        numbers is not repeated.
      kernel: an operation goes into all of its readers, or into none, as saves time: bytes that
        memory moves while a kernel starts. 0: one reader may take in what another reads written.
      merges: products of no more than so many bytes, operands included, that share an operand are
        run as one, of which their results are slices; 0: none are.
      processors: products of few rows and columns are cut in parts to keep so many of them busy;
        the parts are written, and added up; 0: none are cut.
      on_chip: bytes of a memory beside the processor, in which values stay while they live.
      margin: of a budget that the simulation alone decides, the part that is left, if it can be, to
        what is not simulated. Source: `experiments/planner`, the budgets by simulation alone.
      lowers: it is given what `Traits.lowered` makes of an operation.
      tiles: values lie in tiles of 8 rows and 128 columns, filled up where axes are smaller.
      written: the default's price of saving what is made from a product and fused with what reads
        that, see `MinCut`: the product is there beside it.
      rounds: operands of products of 32 bits are rounded to 16 where they are made, see `MinCut`.
    """

    name: str
    breadth_first: bool = False
    host_is_device: bool = False
    repeats: bool = False
    selects_barriers: bool = False
    library: int = 0
    sines: bool = False
    widens: bool = False
    kernel: int = 0
    merges: int = 0
    processors: int = 0
    on_chip: int = 0
    margin: float = 0.05
    lowers: bool = True
    tiles: bool = False
    written: float = 0.0
    rounds: bool = False

    def bytes(self, aval: object) -> int:
        """Bytes of a value in memory."""
        size, dims = aval_bytes(aval), getattr(aval, "shape", ())
        return size * tiled(dims) // max(1, math.prod(dims)) if self.tiles else size

    def table_bytes(self, n: int) -> int:
        """Bytes of the table that says where `n` results are; a single one needs none."""
        if n == 1:
            return 0
        return 4 * _up(n, 128) if self.tiles else 8 * n


def tiled(dims: tuple[int, ...]) -> int:
    """Elements of a value in tiles of 8 rows and 128 columns; of fewer rows where it has fewer.

    Of the orders of its axes it lies in the one that takes least.
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
    library=4096,
    sines=jax.__version_info__ >= (0, 12),
    widens=jax.__version_info__ < (0, 12),
    margin=0.01,
)
# Of an H100: a kernel starts in a microsecond. Other GPUs are taken to be alike.
GPU = Profile("gpu", kernel=3_350_000, merges=32 * 2**20, processors=132)
# Of a TPU v5e, whose compiler leaves 112 of 128 MiB to values. Its fusion is like the GPU's.
TPU = Profile(
    "tpu",
    repeats=True,
    kernel=819_000,
    on_chip=112 * 2**20,
    lowers=False,
    tiles=True,
    written=1 / 128,
    rounds=True,
)


def profile(backend: str) -> Profile:
    """The profile of a backend."""
    return {"cpu": CPU, "gpu": GPU, "tpu": TPU}[backend]
