"""A computational graph (`ComputationalGraph.to_dict`) as text: a table, or Graphviz's language."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from xform.terminal.text import columns, shorten_place

# The pen of Graphviz for each activity of a value.
_PENS = {"active": "darkgreen", "stopped": "darkorange", "constant": "gray50"}


def format_measure(measured: dict[str, Any] | None) -> str:
    """Format a number in six digits, or an array by its norm; empty for None.

    For a local derivative, `~` marks an estimated norm, and complex values give "complex".
    """
    if measured is None:
        return ""
    if "value" in measured:
        return _digits(measured["value"], 6)
    size = measured["norm"]
    if size is None:
        return "complex"
    return f"norm {'~' * (not measured.get('exact', True))}{_digits(size, 4)}"


def format_partial(partial: dict[str, Any] | None) -> str:
    """Format a local derivative: a number, or the shape and norm of a block of the Jacobian."""
    if partial is None or "value" in partial:
        return format_measure(partial)
    return f"[{','.join(map(str, partial['shape']))}] {format_measure(partial)}"


def _digits(x: Any, n: int) -> str:
    """Format a float with `n` significant digits; other values as they are."""
    if not isinstance(x, float):
        return str(x)
    text = f"{x:.{n}g}"
    return text if any(c in text for c in ".en") else f"{text}.0"


def headline(graph: dict[str, Any]) -> str:
    """Return the numbers of operations and active inputs of a graph, and its output, as text."""
    leaves = [v for v in graph["values"] if v["operation"] >= 0
              and not graph["operations"][v["operation"]]["inputs"]]  # fmt: skip
    active = sum(v["activity"] == "active" for v in leaves)
    n = sum(bool(op["inputs"]) for op in graph["operations"])
    out = format_measure(graph["values"][graph["output"]])
    inputs = f"{active} active input{'s' * (active != 1)}"
    return f"{n} operation{'s' * (n != 1)}, {inputs}, output {out}"


def format_table(graph: dict[str, Any], rows: int | None, lines: bool) -> str:
    """Format a graph as a table with one line for each value.

    Args:
      graph: the result of `ComputationalGraph.to_dict()`.
      rows: largest number of values, half of them the first and half the last; None: all.
      lines: whether to show the line of code that each value comes from.
    """
    operations = graph["operations"]
    values = [v for v in graph["values"] if v["operation"] >= 0]
    first, omitted = len(values), 0
    if rows is not None and len(values) > rows:
        first, omitted = rows - rows // 2, len(values) - rows
    shown = [*values[:first], *values[first + omitted :]]
    partials = local_derivatives(graph)
    table: list[list[str]] = [
        ["variable", "", "operation", "value", "adjoint", "local derivatives", "activity", "line"]
    ]
    scope: list[str] = []
    for i, v in enumerate(shown):
        op = operations[v["operation"]]
        if omitted and i == first:
            table.append([f"... {omitted:,} more; text(rows=None) shows all", *[""] * 7])
        if op["scope"] != scope:
            scope = op["scope"]
            table.append([f"in {' / '.join(scope)}" if scope else "outside all scopes", *[""] * 7])
        table.append(_row(graph, v, op, partials))
    width = 8 if lines else 7
    head = f"graph of {graph['function']}: {headline(graph)}"
    return "\n".join([head, _align([row[:width] for row in table])])


def _align(table: Sequence[Sequence[str]]) -> str:
    """Format a table in which a row with only a first cell spans all columns."""
    spans = [row[0] if not any(row[1:]) else "" for row in table]
    cells = [[""] * len(row) if span else row for row, span in zip(table, spans, strict=True)]
    lines = columns(cells).split("\n")
    return "\n".join(span or line for span, line in zip(spans, lines, strict=True))


def _row(graph: dict[str, Any], v: dict[str, Any], op: dict[str, Any],
         partials: dict[int, str]) -> list[str]:  # fmt: skip
    """Return the cells of all columns for a value."""
    inputs = " ".join(graph["values"][i]["name"] for i in op["inputs"])
    applied = f"{op['text']} {inputs}".rstrip()
    if op["closed"]:
        applied += f" ({op['closed']} equations inside)"
    line = shorten_place(op["where"]) if op["where"] else ""
    indent = "  " * bool(op["scope"])
    return [f"{indent}{v['name']}:{v['type']}", v["label"], applied, format_measure(v),
            format_measure(v["adjoint"]), partials.get(op["id"], ""), v["activity"],
            line]  # fmt: skip


def local_derivatives(graph: dict[str, Any]) -> dict[int, str]:
    """Return the local derivatives of each operation as text, by operation id."""
    texts: dict[int, list[str]] = {}
    for edge in graph["edges"]:
        if edge["partial"] is not None:
            name = graph["values"][edge["source"]]["name"]
            texts.setdefault(edge["target"], []).append(
                f"∂{name} {format_partial(edge['partial'])}"
            )
    return {op: ", ".join(parts) for op, parts in texts.items()}


def graphviz_text(graph: dict[str, Any]) -> str:
    """Format a graph (`ComputationalGraph.to_dict()`) in Graphviz's language."""
    values, operations = graph["values"], graph["operations"]
    lines = ["digraph {", "  rankdir=LR; node [shape=box, fontname=monospace];"]
    lines += _clusters(operations, values, 0, "  ", iter(range(len(operations))))
    for edge in graph["edges"]:
        source = values[edge["source"]]
        if source["operation"] < 0:
            continue
        passes = edge["partial"] is not None
        label = format_partial(edge["partial"])
        if edge["flow"] is not None:
            label += f"\nflow {format_measure(edge['flow'])}"
        style = "" if passes else ", style=dashed"
        pen = f"color={_PENS[source['activity']]}{style}"
        ends = f"o{source['operation']} -> o{edge['target']}"
        lines.append(f"  {ends} [label={_quoted(label)}, {pen}];")
    return "\n".join([*lines, "}"])


def _clusters(operations: Sequence[dict[str, Any]], values: Sequence[dict[str, Any]], depth: int,
              indent: str, numbers: Iterator[int]) -> Iterator[str]:  # fmt: skip
    """Yield the lines of the vertices, with a cluster for each scope at this depth.

    `numbers` yields the numbers of the clusters.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for op in operations:
        groups.setdefault(op["scope"][depth] if len(op["scope"]) > depth else "", []).append(op)
    for op in groups.pop("", []):
        outs = [values[i] for i in op["outputs"]]
        names = ", ".join(f"{v['name']} {v['label']}".rstrip() for v in outs)
        inputs = " ".join(values[i]["name"] for i in op["inputs"])
        label = f"{names} = {op['text']} {inputs}\n" + "\n".join(
            f"{format_measure(v)}"
            + (f"; adjoint {format_measure(v['adjoint'])}" if v["adjoint"] else "")
            for v in outs
        )
        activity = next((v["activity"] for v in outs), "constant")
        yield f"{indent}o{op['id']} [label={_quoted(label)}, color={_PENS[activity]}];"
    for scope, inside in groups.items():
        yield f"{indent}subgraph cluster{next(numbers)} {{ label={_quoted(scope)};"
        yield from _clusters(inside, values, depth + 1, f"{indent}  ", numbers)
        yield f"{indent}}}"


def _quoted(label: str) -> str:
    """Quote a label for Graphviz, whose escapes are those of JSON, without Unicode escapes."""
    return json.dumps(label, ensure_ascii=False)
