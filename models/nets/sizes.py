"""Settings that several kinds of models have in common."""

from __future__ import annotations

from typing import Any

from models.settings import setting

# Limits of a setting that is a size.
SIZE: dict[str, Any] = {"least": 1, "most": 2**31 - 1, "change": "never"}
DTYPES = ("float32", "bfloat16", "float16")


def dtype_setting() -> Any:
    """Make the setting for the dtype of a model's computation. Parameters are float32."""
    return setting(
        "float32", "dtype of the computation; the stored parameters are float32.", choices=DTYPES
    )
