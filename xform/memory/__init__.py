"""`xform.memory`: the largest batch that fits a device, and why a function does not fit.

`xform.memory_analysis` and `xform.fits` return the memory report of one compiled function.
"""

import importlib as _importlib
import typing as _typing

__all__ = ["max_batch", "why_oom"]

if _typing.TYPE_CHECKING:
    from xform.memory.capacity import max_batch, why_oom
else:

    def __getattr__(name: str) -> _typing.Any:
        """Import a function on first use: the planner needs other modules of this package first."""
        if name in __all__:
            return getattr(_importlib.import_module("xform.memory.capacity"), name)
        raise AttributeError(f"module 'xform.memory' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __all__
