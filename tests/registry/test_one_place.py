"""Facts about a primitive stand beside its rule: no other file of xform names the primitive.

A file names a primitive by an object such as `lax.exp_p`, or by a string that is its name. Strings
that are also plain words, such as "copy", do not count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import xform
from xform._jax import primitives
from xform.registry.table import rules_by_name

ROOT = Path(xform.__file__).parent
# Where facts about primitives stand, and where JAX's internals are reached.
PLACES = ("rules/", "_jax/")
# Programs with programs inside. What walks them names them, until one driver walks all.
STRUCTURED = frozenset((
    "scan", "while", "cond", "jit", "shard_map", "remat2", "closed_call", "core_call", "run_state",
    "custom_jvp_call", "custom_vjp_call",
))  # fmt: skip
# Files that name other primitives, or opcodes of XLA that have the same names, and why.
REASONS = {
    "planner/simulate/": "imitates what XLA's compilers do with each operation",
    "steering/wait.py": "knows which movements XLA folds into a product",
    "memory/added.py": "reads opcodes of HLO",
    "memory/attribute.py": "reads names of operations in compiled programs",
    "memory/dataflow.py": "reads opcodes of HLO",
    "memory/advice.py": "reads names of operations in compiled programs",
    "memory/scaled.py": "reads opcodes of HLO",
    "memory/traffic.py": "reads opcodes of HLO",
    "passes/simplify.py": "is the table of identities between operations",
    "passes/erased.py": "is the table of operations that XLA erases",
    "passes/views.py": "is the table of views as strides",
    "passes/structured.py": "removes the clamp that `lax.switch` adds",
    "program/equation.py": "binds products at the default precision, which only `lax` can",
    "program/hijax.py": "lowers JAX's operation objects to primitives",
    "program/reference_operations.py": "is the table of operations on references",
    "interpret/concrete.py": "completes the parameters of a `device_put` that runs eagerly",
    "slices/batched_indices.py": "recognizes the index arithmetic of `jax.numpy`",
    "slices/draws.py": "draws a slice of threefry's bits",
}
# Names of primitives that are also words of Python, NumPy, HLO or English.
WORDS = frozenset((
    "abs", "call", "complex", "composite", "copy", "empty", "log", "max", "min", "name", "not",
    "pad", "real", "reduce", "round", "sign", "split", "stack", "tile", "todense",
    "transpose",
))  # fmt: skip


def jax_names() -> frozenset[str]:
    """Return the names of JAX's primitives that have a rule or are public, without loops."""
    names = {*primitives(), *(name for name, rule in rules_by_name().items() if rule.own)}
    return frozenset(n for n in names - STRUCTURED if not n.startswith("xform_"))


NAMES = jax_names() - WORDS
OBJECTS = frozenset(f"{name.replace('-', '_')}_p" for name in jax_names()) | {"add_jaxvals_p"}
# Finds what may name a primitive, because to parse all files is slow.
LIKELY = re.compile(r"\b\w+_p\b|(?<=[\"'])[\w-]+(?=[\"'])")


def docstrings(tree: ast.AST) -> set[int]:
    """Return the constants that are statements, by `id`: docstrings."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def named(text: str) -> Iterator[str]:
    """Yield the primitives that a file names, with lines."""
    if (NAMES | OBJECTS).isdisjoint(LIKELY.findall(text)):
        return
    tree = ast.parse(text)
    ignored = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            if node.value in NAMES and id(node) not in ignored:
                yield f"{node.lineno}: {node.value!r}"
        elif isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            if name in OBJECTS:
                yield f"{node.lineno}: {name}"


def test_names_are_found() -> None:
    text = '"""scatter-add"""\nx = lax.exp_p, "scatter-add", scan_p, "copy", "expired"'
    assert sorted(named(text)) == ["2: 'scatter-add'", "2: exp_p"]


def test_no_other_file_names_a_primitive() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        if not file.startswith(PLACES) and (names := [*named(path.read_text())]):
            found[file] = names
    excused = {file: next((k for k in REASONS if file.startswith(k)), None) for file in found}
    assert not {file: found[file] for file, reason in excused.items() if reason is None}
    assert {*excused.values()} == {*REASONS}, "a reason excuses nothing"
