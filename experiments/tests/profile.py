"""Where do the tests spend their time, and how much memory do they take?

    python -m experiments.tests.profile before    # run the tests, and keep the figures
    python -m experiments.tests.profile --write   # the tables and the plot, of all figures

CPU seconds are those of the processes that run tests, with their threads and their own processes.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.report import known, replace, table
from xform.storage.files import atomic_write

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
LONG = 2.0  # seconds, above which a test needs a reason
_KEPT = HERE / "profiles.json"
_STEP = 20  # seconds between two points of the plot of memory


def record(folder: Path, root: Path, environment: Mapping[str, str]) -> None:
    """Run the tests of a project as `make test`, without a cache, and record them in a folder."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "experiments.tests.recorder"]
    options = ["-m", "not slow", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    ignored = [f"--ignore=tests/test_{name}.py" for name in ("layers", "repository")]
    env = {**environment, "XFORM_TEST_PROFILE": str(folder)}
    subprocess.run([*command, *options, *ignored], cwd=root, env=env, check=False)


def summary(folder: Path) -> dict[str, Any]:
    """Return the figures of a profile that `recorder` wrote."""
    folders, files = collections.Counter[str](), collections.Counter[str]()
    phases, parts = collections.Counter[str](), collections.Counter[str]()
    long, counts, memory = dict[str, float](), collections.Counter[str](), list[Any]()
    for path in sorted(folder.glob("*.jsonl")):
        seconds, points = 0.0, dict[int, int]()
        for line in map(json.loads, path.open()):
            if "what" not in line:
                parts["fixtures of files and sessions"] += line.get("cpu", 0)
                continue
            seconds += line["wall"]
            points[int(seconds // _STEP)] = line["resident"]
            phases.update(line["phases"])
            parts[line["what"]] += line["cpu"]
            if line["what"] == "test":
                file = line["id"].partition("::")[0]
                files[file] += line["cpu"]
                where = str(Path(file).parent) if file.startswith("tests/") else file.split("/")[0]
                folders[where] += line["cpu"]
                counts[where] += 1
                if line["cpu"] > LONG:
                    long[line["id"]] = round(line["cpu"], 1)
        memory.append([[i * _STEP, size] for i, size in points.items()])
    rounded = lambda c: {k: round(v, 1) for k, v in c.most_common()}
    return {
        "tests": counts.total(),
        "folders": {k: [counts[k], round(v, 1)] for k, v in folders.most_common()},
        "files": rounded(collections.Counter(dict(files.most_common(20)))),
        "parts": rounded(parts),
        "phases": {k: round(v / phases.total(), 4) for k, v in phases.most_common()},
        "long": dict(sorted(long.items(), key=lambda item: -item[1])),
        "memory": memory,
    }


def write_tables(profiles: dict[str, Any]) -> None:
    """Print the tables of the profiles, and with --write put them into the README."""
    names = list(profiles)
    for mark, key, head in (("folders", "folders", "tests of"), ("phases", "phases", "phase")):
        rows = list(dict.fromkeys(k for p in profiles.values() for k in p[key]))
        show = _seconds if key == "folders" else _share
        cells = [[row, *(show(p[key].get(row)) for p in profiles.values())] for row in rows]
        replace(HERE, mark, table([head, *names], cells))
    totals = [
        ["tests", *(f"{p['tests']:,}" for p in profiles.values())],
        ["CPU seconds", *(f"{sum(_parts(p)):.0f}" for p in profiles.values())],
        ["of these, imports and collection", *(f"{p['parts']['start'] + p['parts']['collect']:.0f}"
                                               for p in profiles.values())],
        [f"tests above {LONG:.0f} s", *(str(len(p["long"])) for p in profiles.values())],
        ["most memory of a worker, GiB", *(f"{_most(p) / 2**30:.1f}" for p in profiles.values())],
    ]  # fmt: skip
    replace(HERE, "totals", table(["", *names], totals))
    long = [[test, f"{seconds}"] for test, seconds in profiles[names[-1]]["long"].items()]
    replace(HERE, "long", table([f"test above {LONG:.0f} s, {names[-1]}", "CPU seconds"], long))


def _parts(profile: dict[str, Any]) -> list[float]:
    return [profile["parts"][k] for k in ("start", "collect", "between", "test")]


def _most(profile: dict[str, Any]) -> int:
    return max(size for points in profile["memory"] for _, size in points)


def _seconds(cell: list[float] | None) -> str:
    return "" if cell is None else f"{cell[1]:.0f} s, {cell[0]:,} tests"


def _share(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"


def plot(profiles: dict[str, Any]) -> None:
    """Draw the seconds of each folder, and the memory of each worker over the run."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    colors = dict(zip(profiles, ("#718096", "#2b6cb0", "#2f855a"), strict=False))
    rows = list(dict.fromkeys(k for p in profiles.values() for k in p["folders"]))[:24]
    height = 0.8 / len(profiles)
    for n, (name, profile) in enumerate(profiles.items()):
        seconds = [profile["folders"].get(row, [0, 0])[1] for row in rows]
        places = [i + n * height for i in range(len(rows))]
        left.barh(places, seconds, height, color=colors[name], label=name)
        for points in profile["memory"]:
            right.plot([x / 60 for x, _ in points], [y / 2**30 for _, y in points],
                       color=colors[name], label=name)  # fmt: skip
    left.set_yticks(range(len(rows)), rows, fontsize=8)
    left.invert_yaxis()
    left.set_xlabel("CPU seconds")
    left.legend(frameon=False)
    right.set_xlabel("minutes of the run")
    right.set_ylabel("GiB of memory, each worker")
    figure.savefig(HERE / "profile.png", dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", help="of the state of the tests that is measured")
    parser.add_argument("--from", dest="folder", type=Path, help="a profile that was recorded")
    given = parser.parse_args()
    profiles = known(_KEPT)
    if given.name:
        with tempfile.TemporaryDirectory() as made:
            folder = given.folder or Path(made)
            if not given.folder:
                record(folder, ROOT, os.environ)
            profiles[given.name] = summary(folder)
        with atomic_write(_KEPT) as partial:
            partial.write_text(json.dumps(profiles, indent=1) + "\n")
    write_tables(profiles)
    plot(profiles)
