"""What settings of models of several kinds have in common."""

from __future__ import annotations

from typing import Any

from models.settings import setting

SIZE: dict[str, Any] = {"least": 1, "most": 2**31 - 1, "change": "never"}
DTYPES = ("float32", "bfloat16", "float16")


def dtype_setting() -> Any:
    """The type in which a model computes; its parameters are float32."""
    return setting("float32", "Of the computation.", choices=DTYPES)
