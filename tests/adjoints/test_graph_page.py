"""The data of a graph's page. test_graph_page_web.py tests its behaviour."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import xform

HARM = "</script><img src=x onerror='window.harm=1'>"


def looped(w: Any, x: Any) -> Any:
    step = lambda h, w: (jnp.tanh(h @ w), None)
    return jnp.sum(jax.nn.silu(lax.scan(step, x, w)[0]) ** 2)


ARGS = np.ones((3, 2, 2), np.float32) / 2, np.ones((1, 2), np.float32)


def page(g: Any, path: Path) -> str:
    g.save_html(path / "page.html")
    return (path / "page.html").read_text(encoding="utf-8")


def data(text: str) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_data_is_that_of_the_graph(tmp_path: Path) -> None:
    g = xform.adjoints.graph(looped, *ARGS)
    text = page(g, tmp_path)
    found = data(text)
    about = g.text().splitlines()[0].partition(": ")[2]
    assert f'<p id="about" class="muted">{about}</p>' in text
    assert [v["name"] for v in found["values"]] == [v.name for v in g.values]
    assert [e["target"] for e in found["edges"]] == [e.target for e in g.edges]
    for order, steps in (("pushed", g.pushed), ("pulled", g.pulled)):
        assert [edge for edge, _ in found[order]] == [s.edge for s in steps]
        total = found[order][-1][1]
        assert total.startswith("norm ")
    assert found["values"][0]["adjoint"] == f"norm {np.linalg.norm(g['w'].adjoint):.4g}"


def test_scopes_are_runs_and_no_edge_leads_back(tmp_path: Path) -> None:
    def f(x: Any) -> Any:
        for _ in range(2):
            with jax.named_scope("layer"):
                x = jnp.sin(x)
            x = x * 2
        return x + looped(*ARGS)

    found = data(page(xform.adjoints.graph(f, 0.5), tmp_path))
    names = [g["name"] for g in found["groups"]]
    assert names.count("layer") == 2  # entered twice
    assert [n for n in names if n.startswith("scan")] == [f"scan, iteration {t}" for t in range(3)]
    outermost = [op["groups"][0] if op["groups"] else -1 - op["id"] for op in found["operations"]]
    for e in found["edges"]:
        made_by = found["values"][e["source"]]["operation"]
        assert made_by < e["target"]
        same = [i for i, g in enumerate(outermost) if g == outermost[e["target"]]]
        assert made_by in same or made_by < min(same)
    for i, group in enumerate(found["groups"]):
        inside = [op["id"] for op in found["operations"] if i in op["groups"]]
        assert inside == list(range(inside[0], inside[-1] + 1))
        assert group["size"] == len(inside)


def harmful() -> Any:
    f = lambda x: xform.adjoints.name(jnp.sin(x["<img>"]), HARM)
    f.__name__ = HARM
    return xform.adjoints.graph(f, {"<img>": 0.5})


def test_texts_of_the_user_are_escaped(tmp_path: Path) -> None:
    text = page(harmful(), tmp_path)
    assert HARM not in text
    assert "<img" not in text
    assert text.count("</script>") == 2
    assert data(text)["function"] == HARM


def test_the_size_of_the_page(tmp_path: Path) -> None:
    def f(x: Any) -> Any:
        for _ in range(250):
            x = jnp.sin(x) * x
        return x

    text = page(xform.adjoints.graph(f, 0.5), tmp_path)
    assert len(text) < 700 * 500 + 60_000
