"""`xform.memory`: the largest batch that fits, why a function does not fit, and growth of a peak.

`compare_with_device` runs a function and compares its memory report with what the device did.

`xform.memory_analysis` and `xform.fits` return the memory report of one compiled function.
"""

import importlib as _importlib
import typing as _typing

__all__ = ["compare_with_device", "growth", "max_batch", "save_peaks", "why_oom"]
_MODULES = {
    "compare_with_device": "measured",
    "compile_for": "compilation",
    "compiled_bytes": "compilation",
    "growth": "saved_peaks",
    "max_batch": "capacity",
    "save_peaks": "saved_peaks",
    "why_oom": "capacity",
}

if _typing.TYPE_CHECKING:
    from xform.memory.capacity import max_batch, why_oom
    from xform.memory.compilation import compile_for as compile_for
    from xform.memory.compilation import compiled_bytes as compiled_bytes
    from xform.memory.measured import compare_with_device
    from xform.memory.saved_peaks import growth, save_peaks
else:

    def __getattr__(name: str) -> _typing.Any:
        """Import a function on first use, so that `import xform` stays fast."""
        if name in _MODULES:
            return getattr(_importlib.import_module(f"xform.memory.{_MODULES[name]}"), name)
        raise AttributeError(f"module 'xform.memory' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __all__
