"""Run the project's tests on the installed JAX, and count them by subject."""

from __future__ import annotations

import collections
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from experiments.report import write_table

HERE = Path(__file__).parent
HEAD = ["tests of", "passed", "failed", "skipped"]
# A test belongs to the first group whose prefix its path has.
GROUPS = {
    "shard_map": "tests.rules.test_shard",
    "rules": "tests.rules",
    "interpreters": "tests.interpret",
    "transforms": "tests.transforms",
    "planner": "tests.planner",
    "passes": "tests.passes",
    "memory": "tests.memory",
    "Equinox": ("tests.test_equinox", "tests.introspection.test_modules"),
    "Flax": "tests.test_flax",
    "models": "tests.models",
    "examples in docstrings": "xform.",
    "all else": "tests.",
}


def group(case: ET.Element) -> str:
    """Return the subject of a test."""
    place = case.get("classname", "")
    return next(name for name, start in GROUPS.items() if f"{place}.".startswith(start))


def outcome(case: ET.Element) -> str:
    """Return how a test ended: a column of the table."""
    kinds = {child.tag for child in case}
    return (
        "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
    )


def main() -> int:
    """Run all tests except the slow ones, two at a time, and write the table."""
    with tempfile.TemporaryDirectory(prefix="xform-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-n", "2",
                   "-p", "no:cacheprovider", f"--junitxml={report}"]  # fmt: skip
        code = subprocess.run(command, cwd=HERE.parent.parent, check=False).returncode
        counts = collections.Counter(
            (group(case), outcome(case)) for case in ET.parse(report).iter("testcase")
        )
    rows = [[name, *(str(counts[name, kind]) for kind in HEAD[1:])] for name in GROUPS]
    total = [str(sum(counts[name, kind] for name in GROUPS)) for kind in HEAD[1:]]
    write_table(HERE, HEAD, [*rows, ["all", *total]])
    return code


if __name__ == "__main__":
    sys.exit(main())
