"""Tell whether a step in slices gathers values that the step without slices does not gather.

On a mesh with `Auto` axes, types do not tell how values are sharded. A region may then be sliced
along an axis that is sharded over devices. XLA gathers the values of such a region, and each device
computes all slices. The peak may fall, but the work of each device multiplies.
"""

from __future__ import annotations

import math
from collections import Counter

from xform.memory import buffers
from xform.memory.report import MemoryReport
from xform.memory.traffic import gathered_sizes

Sizes = tuple[int, ...]


def gathers_more(sliced: MemoryReport, whole: MemoryReport) -> bool:
    """Return whether a step in slices gathers an array that is no part of a gathered one.

    Args:
      sliced: the step in slices.
      whole: the step without slices.
    """
    if sliced.module is None or whole.module is None:
        return False
    modules = sliced.module, whole.module
    found, known = (gathered_sizes(buffers.read(module).module) for module in modules)
    return not all(any(may_be_part(sizes, of) for of in known) for sizes in found)


def may_be_part(sizes: Sizes, of: Sizes) -> bool:
    """Return whether an array of some sizes may be another array, or a slice of it along one axis.

    The other array may have another shape: XLA may merge the axis of the devices with any axis of a
    gathered array. Then the two arrays have one size in common at least.

    Args:
      sizes: the sizes of the array, in rising order.
      of: the sizes of the other array, in rising order.

    >>> from xform.steps.gathers import may_be_part
    >>> may_be_part((64, 2048), of=(4, 64, 2048)), may_be_part((32, 64), of=(8, 256))
    (True, False)
    """
    common = Counter(sizes) & Counter(of)
    rest = lambda given: math.prod((Counter(given) - common).elements())
    if sizes == of or (common and rest(sizes) == rest(of)):
        return True
    others = lambda i: tuple(n for j, n in enumerate(of) if j != i)
    return any(
        tuple(sorted((*others(i), part))) == sizes or others(i) == sizes
        for i, n in enumerate(of)
        for part in (*sizes, 1)
        if n % part == 0
    )
