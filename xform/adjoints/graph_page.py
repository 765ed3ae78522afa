"""The HTML page of a graph: its data, with numbers formatted as text."""

from __future__ import annotations

import os
from typing import Any

from xform.adjoints.graph_text import format_measure, format_partial, headline, local_derivatives
from xform.page import writer
from xform.page.writer import web_file
from xform.terminal.text import shorten_place

_SCRIPTS = ("steps", "layout", "picture", "graph")


def write_page(graph: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write an HTML page that draws a graph and steps through it.

    See `write_page` of `xform.page.writer`.

    Args:
      graph: the result of `ComputationalGraph.to_dict()`.
      path: the file to write.

    Cost: about 700 bytes of the file per operation.
    """
    title, body, data = f"Graph of {graph['function']}", web_file("graph.html"), _page_data(graph)
    writer.write_page(path, title, headline(graph), body, scripts=_SCRIPTS, data=data)


def _page_data(graph: dict[str, Any]) -> dict[str, Any]:
    """Return the data of the page: the graph with its numbers formatted as text."""
    partials = local_derivatives(graph)
    groups, groups_of = _groups(graph["operations"])
    copied = ("id", "name", "label", "type", "activity", "operation")
    values = [
        {k: v[k] for k in copied}
        | {"value_text": format_measure(v), "adjoint": format_measure(v["adjoint"])}
        for v in graph["values"]
    ]
    operations = [
        op
        | {
            "short_where": shorten_place(op["where"]),
            "groups": own_groups,
            "partials": partials.get(op["id"], ""),
        }
        for op, own_groups in zip(graph["operations"], groups_of, strict=True)
    ]
    edges = [
        {
            "id": e["id"],
            "source": e["source"],
            "target": e["target"],
            "partial": format_partial(e["partial"]),
            "short": format_measure(e["partial"]),
            "flow": format_measure(e["flow"]),
            "number": "value" in (e["partial"] or {}),
        }
        for e in graph["edges"]
    ]
    updates = {
        order: [[update["edge"], format_measure(update["total"])] for update in graph[order]]
        for order in ("pushed", "pulled")
    }
    return {
        "function": graph["function"],
        "output": graph["output"],
        "values": values,
        "operations": operations,
        "edges": edges,
        "groups": groups,
        **updates,
    }


def _groups(operations: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Group operations by scope, in runs of consecutive operations.

    Returns the groups, each with its name, its parent group and its number of operations, and for
    each operation the groups around it, outermost first. A scope that is entered twice makes two
    groups, so that no edge leads back into a group that was left.
    """
    groups: list[dict[str, Any]] = []
    groups_of: list[list[int]] = []
    previous: list[int] = []  # the groups of the operation before
    for op in operations:
        own: list[int] = []
        for depth, name in enumerate(op["scope"]):
            same_parent = len(previous) > depth and previous[:depth] == own
            if not (same_parent and groups[previous[depth]]["name"] == name):
                groups.append({"name": name, "parent": own[-1] if own else None, "size": 0})
                own.append(len(groups) - 1)
            else:
                own.append(previous[depth])
            groups[own[-1]]["size"] += 1
        groups_of.append(own)
        previous = own
    return groups, groups_of
