"""Run tests under a flag of JAX: `python -m tests.flag_matrix disable_jit [every=8] [TEST ...]`.

A test that fails under a flag is in `flag_matrix.toml`, with the reason. Each list there is for one
cell of `tests/flags.py`, and its `because` is the reason why its tests fail:

- "JAX": plain JAX fails too. The tests are run again with JAX's transforms in the place of
  xform's (`tests/jax_instead.py`): they have to fail under the flag and to pass without it.
- "flag": the test reads what the flag changes, and xform does what the flag asks for.

A test that fails and is not listed is an error, and so is a listed test that passes.
"""

import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax

from tests import flags

ROOT = Path(__file__).parent.parent
LISTS = Path(__file__).with_suffix(".toml")
FOLDERS = ("tests/transforms", "tests/interpret", "tests/rules")
VERSION = ".".join(jax.__version__.split(".")[:2])


def run(cell: str, tests: Sequence[str], *plugins: str, every: int = 1) -> dict[str, bool]:
    """Run tests in a separate process, and return for each whether it passed.

    With `every=8` an eighth of the tests runs, always the same.
    """
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Path(folder, "outcomes")
        environment = {**os.environ, **flags.environment(cell)}
        environment |= {"XFORM_OUTCOMES": str(outcomes), "XFORM_EVERY": str(every)}
        options = [f"-p{name}" for name in ("tests.outcomes", *plugins)]
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
        command += ["-m", "not slow", *options, *tests]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        # 0: all passed; 1: some failed. Any other code means that the tests did not run.
        if done.returncode not in (0, 1):
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        print(done.stdout)
        lines = outcomes.read_text().splitlines()
    return {test: outcome == "passed" for outcome, _, test in (x.partition(" ") for x in lines)}


def listed(cell: str, tests: Sequence[str]) -> dict[str, str]:
    """Return those of the tests that are expected to fail, each with its cause."""
    lists: list[dict[str, Any]] = tomllib.loads(LISTS.read_text()).get(cell, [])
    found: dict[str, str] = {}
    for entry in lists:
        assert entry["because"] in ("JAX", "flag"), entry
        assert entry["reason"], entry
        if entry.get("version", VERSION) == VERSION:
            for pattern in entry["tests"]:
                literal = pattern.replace("[", "[[]")  # only `*` is a wildcard here
                matched = [test for test in tests if fnmatchcase(test, literal)]
                found |= dict.fromkeys(matched or [pattern], entry["because"])
    return found


def problems(cell: str, tests: Sequence[str] = FOLDERS, every: int = 1) -> list[str]:
    """Return the unlisted failures of tests under a flag, and the wrong entries of the list."""
    passed = run(cell, tests, every=every)
    expected = listed(cell, list(passed))
    if tests != FOLDERS or every > 1:
        expected = {test: why for test, why in expected.items() if test in passed}
    found = [f"{t} fails, and is not listed" for t in passed if not passed[t] and t not in expected]
    found += [f"{t} is listed, and does not fail" for t in expected if passed.get(t, True)]
    of_jax = [t for t, why in expected.items() if why == "JAX" and t in passed]
    if of_jax:
        under = run(cell, of_jax, "tests.jax_instead")
        without = run("none", of_jax, "tests.jax_instead")
        found += [f"{t} passes with JAX's transforms under the flag" for t in of_jax if under[t]]
        found += [f"{t} fails with JAX's transforms by itself" for t in of_jax if not without[t]]
    because = f"{len(of_jax)} fail in JAX too, {len(expected) - len(of_jax)} read the flag"
    print(f"{cell}, JAX {VERSION}: {sum(passed.values())} of {len(passed)} pass; {because}")
    return found


if __name__ == "__main__":
    name, *chosen = sys.argv[1:]
    step = chosen.pop(0).removeprefix("every=") if chosen and chosen[0].startswith("every=") else 1
    if wrong := problems(name, chosen or FOLDERS, int(step)):
        sys.exit("\n".join(wrong))
