"""Ask how many small faults in xform the tests find.

    python -m experiments.tests.kill before             # "before" names the results
    python -m experiments.tests.kill before --set fresh  # or another set of faults

Each set of faults was drawn once, and is kept in `faults.json`. One run of all tests asks which
tests reach which fault. Then the tests that reach a fault run with it, until one fails or 120 CPU
seconds are over. The tests of the mirroring file come first, then the quickest. Results are kept as
they come, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.report import keep, known
from experiments.tests.faults import Fault, copy_with, draw, found_again
from experiments.tests.profile import record

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# The number of faults of each set, and the seed that they are drawn with.
SETS = {"drawn": (120, 1), "held out": (60, 2), "fresh": (20, 3)}
SECONDS = 120  # CPU seconds for the tests of a fault
_LIMIT = SECONDS + 20  # with the imports
_PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]


def all_faults() -> dict[str, list[Fault | None]]:
    """Return the faults of each set, where the sources have them now; None for one that is gone.

    A set that is not kept yet is drawn from the sources, at other places than the sets before it.
    """
    path = HERE / "faults.json"
    known_sets = json.loads(path.read_text()) if path.exists() else {}
    found = dict[str, list[Fault | None]]()
    for name, (n, seed) in SETS.items():
        if name not in known_sets:
            taken = [f for faults in found.values() for f in faults if f is not None]
            known_sets[name] = [dataclasses.asdict(f) for f in draw(ROOT, n, seed, taken)]
            path.write_text(json.dumps(known_sets, indent=1) + "\n")
        found[name] = [found_again(ROOT, Fault(**f)) for f in known_sets[name]]
    return found


def environment(copy: Path, **more: str) -> dict[str, str]:
    """Return the environment of a process that runs the tests of a copy."""
    return {**os.environ, "PYTHONPATH": f"{copy / 'boot'}:{copy}", **more}


def costs_and_reach(lines: list[dict[str, Any]]) -> tuple[dict[str, float], dict[int, set[str]]]:
    """Return what each test costs, and which tests reach a fault; "" stands for the imports.

    Tests that fail without a fault are left out.
    """
    costs, reach = dict[str, float](), collections.defaultdict[int, set[str]](set)
    failed = {line.get("failed") for line in lines}
    for line in lines:
        if line.get("id") in failed - {None}:
            continue
        name = line.get("id", "")
        if name:
            costs[name] = line["cpu"]
        for i in line.get("reached", ()):
            reach[i].add(name)
    return costs, reach


def in_order(fault: Fault, reached_by: set[str], costs: dict[str, float]) -> list[str]:
    """Return the tests to run with a fault, the most specific first, within the time."""
    folder, _, stem = fault.path.removeprefix("xform/").removesuffix(".py").rpartition("/")
    mirror = (f"tests/{folder}/test_{stem}", f"tests/{folder}/", f"xform/{folder}/")

    def distance(test: str) -> int:
        return next((i for i, start in enumerate(mirror) if test.startswith(start)), len(mirror))

    tests = costs if "" in reached_by else reached_by
    chosen, total = [], 0.0
    for test in sorted(tests, key=lambda t: (distance(t), costs[t], t)):
        total += costs[test]
        if total > SECONDS:
            break
        chosen.append(test)
    return chosen


def verdict(copy: Path, i: int, tests: list[str]) -> dict[str, Any]:
    """Run tests with fault `i`; return whether a test found it, and that test."""
    if not tests:
        return {"verdict": "not reached"}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(tests))
        file.flush()
        try:
            run = subprocess.run(
                [*_PYTEST, "-x", "--tb=no", f"@{file.name}"],
                cwd=copy,
                env=environment(copy, XFORM_FAULT=str(i)),
                capture_output=True,
                text=True,
                timeout=10 * SECONDS,  # of wall time, on a busy machine
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (_LIMIT, _LIMIT)),
            )
        except subprocess.TimeoutExpired:
            return {"verdict": "out of time"}
    if run.returncode in (-9, -24):
        return {"verdict": "out of time"}
    failed = [x for x in run.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
    by = failed[0].split(" - ")[0] if failed else run.stdout[-200:] if run.returncode else ""
    return {"verdict": "killed" if run.returncode else "survived", "by": by, "tests": len(tests)}


def copy_and_reach(
    name: str, faults: list[Fault | None]
) -> tuple[Path, dict[str, float], dict[int, set[str]]]:
    """Return a copy with the faults, what each test costs, and which tests reach which fault."""
    copy, profile = ROOT / "build" / "faulty" / name, ROOT / "build" / "reach" / name
    if not profile.exists():
        copy_with(ROOT, [(i, f) for i, f in enumerate(faults) if f is not None], copy)
        partial = profile.with_suffix(".partial")
        record(partial, copy, environment(copy))
        partial.rename(profile)
    files = sorted(profile.glob("*.jsonl"))
    return copy, *costs_and_reach([json.loads(x) for f in files for x in f.open()])


def run(name: str, chosen: str, workers: int) -> None:
    """Run the tests with each fault of a set, and keep the results under a name."""
    results = HERE / f"kills_{name}.json"
    faults, numbers = list[Fault | None](), range(0)
    for each, of_set in all_faults().items():
        if each == chosen:
            numbers = range(len(faults), len(faults) + len(of_set))
        faults += of_set
    copy, costs, reach = copy_and_reach(name, faults)
    done = known(results)

    def one(i: int) -> tuple[int, dict[str, Any]]:
        fault = faults[i]
        if fault is None:
            return i, {"verdict": "gone"}
        return i, verdict(copy, i, in_order(fault, reach[i], costs))

    rest = [i for i in numbers if str(i) not in done]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for ready in concurrent.futures.as_completed([pool.submit(one, i) for i in rest]):
            i, found = ready.result()
            print(i, found, flush=True)
            done = keep(results, str(i), found)
    print(dict(collections.Counter(found["verdict"] for found in done.values())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="of this state of the tests")
    parser.add_argument("--set", choices=SETS, default="drawn")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    run(given.name, given.set, given.workers)
