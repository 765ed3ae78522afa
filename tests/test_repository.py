"""The files at the top of the repository, and that CI and users run the same commands."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
TOP = {"pyproject.toml", "README.md", "xform", "models", "tests", "experiments", "docs"}
TOP |= {
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "Makefile",
    "LICENSE",
    "constraints.txt",
    "constraints-newest.txt",
}

CONSTRAINTS = ("constraints.txt", "constraints-newest.txt")  # for the oldest JAX and the newest
RUN = ("check", "test", "docs", "check NEWEST=1", "test NEWEST=1")


def test_top_level() -> None:
    try:
        git = ["git", "-C", str(ROOT), "ls-files"]
        listed = subprocess.run(git, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    if not listed:
        pytest.skip("nothing is committed yet")
    assert {n for name in listed if not (n := name.split("/")[0]).startswith(".")} == TOP


def test_no_text_has_the_marks_of_a_conflict() -> None:
    texts = [*ROOT.glob("*.*"), *(p for d in TOP for p in (ROOT / d).rglob("*.*"))]
    kinds = (".py", ".md", ".txt", ".toml", ".yml", ".cff", ".css", ".js", ".html")
    marked = re.compile(r"^(?:<{7} |>{7} |={7}$)", re.MULTILINE)
    found = [p for p in texts if p.suffix in kinds and p.is_file() and marked.search(p.read_text())]
    assert not found


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraints_are_names_and_versions(name: str) -> None:
    for line in (ROOT / name).read_text().splitlines():
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line), line


def test_the_oldest_versions_that_are_supported_and_the_newest_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [Requirement(line) for line in (*project["dependencies"], *extras["train"])]
    lines = [(ROOT / name).read_text().splitlines() for name in CONSTRAINTS]
    oldest, newest = (dict(line.split("==") for line in pinned) for pinned in lines)
    for package in ("jax", "jaxlib", "flax"):
        (bounds,) = (r.specifier for r in asked if r.name == package)
        assert f">={oldest[package]}" in str(bounds)
        assert newest[package] in bounds
        above = newest[package].split(".")
        assert f"{above[0]}.{int(above[1]) + 1}" not in bounds


def test_make_takes_the_pythons_that_the_project_does() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    makefile = (ROOT / "Makefile").read_text()
    lowest = re.findall(r"MINOR := (\d+)", makefile)
    (above,) = re.findall(r"sys.version_info < \(3, (\d+)\)", makefile)
    assert project["requires-python"] == f">=3.{min(lowest)},<3.{above}"
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert tools["pyright"]["pythonVersion"] == f"3.{min(lowest)}"
    assert tools["ruff"]["target-version"] == f"py3{min(lowest)}"


def test_ci_runs_only_the_expected_make_targets() -> None:
    lines = (ROOT / ".ci/run").read_text().splitlines()
    commands = [line for line in lines if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == [f"make {what}" for what in RUN]


def test_no_cache_grows_for_ever() -> None:
    """Each cache is bounded (`BoundedCache`, sized `lru_cache`) or lives as long as its key."""
    unbounded = r"functools\.cache\b|lru_cache\((?!maxsize=\d)|lru_cache$"
    registries = {
        "RULES",
        "PENDING_RULES",
        "_OBSTACLES",
        "_NONE",
        "_FOUND",
        "_SEARCHED",
        "_claims",
        "_texts",
    }
    for path in sorted((ROOT / "xform").rglob("*.py")):
        text = path.read_text()
        assert not re.search(unbounded, text, re.MULTILINE), path
        made = re.findall(r"^(\w+)(?:: .*)? = (?:\{\}|dict\(\)|\[\]|set\(\))", text, re.MULTILINE)
        assert registries.issuperset(made), f"{path}: {made}"


def test_class_names_are_unique_within_xform() -> None:
    """So that a name in a message, an import or a text leads to one definition."""
    places: dict[str, str] = {}
    for path in sorted((ROOT / "xform").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                name, place = node.name.strip("_"), f"{path.relative_to(ROOT)}:{node.lineno}"
                first = places.setdefault(name, place)
                assert first == place, f"{name} is defined twice: in {first} and in {place}"


# Why a file outside the rules may know how a primitive runs its programs.
KNOWS_CONTROL_FLOW = {
    "_jax/__init__.py": "imports the primitives",
    "adjoints/recorder.py": "does not expand a branch that is chosen by the platform",
    "fused/step_graph.py": "finds the loop of the backward pass, into which an update moves",
    "fused/layers.py": "finds the gradients that this loop stacks",
    "fused/layer_loop.py": "writes this loop again, with the update in it",
    "fused/update_plan.py": "checks what this loop reads",
    "passes/listing.py": "prints the parameters of equations",
    "passes/sum_in_loops.py": "gives a scan one more carry",
    "planner/front.py": "counts the operations of a scan's state",
    "planner/loops.py": "splits and nests scans",
    "planner/shape.py": "splits and nests scans",
    "program/equation.py": "`lax.scan` and `lax.switch` with the options of an equation",
    "program/references.py": "removes references from programs, below the rules",
    "slices/custom_rules.py": "slices the rules of custom functions",
    "slices/nested.py": "calls it",
    "slices/resize.py": "calls custom functions with sliced rules",
    "transforms/reverse.py": "drops the rules of custom_jvp functions",
}


def test_control_flow_is_described_by_rules_only() -> None:
    """So that a new loop primitive is one file of rules (`Rule.flow` and `Rule.rebuild`)."""
    names = r"\b(scan|while|cond|jit|shard_map|custom_[jv][vj]p_call)_p\b|\bscan_counts\b"
    params = r'"(cond_jaxpr|body_jaxpr|cond_nconsts|body_nconsts|branches\w*|num_carry)"'
    xform = ROOT / "xform"
    found = {
        str(path.relative_to(xform))
        for path in xform.rglob("*.py")
        if path.parent.name != "rules" and re.search(f"{names}|{params}", path.read_text())
    }
    assert found == set(KNOWS_CONTROL_FLOW)


def test_the_slow_tests_exist() -> None:
    """A test that is renamed would otherwise leave the list without notice."""
    for line in (ROOT / "tests/slow.txt").read_text().splitlines():
        file, _, test = line.partition("::")
        name = test.partition("[")[0].rpartition(".")[2]  # an example is named by its module, too
        defined = re.search(rf"(def|class) {name}\b", (ROOT / file).read_text())
        assert defined or name in (Path(file).stem, Path(file).parent.name), line
