"""Run the slow tests file by file, and go on where the last run stopped.

    make slow              # the files that have not passed yet; when all have, it starts again
    make slow OF=planner   # of these, the files whose path contains "planner"
    make slow AGAIN=1      # from the start

The results are written to `build/slow-<version of JAX>.json` after each file: whether it passed,
when, and how many seconds it took. The run ends with a list of the files that failed and of those
that are left.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from xform.storage.files import atomic_write

_ROOT = Path(__file__).parent.parent
_BUILD = _ROOT / "build"
_PYTEST = (sys.executable, "-m", "pytest", "-m", "slow", "-q")
_NO_TESTS = 5  # the exit status of pytest if no test was selected

# Of each file: whether it passed in this round, when, and the seconds.
Results = dict[str, dict[str, Any]]


def slow_tests() -> dict[str, int]:
    """Return how many slow tests each file has."""
    command = [*_PYTEST, "--collect-only"]
    listed = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if listed.returncode not in (0, _NO_TESTS):
        sys.exit(f"The slow tests cannot be collected:\n{listed.stdout}\n{listed.stderr}")
    tests = [line for line in listed.stdout.splitlines() if "::" in line]
    return dict(collections.Counter(test.split("::")[0] for test in tests))


def left(files: Collection[str], results: Results) -> list[str]:
    """Return the files that have not passed in this round."""
    return [file for file in files if not results.get(file, {}).get("passed")]


def run(of: str, again: bool, options: list[str]) -> int:
    """Run the files that are left; return an exit status."""
    store = _BUILD / f"slow-{importlib.metadata.version('jax')}.json"
    results: Results = json.loads(store.read_text()) if store.exists() else {}
    counts = {file: n for file, n in sorted(slow_tests().items()) if of in file}
    if not counts:
        sys.exit(f"No file with slow tests has {of!r} in its path.")
    if again or not left(counts, results):
        for file in results.keys() & counts.keys():
            results[file]["passed"] = False
    to_run = left(counts, results)
    print(f"{len(counts) - len(to_run)} of {len(counts)} files have passed already.")
    for i, file in enumerate(to_run, 1):
        last = f", {results[file]['seconds']:.0f} s the last time" if file in results else ""
        print(f"\n[{i} of {len(to_run)}] {file}: {counts[file]} tests{last}", flush=True)
        start = time.monotonic()
        try:
            status = subprocess.run([*_PYTEST, *options, file], cwd=_ROOT, check=False).returncode
        except KeyboardInterrupt:
            break
        when = datetime.datetime.now().isoformat(timespec="minutes")
        seconds = round(time.monotonic() - start, 1)
        passed = status in (0, _NO_TESTS)
        results[file] = {"passed": passed, "when": when, "seconds": seconds}
        store.parent.mkdir(exist_ok=True)
        with atomic_write(store) as partial:
            partial.write_text(json.dumps(results, indent=1) + "\n")
    return summary(counts, results)


def summary(counts: dict[str, int], results: Results) -> int:
    """Print the files that passed and those that are left; return an exit status."""
    rest = left(counts, results)
    passed = [file for file in counts if file not in rest]
    seconds = sum(results[file]["seconds"] for file in passed)
    print(f"\n{len(passed)} of {len(counts)} files have passed, in {seconds / 60:.0f} minutes.")
    for file in rest:
        failed = f"failed on {results[file]['when']}" if file in results else "did not run"
        print(f"  {file}: {failed}")
    return int(bool(rest))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("of", nargs="?", default="", help="a part of the path of a file")
    parser.add_argument("--again", action="store_true", help="run files that have passed, too")
    given, more = parser.parse_known_args()
    sys.exit(run(given.of, given.again, more))
