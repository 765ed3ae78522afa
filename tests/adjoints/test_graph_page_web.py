"""The page of a graph in a real browser: steps both ways, scopes, keys, themes, large graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from selenium import webdriver
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

import xform
from tests.adjoints.test_graph_page import ARGS, HARM, harmful, looped
from tests.browser import NEEDS_A_BROWSER, Page, check_silence, opened, started

pytestmark = NEEDS_A_BROWSER
Open = Callable[..., Page]


def worked(x: Any, y: Any, z: Any) -> Any:
    q = x / y
    return q - jnp.exp(q) * (x - z)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    found = started(tmp_path_factory.mktemp("profile"))
    yield found
    found.quit()


@pytest.fixture
def shown(browser: webdriver.Chrome, tmp_path: Path) -> Iterator[Open]:
    """Open the page of a graph; after the test, the browser's console must be empty."""

    def page_of(graph: Any = None) -> Page:
        graph = xform.adjoints.graph(worked, 3.3, 1.1, 2.3) if graph is None else graph
        graph.save_html(tmp_path / "page.html")
        return opened(browser, tmp_path / "page.html")

    yield page_of
    check_silence(browser)


def vertex(page: Page, name: str) -> list[str]:
    """Return the lines of a vertex whose first line begins with the name."""
    script = "return [...document.querySelectorAll('.vertex')].map(g => [...g.children].slice(1).map(t => t.textContent))"  # noqa: E501
    (found,) = [v for v in page.browser.execute_script(script) if v[0].startswith(name)]
    return found


def test_the_headline_and_the_first_sight(shown: Open) -> None:
    page = shown()
    assert page.text("#function") == "Graph of worked"
    assert page.text("#about") == "5 operations, 3 active inputs, output -17.0855"
    assert vertex(page, "d = div a b") == ["d = div a b", "3.0", ""]
    assert len(page.texts(".vertex")) == 8
    assert len(page.texts(".edge")) == 9
    assert page.text("#found") == "8 values"


def test_steps_forward(shown: Open) -> None:
    page = shown()
    page.one("#first").click()
    assert page.text("#now").startswith("Nothing has run yet")
    assert len(page.texts(".vertex.later")) == 8
    page.one("#next").click()
    assert page.text("#now").startswith("Forward, 1 of 8: a = input x, which is 3.3.")
    for _ in range(3):
        page.one("#next").click()
    assert page.text("#now").startswith("Forward, 4 of 8: d = div a b, which is 3.0.")
    assert "test_graph_page_web.py:" in page.text("#now")
    assert page.texts(".vertex.now .head") == ["d = div a b"]
    assert len(page.texts(".edge.now")) == 2
    assert len(page.texts(".vertex.later")) == 4
    page.one("#back").click()
    assert page.text("#now").startswith("Forward, 3 of 8: c = input z")


@pytest.mark.parametrize("order", ["pushed", "pulled"])
def test_steps_backward_edge_by_edge(order: str, shown: Open) -> None:
    graph = xform.adjoints.graph(worked, 3.3, 1.1, 2.3)
    page = shown(graph)
    page.one(f"[data-order={order}]").click()
    page.one("#turn").click()
    assert page.text("#now") == "Backward pass: the adjoint of the output h is 1."
    for step in getattr(graph, order):
        page.one("#next").click()
        edge = graph.edges[step.edge]
        source, op = graph.values[edge.source].name, graph.operations[edge.target]
        consumer = graph.values[op.outputs[0]].name
        way = (
            f"{consumer} pushes to {source}"
            if order == "pushed"
            else f"{source} pulls from {consumer}"
        )
        now = page.text("#now")
        assert way in now
        assert f"is now {float(step.total):.6g}".removesuffix(".0") in now
        assert len(page.texts(".edge.now")) == 1
        assert len(page.texts(".vertex.now")) == 2
    assert page.one("#next").get_attribute("disabled")
    for v in graph.values:
        assert vertex(page, f"{v.name} = ")[2] == f"adjoint {_digits(v.adjoint)}"


def _digits(x: Any) -> str:
    text = f"{float(x):.6g}"
    return text if "." in text or "e" in text else f"{text}.0"


def test_both_orders_end_alike(shown: Open) -> None:
    page = shown(xform.adjoints.graph(looped, *ARGS))
    ends = []
    for order in ("pushed", "pulled"):
        page.one(f"[data-order={order}]").click()
        page.one("#last").click()
        ends.append(sorted(page.texts(".vertex")))
    assert ends[0] == ends[1]


def test_scopes_open_and_close(shown: Open) -> None:
    page = shown(xform.adjoints.graph(looped, *ARGS))
    every = len(page.texts(".vertex"))
    page.one("#close-all").click()
    heads = page.texts(".vertex .head")
    assert "▸ scan, iteration 1" in heads
    assert len(heads) < every
    trip = next(v for v in page.browser.find_elements("css selector", ".vertex.scope")
                if "iteration 1" in v.text)  # fmt: skip
    trip.click()
    assert "▸ scan, iteration 1" not in page.texts(".vertex .head")
    assert "▸ scan, iteration 0" in page.texts(".vertex .head")
    page.one("[data-scope]").click()
    assert page.texts(".vertex .head") == heads
    page.one("#open-all").click()
    assert len(page.texts(".vertex")) == every
    page.one("#close-all").click()
    page.one("#last").click()
    assert vertex(page, "▸ scan, iteration 0")[1] == "4 of 4 operations"


def test_keys_and_the_slider(shown: Open) -> None:
    page = shown()
    picture = page.one("#picture")
    picture.send_keys(Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.text("#now").startswith("Forward, 2 of 8")
    picture.send_keys(Keys.ARROW_LEFT)
    assert page.text("#now").startswith("Forward, 1 of 8")
    picture.send_keys(Keys.END)
    assert page.text("#now").startswith("Backward, 9 of 9")
    page.one("#step").send_keys(Keys.ARROW_LEFT)
    assert page.text("#now").startswith("Backward, 8 of 9")


def test_notes(shown: Open) -> None:
    page = shown()
    note = page.hover(".vertex")
    assert "operation" in note
    assert "f32[]" in note or "f64[]" in note


def test_search_and_the_row_of_the_step(shown: Open) -> None:
    page = shown()
    page.one("#first").click()
    page.one("#next").click()
    assert page.texts("#table tr[aria-current] td:nth-child(2)") == ["x"]
    assert page.search("exp") == "1 value of 8 match"
    assert page.search("page_web active") == "5 values of 8 match"


def test_light_and_dark(shown: Open) -> None:
    page = shown()
    ground = lambda: page.one("body").value_of_css_property("background-color")
    light = ground()
    page.one("#theme").click()
    dark = ground()
    assert light != dark
    page = shown()
    page.prefer("dark")
    assert ground() == dark
    said = lambda _: page.text("#theme").endswith("Light")
    assert WebDriverWait(page.browser, 10).until(said)


@pytest.mark.parametrize("width", [320, 400, 1400])
def test_no_width_is_too_small(width: int, shown: Open) -> None:
    page = shown(xform.adjoints.graph(looped, *ARGS))
    page.size(width)
    page.one("#last").click()
    assert page.browser.execute_script("return document.documentElement.scrollWidth") == width


def test_texts_of_the_user_do_no_harm(shown: Open) -> None:
    page = shown(harmful())
    page.one("#last").click()
    assert page.text("#function") == f"Graph of {HARM}"
    assert HARM in page.texts("#table td:nth-child(2)")
    assert page.texts("img") == []
    assert page.browser.execute_script("return window.harm") is None


def test_thousands_of_operations(shown: Open) -> None:
    def f(x: Any) -> Any:
        for _ in range(1000):
            x = jnp.sin(x) * x
        return x

    page = shown(xform.adjoints.graph(f, 1.5))
    assert page.text("#window").startswith("The picture shows 150 of 2,001 vertices")
    assert len(page.texts(".vertex")) == 150
    for button in ("first", "last", "turn", "back"):
        script = "const t = performance.now(); document.getElementById(arguments[0]).click(); return performance.now() - t"  # noqa: E501
        # Far above the usual times, so that a busy machine does not fail this test.
        assert page.browser.execute_script(script, button) < 2000
    assert len(page.texts(".vertex.now")) == 1
    assert len(page.texts("#table tbody tr")) == 100
    page.one("#more").click()
    assert len(page.texts("#table tbody tr")) == 600
