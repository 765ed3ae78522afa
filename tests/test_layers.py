"""Imports within xform point down its layers, without cycles, never inside a function."""

import ast
import functools
import graphlib
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted((ROOT / "xform").rglob("*.py"))
}
LAYERS = """
    errors, terminal, storage, introspection, page < _jax < program < registry < passes <
    interpret, steering < rules < slices < policies < planner < memory < modules < transforms <
    adjoints, curvature, diagnosis, fused, jacobians, sparse, steps <
    extend, equinox, flax, everywhere, names, testing, __init__ < commands < __main__
"""
LEVEL = {name.strip(): i for i, row in enumerate(LAYERS.split("<")) for name in row.split(",")}
# The layers within the planner.
ROOMS = """
    hardware, shape < loops, device, simulate < costs < candidate, report < plan, infeasible <
    schedule, cuts < decide < sliced < problem < candidates, bound < front, default_plan <
    choice < measure < search_front, search_slices < search, describe <
    plan_program < idle_regions, planning
"""
# Modules that import another by a name that they learn when they run, and who gives the name.
IMPORT_BY_NAME = {
    "xform.commands.shared.reference": "a module named on the command line",
    "xform.storage.results": "the class of a result, named in its file",
}
ROOM = {name.strip(): i for i, row in enumerate(ROOMS.split("<")) for name in row.split(",")}
IMPORTERS = ("import_module", "__import__")
JAX_INTERNALS = ("jax.core", "jax.extend", "jax.interpreters")


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


@functools.cache
def imports(module: str) -> set[str]:
    """Return the full names that a module imports; for xform's own, the names of their modules."""
    found = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module.rsplit(".", node.level)[0] if node.level else ""
            base = ".".join(filter(None, (package, node.module)))
            found |= {f"{base}.{alias.name}" for alias in node.names}
    found |= {name.value for name in imported_by_name(module) if isinstance(name, ast.Constant)}
    return {home(name) if name.split(".")[0] == "xform" else name for name in found}


def imported_by_name(module: str) -> list[ast.expr]:
    """Return the first argument of each call of `import_module` or `__import__`."""
    calls = [node for node in ast.walk(tree(module)) if isinstance(node, ast.Call)]
    named = [call for call in calls if ast.unparse(call.func).split(".")[-1] in IMPORTERS]
    return [call.args[0] for call in named]


def home(name: str) -> str:
    """Return the module of xform that defines an imported name."""
    candidates = (name, f"{name}.__init__", name.rpartition(".")[0])
    inside = [c for c in candidates if c in FILES]
    return inside[0] if inside else f"{name.rpartition('.')[0] or name}.__init__"


def layer(module: str) -> str:
    return module.split(".")[1]


def starts(name: str, prefixes: tuple[str, ...]) -> bool:
    return name.startswith(tuple(f"{p}." for p in prefixes)) or name in prefixes


@pytest.mark.parametrize("module", FILES)
def test_imports_point_down(module: str) -> None:
    assert layer(module) in LEVEL, f"{module} is in no layer"
    for name in imports(module):
        assert not starts(name, ("jax._src",)), f"{module} imports {name}"
        assert module == "xform._jax.__init__" or not starts(name, JAX_INTERNALS), (
            f"{module} imports {name}"
        )
        if name.startswith("xform."):
            assert LEVEL[layer(name)] <= LEVEL[layer(module)], f"{module} imports {name}, above it"


def test_imports_within_the_planner_point_down() -> None:
    planner = [m for m in FILES if m.startswith("xform.planner.") and m.count(".") > 1]
    room = lambda module: module.split(".")[2]
    for module in planner:
        if room(module) == "__init__":
            continue
        assert room(module) in ROOM, f"{module} is in no room"
        for name in imports(module):
            if name in planner and room(name) != room(module):
                assert ROOM[room(name)] < ROOM[room(module)], f"{module} imports {name}, above it"


def test_the_tour_says_the_same() -> None:
    tour = (ROOT / "xform/README.md").read_text()
    assert " ".join(ROOMS.split()) in tour
    assert all(" ".join(row.split()) in " ".join(tour.split()) for row in LAYERS.split("<")[:-1])


@pytest.mark.parametrize("module", FILES)
def test_no_import_inside_a_function(module: str) -> None:
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = [n for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom)]
            assert not inside, f"{module}: an import in {node.name}, line {inside[0].lineno}"


@pytest.mark.parametrize("module", FILES)
def test_no_import_by_name(module: str) -> None:
    """Only a package imports its own modules on first use, in its `__init__`."""
    if module in IMPORT_BY_NAME or module.endswith(".__init__"):
        return
    for name in imported_by_name(module):
        other = isinstance(name, ast.Constant) and name.value.split(".")[0] != "xform"
        assert other, f"{module}: import_module({ast.unparse(name)}), line {name.lineno}"


def test_no_circle() -> None:
    graph = {module: imports(module) & FILES.keys() - {module} for module in FILES}
    tuple(graphlib.TopologicalSorter(graph).static_order())


def test_files_are_short() -> None:
    lines = {module: len(path.read_text().splitlines()) for module, path in FILES.items()}
    if code := [n for n in lines.values() if n]:
        middle = statistics.median(code)
        print(f"\nxform: {len(code)} files, lines: {middle:.0f} median, {max(code)} most")
    assert not {module: n for module, n in lines.items() if n > 600}
