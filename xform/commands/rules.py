"""`python -m xform rules`: each primitive, its rule, its tests."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib
import json
import sys
from pathlib import Path

import xform
from xform._jax import registered
from xform.rules.without import ONE_WAY, WITHOUT
from xform.table import RULES

# What a word says of the three directions.
_DIRECTIONS = {
    "pointwise": ("yes", "yes", "if linear"),
    "linear": ("yes", "yes", "yes"),
    "bilinear": ("yes", "yes", "either side"),
    "solve": ("yes", "yes", "right side"),
    "composite": ("yes", "derived", "if linear"),
    "structured": ("yes", "yes", "if linear"),
    "constant": ("zero", "zero", "zero"),
    "reference": ("by value", "by value", "by value"),
    "opaque": ("error", "error", "error"),
}
_COLUMNS = ("primitive", "word", "jvp", "pull", "transpose", "tested")


@dataclasses.dataclass(frozen=True)
class Row:
    """What is known of one primitive; `tested` is None where the tests are not at hand."""

    primitive: str
    word: str
    jvp: str
    pull: str
    transpose: str
    tested: str | None
    reason: str = ""


def rows() -> list[Row]:
    """A row for each primitive that has a rule, or the reason why it has none."""
    tried = _tried()
    found = []
    for name in sorted({*RULES, *WITHOUT, *registered()} - {"xform_fork", "xform_join"}):
        if name not in RULES:
            reason = WITHOUT.get(name, "not known to xform")
            found.append(Row(name, "-", "no", "no", "no", None, reason))
            continue
        word = RULES[name].word
        untested = "nothing flows" if word == "constant" else "no"
        tested = None if tried is None else tried.get(name, untested)
        ways = dict(zip(("jvp", "pull", "transpose"), _DIRECTIONS[word], strict=True))
        missing, reason = ONE_WAY.get(name, ("", ""))
        ways |= {missing: "no"} if missing else {}
        found.append(Row(name, word, **ways, tested=tested, reason=reason))
    return found


def _tried() -> dict[str, str] | None:
    """How each primitive is tested: known in a checkout only, which has the tests."""
    root = Path(xform.__file__).resolve().parent.parent
    folder = root / "tests" / "rules"
    if not (folder / "cases").is_dir():
        return None
    sys.path.insert(0, str(root))
    try:
        families = [importlib.import_module(f"tests.rules.cases.{path.stem}")
                    for path in sorted((folder / "cases").glob("[a-z]*.py"))]  # fmt: skip
        elsewhere = importlib.import_module("tests.rules.elsewhere").ELSEWHERE
    finally:
        sys.path.remove(str(root))
    count = collections.Counter(case.primitive for f in families for case in f.CASES)
    cases = {name: f"{n} case{'s' * (n > 1)}" for name, n in count.items()}
    return {**elsewhere, **cases}


def run(args: argparse.Namespace) -> str:
    """The table of derivative rules."""
    wanted = [r for r in rows() if args.filter in r.primitive or args.filter == r.word]
    if args.json:
        return json.dumps([dataclasses.asdict(r) for r in wanted], indent=1)
    known = [r for r in wanted if r.word != "-"]
    cells = [_COLUMNS, *[tuple(getattr(r, c) or "?" for c in _COLUMNS) for r in known]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    lines += ["", f"{len(known)} with a rule, {len(wanted) - len(known)} without."]
    reasons: dict[str, list[str]] = {}
    for r in wanted:
        if r.reason:
            reasons.setdefault(r.reason, []).append(r.primitive)
    lines += [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    if any(r.tested is None for r in known):
        lines.append("What is tested is known in a checkout of the repository only.")
    return "\n".join(lines)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("filter", nargs="?", default="", help="part of a name, or a word")
    parser.add_argument("--json", action="store_true", help="a list of objects")
