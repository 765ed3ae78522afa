"""The commands of the trainer: `xform train`, `xform generate`, `xform data`, `xform export`.

The trainer is the package `models` of the repository, which stands beside `xform` in a checkout. A
wheel has it in the folder `xform_trainer` beside `xform`. It lies outside `xform`, because reports
skip the source lines of the package `xform`, and the lines of a model must appear in them. It is
imported only when one of its commands is used.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xform.errors import MissingExtra
from xform.introspection.packages import pip_argument

COMMANDS = {
    "train": "train a model of `models`, or continue a training run",
    "generate": "generate text with a trained model",
    "data": "tokenize documents once, for use in many runs",
    "export": "write a trained model to a folder",
}
# The folder that holds the package `xform`.
_FOLDER = Path(__file__).parent.parent.parent
_NEEDED = ("flax", "optax", "grain", "orbax", "rich", "safetensors")


def main(words: Sequence[str]) -> int:
    """Run a command of the trainer and return its exit status.

    Args:
      words: the name of the command and its arguments.

    Raises:
      MissingExtra: a package that the trainer needs is not installed, or the trainer is missing.
    """
    asked = f"xform {words[0]}"
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise MissingExtra(
            asked,
            f"{missing[0]} is not installed",
            "",
            f"install what the trainer needs: pip install {pip_argument('train')}",
        )
    folder = next((f for f in (_FOLDER / "xform_trainer", _FOLDER)
                   if (f / "models" / "__main__.py").exists()), None)  # fmt: skip
    if folder is None:
        raise MissingExtra(asked, "this installation has no folder `models`", "",
                           "install a wheel of xform, or work in a checkout")  # fmt: skip
    sys.path.insert(0, str(folder))
    program: Any = importlib.import_module("models.program")
    program.NAME = "xform"  # usage and error messages then name the command "xform"
    return importlib.import_module("models.__main__").script(list(words))
