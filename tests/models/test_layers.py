"""The packages of `models` import downwards, and only public names of xform."""

import ast
from pathlib import Path

import pytest

import xform

ROOT = Path(__file__).parent.parent.parent
FILES = sorted((ROOT / "models").rglob("*.py"))
LEVEL = {
    "errors": 0,
    "machine": 0,
    "program": 0,
    "zigzag": 0,
    "settings": 1,
    "nets": 2,
    "data": 2,
    "train": 3,
    "run": 4,
    "__main__": 5,
}


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_down_and_are_public(path: Path) -> None:
    own = path.relative_to(ROOT / "models").with_suffix("").parts[0]
    for name in imports(path):
        package, _, inside = name.partition(".")
        if package == "models" and own != "__init__":
            other = inside.split(".")[0]
            assert other == own or LEVEL[other] < LEVEL[own], f"{path} imports {name}"
        if package == "xform" and inside:
            assert inside.split(".")[0] in {*dir(xform), "diagnosis"}, name
