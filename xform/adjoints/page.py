"""The HTML page of a graph: one file that opens from disk and needs no network."""

from __future__ import annotations

import os
from typing import Any

from xform.adjoints.printed import format_measure, format_partial, headline, local_derivatives
from xform.memory.page import assemble_page, web_file
from xform.storage.files import atomic_write
from xform.terminal.text import shorten_place

_SCRIPTS = ("steps", "layout", "picture", "values", "graph")


def write(graph: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write an HTML page that draws a graph and steps through it.

    The page needs no network, and its content security policy forbids requests. The file is written
    completely or not at all.

    Args:
      graph: the result of `ComputationalGraph.to_dict()`.
      path: the file to write.

    Cost: about 700 bytes of the file per operation.
    """
    own = lambda name: web_file(name, "xform.adjoints")
    scripts = [web_file("dom.js"), *(own(f"{name}.js") for name in _SCRIPTS)]
    style = web_file("page.css") + own("graph.css")
    title = f"Graph of {graph['function']}"
    page = assemble_page(title, own("graph.html"), style, scripts, _page_data(graph))
    with atomic_write(path) as partial:
        partial.write_text(page, encoding="utf-8")


def _page_data(graph: dict[str, Any]) -> dict[str, Any]:
    """Return the data of the page: the graph with its numbers formatted as text."""
    partials = local_derivatives(graph)
    groups, members = _groups(graph["operations"])
    copied = ("id", "name", "label", "type", "activity", "operation")
    values = [
        {k: v[k] for k in copied}
        | {"said": format_measure(v), "adjoint": format_measure(v["adjoint"])}
        for v in graph["values"]
    ]
    operations = [
        op
        | {
            "near": shorten_place(op["where"]),
            "groups": own,
            "partials": partials.get(op["id"], ""),
        }
        for op, own in zip(graph["operations"], members, strict=True)
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
    steps = {
        k: [[s["edge"], format_measure(s["total"])] for s in graph[k]] for k in ("pushed", "pulled")
    }
    return {
        "function": graph["function"],
        "about": headline(graph),
        "output": graph["output"],
        "values": values,
        "operations": operations,
        "edges": edges,
        "groups": groups,
        **steps,
    }


def _groups(operations: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Group operations by scope, in runs of consecutive operations.

    Returns the groups, each with its name, its parent group and its number of operations, and for
    each operation the groups around it, outermost first. A scope that is entered twice makes two
    groups, so that no edge leads back into a group that was left.
    """
    groups: list[dict[str, Any]] = []
    members: list[list[int]] = []
    before: list[int] = []
    for op in operations:
        own: list[int] = []
        for depth, name in enumerate(op["scope"]):
            same = len(before) > depth and before[:depth] == own
            if not (same and groups[before[depth]]["name"] == name):
                groups.append({"name": name, "parent": own[-1] if own else None, "size": 0})
                own.append(len(groups) - 1)
            else:
                own.append(before[depth])
            groups[own[-1]]["size"] += 1
        members.append(own)
        before = own
    return groups, members
