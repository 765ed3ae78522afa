"""What stands at the top of the repository, and that everyone's commands are the only commands."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOP = {"pyproject.toml", "README.md", "xform", "models", "tests", "experiments"}
TOP |= {"Makefile", "LICENSE", "constraints.txt"}


def test_top_level() -> None:
    try:
        git = ["git", "-C", str(ROOT), "ls-files"]
        listed = subprocess.run(git, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    if not listed:
        pytest.skip("nothing is committed yet")
    assert {n for name in listed if not (n := name.split("/")[0]).startswith(".")} == TOP


def test_constraints_are_names_and_versions() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line), line


def test_ci_runs_what_a_user_runs() -> None:
    lines = (ROOT / ".ci/run").read_text().splitlines()
    commands = [line for line in lines if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == ["make check", "make test"]


def test_no_cache_grows_for_ever() -> None:
    """Each is bounded (`recent.Recent`, `lru_cache` with a size) or lives as long as its key."""
    unbounded = r"functools\.cache\b|lru_cache\((?!maxsize=\d)|lru_cache$"
    registries = {"RULES", "LATER", "_NONE", "_OWN", "_SEEN", "_claims", "_texts"}
    for path in sorted((ROOT / "xform").rglob("*.py")):
        text = path.read_text()
        assert not re.search(unbounded, text, re.MULTILINE), path
        made = re.findall(r"^(\w+)(?:: .*)? = (?:\{\}|dict\(\)|\[\]|set\(\))", text, re.MULTILINE)
        assert registries.issuperset(made), f"{path}: {made}"
