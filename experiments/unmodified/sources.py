"""Import parts of other people's files, unchanged, from their folders."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path


def module(path: Path) -> types.ModuleType:
    """Load a file as a module that nothing else can import, because its name may be one of ours."""
    spec = importlib.util.spec_from_file_location(f"unmodified.{path.stem}", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made  # dataclasses look for their module there
    spec.loader.exec_module(made)
    return made


def package(root: Path, name: str, bare: str | None = None) -> types.ModuleType:
    """Import a module by name, from a folder where its own imports begin.

    The `__init__` of the package `bare` is not run, because it needs packages that are missing.
    """
    with _first(root):
        if bare is not None:
            sys.modules[bare] = types.ModuleType(bare)
            sys.modules[bare].__path__ = [str(root / bare.replace(".", "/"))]
        return importlib.import_module(name)


def definitions(path: Path, *names: str) -> types.SimpleNamespace:
    """Return functions, classes and constants of a script or notebook that would not run whole.

    Its imports run where possible. Code that reads data or trains is left out.
    """
    tree = ast.parse(_code(path), str(path))
    made = types.ModuleType(f"unmodified.{path.stem}")
    sys.modules[made.__name__] = made
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            with contextlib.suppress(ImportError):
                _run(node, path, made)
        elif _named(node) & set(names):
            _run(node, path, made)
    return types.SimpleNamespace(**{name: getattr(made, name) for name in names})


def _run(node: ast.stmt, path: Path, made: types.ModuleType) -> None:
    exec(compile(ast.Module([node], []), str(path), "exec"), made.__dict__)


def _named(node: ast.stmt) -> set[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _code(path: Path) -> str:
    """Return the text of a script, or of a notebook's code cells without IPython's commands."""
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    return "\n".join(line for line in code.splitlines() if not line.startswith(("%", "!")))


@contextlib.contextmanager
def _first(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
