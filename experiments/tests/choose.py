"""Choose the tests of `make test`, so that they reach every line of xform at the least cost.

    python -m experiments.tests.choose build/reach/before --seconds 700

The profile is one that `recorder` and `lines` wrote. Kept are

1. each test below 50 ms of CPU time;
2. of each test function the cheapest case, if it takes less than `--each` seconds;
3. more tests, the most new lines for a second first, until each line is reached that any test
   reaches, and each line by two tests if two reach it, as far as the seconds last.

The others are printed, or with `--write` added to `tests/slow.txt`.
"""

from __future__ import annotations

import argparse
import collections
import json
from collections.abc import Iterable
from pathlib import Path

CHEAP = 0.05  # seconds
SLOW = Path(__file__).parent.parent.parent / "tests" / "slow.txt"


def tests_and_lines(
    folders: Iterable[Path],
) -> tuple[dict[str, float], dict[str, frozenset[int]]]:
    """Return the CPU seconds of each test of the profiles, and the lines that it reaches."""
    numbers = dict[str, int]()
    costs, reached = dict[str, float](), dict[str, frozenset[int]]()
    for path in sorted(path for folder in folders for path in folder.glob("*.jsonl")):
        texts = path.read_text().splitlines()
        names = path.with_suffix(".lines").read_text().splitlines()
        number = [numbers.setdefault(name, len(numbers)) for name in names]
        for text in texts:
            line = json.loads(text)
            if "id" in line:
                bits = int(line["lines"], 16)
                costs[line["id"]] = line["cpu"]
                found = (number[i] for i, bit in enumerate(reversed(f"{bits:b}")) if bit == "1")
                reached[line["id"]] = frozenset(found) | reached.get(line["id"], frozenset())
    return costs, reached


def function(test: str) -> str:
    """Return the test function of a test: its name without the parameters."""
    return test.partition("[")[0]


def choose(
    costs: dict[str, float], lines: dict[str, frozenset[int]], each: float, seconds: float
) -> set[str]:
    """Return the tests to keep."""
    cheapest = dict[str, str]()
    for test in sorted(costs, key=lambda t: (costs[t], t)):
        cheapest.setdefault(function(test), test)
    kept = {t for t in costs if costs[t] < CHEAP}
    kept |= {t for t in cheapest.values() if costs[t] < each}
    counts = collections.Counter(i for t in kept for i in lines[t])
    for times in (1, 2):
        rest = set(costs) - kept
        needed = {i for t in rest for i in lines[t] if counts[i] < times}
        while rest and needed and (times == 1 or sum(costs[t] for t in kept) < seconds):
            best = max(rest, key=lambda t: len(lines[t] & needed) / costs[t])
            if not lines[best] & needed:
                break
            kept.add(best)
            rest.remove(best)
            counts.update(lines[best])
            needed = {i for i in needed if counts[i] < times}
    return kept


def as_list(slow: set[str], all_tests: Iterable[str]) -> list[str]:
    """Return the lines of `tests/slow.txt`: a test function stands for all of its cases."""
    kept = {function(test) for test in all_tests if test not in slow}
    return sorted({function(t) if function(t) not in kept else t for t in slow})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profiles", type=Path, nargs="+")
    parser.add_argument("--each", type=float, default=1.0, help="seconds of a function's case")
    parser.add_argument("--seconds", type=float, default=700, help="seconds of all tests")
    parser.add_argument("--write", action="store_true", help="add the others to tests/slow.txt")
    given = parser.parse_args()
    costs, lines = tests_and_lines(given.profiles)
    kept = choose(costs, lines, given.each, given.seconds)
    slow = costs.keys() - kept
    if given.write:
        before = SLOW.read_text().splitlines()
        SLOW.write_text("\n".join(sorted({*before, *as_list(slow, costs)})) + "\n")
    else:
        print("\n".join(f"{costs[test]:.2f} {test}" for test in sorted(slow)))
    everything = frozenset[int]().union(*lines.values())
    of_kept = frozenset[int]().union(*(lines[t] for t in kept))
    print(
        f"{len(kept)} of {len(costs)} tests are kept, with {sum(costs[t] for t in kept):.0f} of "
        f"{sum(costs.values()):.0f} s, and {len(of_kept)} of {len(everything)} lines."
    )
