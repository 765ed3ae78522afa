"""Tell whether a step in slices gathers values that the step without slices does not gather.

On a mesh with `Auto` axes, types do not tell how values are sharded. A region may then be sliced
along an axis that is sharded over devices. XLA gathers the values of such a region, and each device
computes all slices. The peak may fall, but the work of each device multiplies.
"""

from __future__ import annotations

from xform.memory import buffers
from xform.memory.compilation import Compilation
from xform.memory.traffic import gathered_sizes

Sizes = tuple[int, ...]


def gathers_more(sliced: Compilation, whole: Compilation) -> bool:
    """Return whether a step in slices gathers an array that is no part of a gathered one.

    Args:
      sliced: the step in slices.
      whole: the step without slices.
    """
    if sliced.module is None or whole.module is None:
        return False
    modules = sliced.module, whole.module
    found, known = (gathered_sizes(buffers.read(module).module) for module in modules)
    return not all(any(_is_slice(sizes, of) for of in known) for sizes in found)


def _is_slice(sizes: Sizes, of: Sizes) -> bool:
    """Return whether an array of some sizes may be a slice of a larger one, along one axis."""
    if sizes == of:
        return True
    rest = lambda i: tuple(n for j, n in enumerate(of) if j != i)
    return any(
        tuple(sorted((*rest(i), part))) == sizes or rest(i) == sizes
        for i, n in enumerate(of)
        for part in (*sizes, 1)
        if n % part == 0
    )
