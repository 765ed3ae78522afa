"""The experiments use names of xform that exist: they are not run by the other tests."""

from __future__ import annotations

import ast
import importlib
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Files that run somebody's trainer when they are imported.
TRAINERS = {
    "equinox_rnn.py", "flax_gemma.py", "flax_lm1b.py", "flax_mnist.py", "flax_seq2seq.py",
    "haiku_transformer.py", "kauldron_mnist.py", "keras_gpt.py", "maxtext_llama.py",
    "tunix_llama.py",
}  # fmt: skip
FILES = sorted(p for p in (ROOT / "experiments").rglob("*.py") if p.name not in TRAINERS)


def missing(module: types.ModuleType, source: str) -> Iterator[str]:
    """Yield the attributes that the source reads from modules of xform or models that lack them.

    A chain such as `xform.policies.budget` is followed through all modules on its way.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            names, value = [node.attr], node.value
            while isinstance(value, ast.Attribute):
                names.append(value.attr)
                value = value.value
            found = getattr(module, value.id, None) if isinstance(value, ast.Name) else None
            while names and isinstance(found, types.ModuleType):
                if found.__name__.split(".")[0] not in ("xform", "models", "experiments"):
                    break
                name = names.pop()
                if not hasattr(found, name):
                    yield f"{node.lineno}: {found.__name__}.{name}"
                found = getattr(found, name, None)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_an_experiment_reads_names_that_exist(path: Path) -> None:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("xform", "models", "experiments"):
            raise
        pytest.skip(f"needs {error.name}")
    assert not set(missing(imported, path.read_text()))


def test_a_missing_name_is_found() -> None:
    module = types.ModuleType("sample")
    module.xform = importlib.import_module("xform")
    source = "xform.grad\nxform.policies.budget(1)\nxform.policies.none_such\nxform.gone.more"
    assert set(missing(module, source)) == {"3: xform.policies.none_such", "4: xform.gone"}
