"""`python -m xform rules`: list the primitives, with their derivative rules and tests.

A row of the table has the primitive and the word that declares its rule (such as `linear`). For
each direction of differentiation (jvp, pull for vjp, transpose) it says whether the rule has it.
Then come the file that tests it and its traits, which are facts for the planner.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
from collections.abc import Sequence
from pathlib import Path

from xform._jax import Primitive, ad, registered_names
from xform.commands.shared.reference import import_named
from xform.errors import WrongArgument
from xform.introspection.loaded import loaded_modules
from xform.registry.table import rules_by_name
from xform.rules.foreign import foreign_primitives
from xform.rules.unsupported import ONE_WAY, UNSUPPORTED
from xform.terminal.text import columns

# How each primitive is tested. tests/rules/tested.py writes the file from the cases in tests/rules.
TESTED = Path(__file__).with_name("tested.json")

# For each word that declares a rule: whether jvp, vjp and transpose are possible. "by value": reads
# and writes of mutable references become operations on plain values before differentiation. A
# primitive without a derivative, which raises an error, is declared as opaque.
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
_COLUMNS = ("primitive", "word", "jvp", "pull", "transpose", "tested", "traits")


@dataclasses.dataclass(frozen=True)
class RuleRow:
    """The row of one primitive.

    Attributes:
      primitive: its name.
      word: the word that declares its rule; "-" without a rule.
      jvp, pull, transpose: whether it can be pushed forward, pulled back and transposed.
      tested: the test file; or "no".
      traits: its traits, separated by commas.
      reason: why the rule or a direction is missing; "" if nothing is missing.
    """

    primitive: str
    word: str
    jvp: str
    pull: str
    transpose: str
    tested: str
    traits: str = ""
    reason: str = ""


def rows() -> list[RuleRow]:
    """Return a row for each primitive, with its rule or with the reason why it has none."""
    test_files, rules = json.loads(TESTED.read_text()), rules_by_name()
    table = []
    for name in sorted(
        {*rules, *UNSUPPORTED, *registered_names()} - {"xform_fork", "xform_join", "xform_refused"}
    ):
        if name not in rules:
            reason = UNSUPPORTED.get(name, "not known to xform")
            table.append(RuleRow(name, "-", "no", "no", "no", "no", reason=reason))
            continue
        word = rules[name].word
        untested = "no derivative" if word == "constant" else "no"
        tested = test_files.get(name, untested)
        directions = dict(zip(("jvp", "pull", "transpose"), _DIRECTIONS[word], strict=True))
        missing, reason = ONE_WAY.get(name, ("", ""))
        directions |= {missing: "no"} if missing else {}
        traits = ", ".join(rules[name].traits.named)
        table.append(RuleRow(name, word, **directions, tested=tested, traits=traits, reason=reason))
    return table


def _module_of(primitive: Primitive) -> str:
    """Return the first loaded module, by name, that has a primitive as an attribute, or "-"."""
    modules = sorted(name for name, names in loaded_modules()
                     if any(x is primitive for x in list(names.values())))  # fmt: skip
    return modules[0] if modules else "-"


def foreign(modules: Sequence[str]) -> str:
    """List other libraries' primitives, with the rules that their library registered with JAX.

    `modules` are imported first, because a primitive exists only in a loaded library.
    """
    for name in modules:
        import_named(name, f"rules --foreign {name}", "name an installed module")
    primitives = foreign_primitives()
    yes = lambda table, p: "yes" if p in table else "no"
    head = ("primitive", "module", "jvp", "transpose")
    cells = [head, *[(p.name, _module_of(p), yes(ad.primitive_jvps, p),
                      yes(ad.primitive_transposes, p)) for p in primitives]]  # fmt: skip
    return f"{columns(cells)}\n\n{len(primitives)} with a rule of another library."


def run(args: argparse.Namespace) -> str:
    """List the primitives with their derivative rules, or the primitives of other libraries."""
    if args.foreign is not None:
        return foreign(args.foreign)
    every = rows()
    wanted = [r for r in every if args.filter in r.primitive or args.filter == r.word]
    if not wanted:
        names = sorted({r.primitive for r in every} | {*_DIRECTIONS})
        like = difflib.get_close_matches(args.filter, names, 3) or sorted(_DIRECTIONS)
        raise WrongArgument(
            f"rules {args.filter}",
            f"no primitive has {args.filter!r} in its name, and no rule has that word",
            "",
            f"give part of a name, or a word: {', '.join(like)}",
        )
    if args.json:
        return json.dumps([dataclasses.asdict(r) for r in wanted], indent=1)
    known = [r for r in wanted if r.word != "-"]
    cells = [_COLUMNS, *[tuple(getattr(r, c) or "?" for c in _COLUMNS) for r in known]]
    lines = [columns(cells), "", f"{len(known)} with a rule, {len(wanted) - len(known)} without."]
    reasons: dict[str, list[str]] = {}
    for r in wanted:
        if r.reason:
            reasons.setdefault(r.reason, []).append(r.primitive)
    lines += [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    return "\n".join(lines)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "filter",
        nargs="?",
        default="",
        help="show only primitives with this in their names, or with this kind of rule, such as "
        "linear",
    )
    parser.add_argument(
        "--foreign", nargs="*", metavar="MODULE",
        help="list the primitives of other libraries instead, and whether JAX has a jvp and a "
        "transpose rule of that library for each; the MODULEs are imported first",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print a JSON list of objects")
