"""Draw small faults in the sources of xform, and put them all into one copy of the project.

In the copy, each drawn expression stands beside its faulty twin:

    (twin if _fault(17) else (original))

`_fault` notes that a test has reached the place. It is true for the one fault that the variable
`XFORM_FAULT` names. So one copy serves to ask which tests reach which places, and to run the tests
with each fault. Lines keep their numbers.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import random
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

PACKAGES = (
    "rules", "interpret", "steering", "passes", "registry", "program", "planner", "slices", "steps",
    "transforms", "memory", "policies",
)  # fmt: skip
# Read by Python when a process starts, with the copy's folder `boot` on its path.
BOOT = """
import builtins, os
_active = int(os.environ.get("XFORM_FAULT", "-1"))
builtins._faults_reached = set()
def _fault(i):
    builtins._faults_reached.add(i)
    return i == _active
builtins._fault = _fault
"""
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "+",
    ast.BitOr: "&", ast.BitAnd: "|",
}  # fmt: skip
_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_NAMES = {
    "min": "max", "max": "min", "any": "all", "all": "any", "sin": "cos", "cos": "sin",
    "sinh": "cosh", "cosh": "sinh", "add": "sub", "sub": "add", "mul": "add", "div": "mul",
    "float32": "float16", "float64": "float32", "int32": "int8", "reduce_sum": "reduce_max",
    "bfloat16": "float16", "union": "intersection", "gt": "ge", "lt": "le", "ge": "gt",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Fault:
    """A small change of one expression of xform.

    Attributes:
      path: the file, in the project.
      line: its line, from 1.
      start: where the expression begins, as an offset in the bytes of the file.
      end: where it ends.
      kind: what is changed, in words.
      text: the faulty expression.
      original: the expression.
    """

    path: str
    line: int
    start: int
    end: int
    kind: str
    text: str
    original: str

    def overlaps(self, other: Fault) -> bool:
        """Return whether this fault and another change the same place."""
        apart = self.end <= other.start or other.end <= self.start
        return self.path == other.path and (self.line == other.line or not apart)


class _Finder(ast.NodeVisitor):
    """Find the faults that a file can have."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source, self.found = path, source, list[Fault]()
        self.lines = [0]
        for line in source.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def span(self, node: ast.expr) -> tuple[int, int]:
        start = self.lines[node.lineno - 1] + node.col_offset
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return start, self.lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr) -> str:
        start, end = self.span(node)
        return self.source[start:end].decode()

    def add(self, node: ast.expr, kind: str, text: str) -> None:
        place = (self.path, node.lineno, *self.span(node))
        self.found.append(Fault(*place, kind, text, self.text(node)))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave texts alone."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        """Leave annotations alone."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.visit(node.args)
        for statement in node.body:
            self.visit(statement)

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        for case in node.cases:
            for statement in case.body:
                self.visit(statement)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in ("isinstance", "cast", "TypeVar", "Literal", "NewType"):
            return
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.generic_visit(node)
        new, sides = _OPERATORS.get(type(node.op)), (node.left, node.right)
        values = [s.value for s in sides if isinstance(s, ast.Constant)]
        texts = any(isinstance(s, ast.JoinedStr) for s in sides)  # a text, or a type and None
        if new and not texts and not any(v is None or isinstance(v, str) for v in values):
            self.add(node, "operator", f"({self.text(node.left)}) {new} ({self.text(node.right)})")

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self.generic_visit(node)
        if isinstance(node.op, ast.USub):
            self.add(node, "sign", self.text(node.operand))
        elif isinstance(node.op, ast.Not):
            self.add(node, "negation", f"bool({self.text(node.operand)})")

    def visit_Compare(self, node: ast.Compare) -> None:
        self.generic_visit(node)
        if len(node.ops) == 1:
            left, right = self.text(node.left), self.text(node.comparators[0])
            new = _COMPARISONS[type(node.ops[0])]
            none = isinstance(node.comparators[0], ast.Constant) and right == "None"
            self.add(node, "check for None" if none else "comparison", f"({left}) {new} ({right})")

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.generic_visit(node)
        word = " and " if isinstance(node.op, ast.And) else " or "
        kept = word.join(f"({self.text(v)})" for v in node.values[:-1])
        self.add(node, "condition dropped", kept)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.generic_visit(node)
        test, one, two = map(self.text, (node.test, node.body, node.orelse))
        self.add(node, "branches swapped", f"({two}) if ({test}) else ({one})")

    def visit_If(self, node: ast.If) -> None:
        self.generic_visit(node)
        if "TYPE_CHECKING" not in self.text(node.test):
            self.add(node.test, "branches swapped", f"not ({self.text(node.test)})")

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.generic_visit(node)
        for test in node.ifs:
            self.add(test, "filter dropped", "True")

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add(node, "flag", str(not node.value))
        elif isinstance(node.value, int):
            self.add(node, "number", str(node.value + 1))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        if node.attr in _NAMES and isinstance(node.value, ast.Name):
            self.add(node, "function or dtype", f"{self.text(node.value)}.{_NAMES[node.attr]}")

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in ("min", "max", "any", "all") and isinstance(node.ctx, ast.Load):
            self.add(node, "function or dtype", _NAMES[node.id])

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom | ast.Await):
            return
        self.generic_visit(node)
        self.add(node.value, "statement removed", "None")

    def visit_Return(self, node: ast.Return) -> None:
        self.generic_visit(node)
        value = node.value
        if value is not None and not (isinstance(value, ast.Constant) and value.value is None):
            self.add(value, "result dropped", "None")


def possible(root: Path, path: str) -> list[Fault]:
    """Return the faults that a file can have."""
    source = (root / path).read_bytes()
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return finder.found


def draw(root: Path, n: int, seed: int, taken: Sequence[Fault] = ()) -> list[Fault]:
    """Draw `n` faults, as many in each package, at other places than those that are `taken`.

    Each draw chooses a kind of fault first, and then one of the package's faults of this kind.
    """
    random_numbers, drawn = random.Random(seed), list[Fault]()
    by_kind = dict[str, dict[str, list[Fault]]]()
    for package in PACKAGES:
        kinds: dict[str, list[Fault]] = collections.defaultdict(list)
        for path in sorted((root / "xform" / package).rglob("*.py")):
            for fault in possible(root, str(path.relative_to(root))):
                kinds[fault.kind].append(fault)
        by_kind[package] = dict(sorted(kinds.items()))
    while len(drawn) < n:
        kinds = by_kind[PACKAGES[len(drawn) % len(PACKAGES)]]
        fault = random_numbers.choice(kinds[random_numbers.choice(list(kinds))])
        if not any(map(fault.overlaps, [*taken, *drawn])):
            drawn.append(fault)
    return drawn


def found_again(root: Path, fault: Fault) -> Fault | None:
    """Return a fault at the place where its file has the expression now; None if it is gone.

    If the file has the expression several times, it is the one on the nearest line.
    """
    if not (root / fault.path).exists():
        return None
    change = lambda f: (f.kind, f.text, f.original)
    same = [f for f in possible(root, fault.path) if change(f) == change(fault)]
    return min(same, key=lambda f: abs(f.line - fault.line), default=None)


def copy_with(root: Path, faults: list[tuple[int, Fault]], to: Path) -> None:
    """Copy the files of a project that git knows, with numbered faults in them, none of them on."""
    names = subprocess.run(
        ["git", "-C", root, "ls-files", "-z"], check=True, capture_output=True, text=True
    ).stdout.split("\0")
    for name in filter(None, names):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, to / name)
    places: dict[str, list[tuple[Fault, int]]] = collections.defaultdict(list)
    for i, fault in faults:
        places[fault.path].append((fault, i))
    for name, of_file in places.items():
        source = (to / name).read_bytes()
        for fault, i in sorted(of_file, key=lambda f: f[0].start, reverse=True):
            new = f"(({fault.text}) if _fault({i}) else ({fault.original}))".encode()
            source = source[: fault.start] + new + source[fault.end :]
        ast.parse(source)
        (to / name).write_bytes(source)
    (to / "boot").mkdir(exist_ok=True)
    (to / "boot" / "sitecustomize.py").write_text(BOOT)
