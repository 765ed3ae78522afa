"""The page in a real browser: hover, search, sort, zoom, themes, keys, 10,000 buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.browser import NEEDS_A_BROWSER, Page, check_silence, opened, started
from tests.memory.samples import HARM, harmful, transformer
from xform.memory.report_page import write
from xform.terminal.text import human_bytes

pytestmark = NEEDS_A_BROWSER
SMALL = transformer(8)
LIVE = sum(b["at_peak"] for b in SMALL["buffers"])
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    found = started(tmp_path_factory.mktemp("profile"))
    yield found
    found.quit()


@pytest.fixture
def shown(browser: webdriver.Chrome, tmp_path: Path) -> Iterator[Open]:
    """Open a page of reports; after the test, the browser's console must be empty."""

    def page_of(*reports: dict[str, Any], labels: tuple[str, ...] = ()) -> Page:
        write(reports or (SMALL,), tmp_path / "page.html", labels)
        return opened(browser, tmp_path / "page.html")

    yield page_of
    check_silence(browser)


def test_advice_is_a_list_or_is_not_there(shown: Open) -> None:
    assert shown().texts("#advice li") == SMALL["advice"]
    assert not shown(SMALL | {"advice": []}).one("#advice").is_displayed()


def test_what_the_compiler_added_is_a_list(shown: Open) -> None:
    report = transformer(1)
    page = shown(report)
    assert page.texts("#added li") == [
        "dot_general runs again in 2 runs, 1.0 GFLOP of products, at model.py:9 (layer)",
        "copies: 1.0 GiB at the peak, 2.0 GiB moved in 1 run, most at model.py:7 (layer)",
    ]
    page = shown(report | {"added": [], "recomputed": []})
    assert not page.one("#added").is_displayed()


def test_the_room_is_that_below_which_xla_recomputes_nothing(shown: Open) -> None:
    report = transformer(1)
    limited = report["device"] | {"limit_bytes": report["total_bytes"] + 2**30}
    room = shown(report | {"device": limited, "constant_bytes": 0}).text("#room")
    assert room.startswith("Fits: 1.0 GiB")
    assert "XLA recomputes operations above" in room


def test_the_headline(shown: Open) -> None:
    page = shown()
    assert page.text("#headline") == f"{human_bytes(SMALL['total_bytes'])} of 16.0 GiB"
    assert page.text("#room") == "Fits: 10.2 GiB (63.9%) to spare"
    assert page.text("#live-title") == "Live buffers at the peak"
    assert "32.0 KiB" in page.text("#legend li:nth-child(3)")
    page = shown(transformer(8, capacity=2**32))
    assert page.text("#room") == "Does not fit: 1.8 GiB too much"
    page = shown(transformer(8, capacity=None))
    assert page.text("#room") == "The capacity of the device is not known."


def test_hover_over_the_timeline_shows_the_largest_there(shown: Open) -> None:
    note = shown().hover("#timeline")
    step = int(note.removeprefix("step ").partition(":")[0])
    assert f"{human_bytes(SMALL['live'][step])} live" in note
    largest = max(
        (b for b in SMALL["buffers"] if b["born"] <= step <= b["dies"]), key=lambda b: b["bytes"]
    )
    assert largest["where"] in note
    assert human_bytes(largest["bytes"]) in note


def test_hover_over_a_box_shows_its_line(shown: Open) -> None:
    note = shown().hover("#treemap", 0.1, 0.5)
    for text in ("model.py:52 (layer)", "dot_general", "bf16[8,16,1024,1024]", "activation"):
        assert text in note
    assert "saved by min_cut" in note
    assert "/attention/scores" in note


def test_search_filters_and_adds_up(shown: Open) -> None:
    page = shown()
    assert page.text("#found") == f"{LIVE} buffers, 5.8 GiB"
    assert page.search("model.py:52 DOT").startswith(f"8 buffers of {LIVE} match: 2.0 GiB, 34.6%")
    assert set(page.column(3)) == {"model.py:52 (layer)"}
    assert "2.0 GiB" in page.text("#trail")
    assert "model.py:52" in page.hover("#treemap", 0.9, 0.9)
    assert page.search("no such thing").startswith("0 buffers")
    assert page.hover("#treemap") == ""


def test_sort(shown: Open) -> None:
    page = shown()
    head = page.one("[data-sort=scope]")
    for order in ("ascending", "descending"):
        head.click()
        assert page.one("th[aria-sort]").get_attribute("aria-sort") == order
        found = [t for t in page.column(6) if t.startswith("layers/")]
        layers = [int(scope.split("/")[1]) for scope in found]
        assert layers == sorted(layers, reverse=order == "descending")
    page.one("[data-sort=dies]").click()
    assert page.column(9)[0] == str(max(b["dies"] for b in SMALL["buffers"]))


def test_a_long_path_is_short_in_the_table_and_whole_in_the_note(shown: Open) -> None:
    report = transformer(1)
    for made in report["buffers"]:
        made["where"] = "/home/somebody/model/layer.py:3 (f)"
    page = shown(report)
    assert set(page.column(3)) == {"…/model/layer.py:3 (f)"}
    assert "/home/somebody/model/layer.py:3 (f)" in page.hover("#treemap")


def test_more_rows(shown: Open) -> None:
    page = shown()
    assert len(page.column(1)) == 100
    page.one("#more").click()
    assert len(page.column(1)) == LIVE
    assert not page.one("#more").is_displayed()


def test_zoom_and_pan_of_the_timeline(shown: Open) -> None:
    page = shown()

    def step(right: float) -> int:
        return int(page.hover("#timeline", right).removeprefix("step ").partition(":")[0])

    before = step(0.2), step(0.8)
    origin = ScrollOrigin.from_element(page.one("#timeline"))
    for _ in range(4):
        ActionChains(page.browser).scroll_from_origin(origin, 0, -120).perform()
    near = step(0.2), step(0.8)
    assert before[0] < near[0] < near[1] < before[1]
    page.at("#timeline").click_and_hold().move_by_offset(200, 0).release().perform()
    assert step(0.2) < near[0]
    assert page.text("#live-title") == "Live buffers at the peak"  # a drag is not a click
    page.one("#zoom-reset").click()
    assert (step(0.2), step(0.8)) == before
    page.one("#zoom-in").click()
    assert step(0.8) < before[1]


def test_a_click_inspects_a_step(shown: Open) -> None:
    page = shown()
    page.at("#timeline", 0.9).click().perform()
    step = int(page.text("#live-title").removeprefix("Live buffers at step "))
    live = sum(b["counted"] and b["born"] <= step <= b["dies"] for b in SMALL["buffers"])
    assert page.text("#found") == f"{live} buffers, {human_bytes(SMALL['live'][step])}"
    page.one("#to-peak").click()
    assert page.text("#found") == f"{LIVE} buffers, 5.8 GiB"


def test_zoom_into_a_group(shown: Open) -> None:
    page = shown()
    page.at("#treemap", 0.1).click().perform()
    assert page.texts("#trail button") == ["all", "activation"]
    page.at("#treemap", 0.1).click().perform()
    assert page.texts("#trail button") == ["all", "activation", "model.py:52 (layer)"]
    page.search("layers/1")  # the group stays, with the matches in it
    assert page.texts("#trail button")[-1] == "activation"
    page.one("#trail button").click()
    assert page.texts("#trail button") == ["all"]


def test_groupings(shown: Open) -> None:
    page = shown()
    page.one("[data-group=where]").click()
    page.at("#treemap", 0.1).click().perform()
    assert page.texts("#trail button") == ["all", "model.py:52 (layer)"]
    page.one("[data-group=scope]").click()
    page.at("#treemap", 0.1).click().perform()
    assert page.texts("#trail button") == ["all", "layers"]


def test_keys(shown: Open) -> None:
    page = shown()
    timeline, treemap = page.one("#timeline"), page.one("#treemap")
    timeline.send_keys(Keys.ARROW_RIGHT)
    assert page.text("#say").startswith(f"step {SMALL['peak_step'] + 1}: ")
    timeline.send_keys("+", Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ENTER)
    assert page.text("#live-title") == f"Live buffers at step {SMALL['peak_step'] - 1}"
    treemap.send_keys(Keys.ARROW_RIGHT)
    assert page.text("#say").startswith("activation, ")
    treemap.send_keys(Keys.ENTER)
    assert page.texts("#trail button") == ["all", "activation"]
    treemap.send_keys(Keys.ESCAPE)
    assert page.texts("#trail button") == ["all"]
    page.one("[data-sort=name]").send_keys(Keys.ENTER)
    assert page.one("th[aria-sort]").text.startswith("Name")


def test_light_and_dark(shown: Open) -> None:
    page = shown()
    ground = lambda: page.one("body").value_of_css_property("background-color")
    boxes = "const c = document.querySelector('#treemap'); return c.toDataURL()"
    light, drawn = ground(), page.browser.execute_script(boxes)
    page.one("#theme").click()
    dark = ground()
    assert light != dark
    assert drawn != page.browser.execute_script(boxes)
    page.one("#theme").click()
    assert ground() == light
    page = shown()
    page.prefer("dark")
    assert ground() == dark
    assert page.text("#theme").endswith("Light")


@pytest.mark.parametrize("width", [320, 480, 1280])
def test_no_width_is_too_small(width: int, shown: Open) -> None:
    page = shown(SMALL, SMALL)
    page.size(width)
    assert page.browser.execute_script("return document.documentElement.scrollWidth") == width


def test_a_switch_between_reports(shown: Open) -> None:
    other = transformer(8, saves=False)
    page = shown(SMALL, other, labels=("save everything", "min_cut"))
    assert page.texts("#reports tbody button") == ["save everything", "min_cut"]
    page.browser.find_elements(By.CSS_SELECTOR, "#reports tbody button")[1].click()
    assert page.text("#headline").startswith(human_bytes(other["total_bytes"]))
    assert page.text("#reports tr[aria-current] button") == "min_cut"
    assert human_bytes(other["total_bytes"]) in page.text("#found")


def test_a_report_without_steps_or_buffers(shown: Open) -> None:
    page = shown(SMALL | {"live": [], "buffers": [], "peak_step": 0})
    assert page.text("#found") == "0 buffers, 0 B"
    assert page.hover("#timeline") == page.hover("#treemap") == ""
    page.one("#timeline").send_keys(Keys.ARROW_RIGHT, "+", "0", Keys.ENTER)
    page.one("#treemap").send_keys(Keys.ARROW_RIGHT, Keys.ENTER, Keys.ESCAPE)


def test_texts_of_the_user_do_no_harm(shown: Open) -> None:
    page = shown(harmful(), harmful(), labels=(HARM, HARM))
    assert HARM in page.hover("#timeline")
    assert HARM in page.hover("#treemap")
    for by in ("where", "scope", "category"):
        page.one(f"[data-group={by}]").click()
        page.at("#treemap", 0.1).click().perform()
    assert HARM in page.column(3)
    assert page.text("#function") == f"Memory of {HARM}"
    assert page.texts("img") == []
    assert page.browser.execute_script("return window.harm") is None


def test_ten_thousand_buffers(shown: Open) -> None:
    report = transformer(400)
    assert sum(b["at_peak"] for b in report["buffers"]) > 10_000
    page = shown(report)
    assert page.search("layers/39 model.py:52").startswith("11 buffers of 10,4")
    took = "return performance.getEntriesByType('measure').map(e => [e.name, e.duration])"
    times = page.browser.execute_script(took)
    # Far above the usual times, so that a busy machine does not fail this test.
    assert all(ms < 2000 for _, ms in times), times


def test_legend_lists_bytes_not_attributed_to_buffers(shown: Open) -> None:
    assert "not attributed" not in shown().text("#legend")
    page = shown(SMALL | {"live": [n + 2**30 for n in SMALL["live"]]})
    assert page.texts("#legend li")[-1] == "not attributedpadding and gaps1.0 GiB"


def test_page_shows_compiled_function_arguments_and_verified_policy(shown: Open) -> None:
    page = shown()
    assert "Compiled: the function as it is, policy save_dots" in page.text("#description")
    assert "Arguments: state (3 arrays" in page.text("#description")
    assert page.text("#policy").startswith("Policy to copy: xform.policies.save_dots verified: ")


def test_suggested_auto_policy_is_shown_as_not_verified(shown: Open) -> None:
    page = shown(SMALL | {"code": ""})
    assert 'policy="auto" not verified' in page.text("#policy")
    without = [b | {"category": "temporary"} for b in SMALL["buffers"]]
    assert not shown(SMALL | {"code": "", "buffers": without}).one("#policy").is_displayed()


def test_two_reports_stand_side_by_side(shown: Open) -> None:
    other = transformer(8, saves=False)
    page = shown(SMALL, other, labels=("all", "few"))
    heads = page.texts("#difference thead th")
    assert heads == ["", "all", "few", "Difference"]
    (total,) = (row for row in page.texts("#difference tbody tr") if row.startswith("total"))
    less = other["total_bytes"] - SMALL["total_bytes"]
    sign = "+" if less > 0 else "\u2212"
    assert total.endswith(f"{sign}{human_bytes(abs(less))}")
    assert "activation" in page.text("#difference")
    page.one("#reports tbody tr:nth-child(2) button").click()
    assert page.texts("#difference thead th") == ["", "few", "all", "Difference"]


def test_an_unknown_capacity_is_no_error(shown: Open) -> None:
    unknown = SMALL | {"device": SMALL["device"] | {"capacity_bytes": None, "limit_bytes": None}}
    page = shown(unknown, unknown, labels=("a", "b"))
    assert page.texts("#reports .over") == []
    assert page.text("#room") == "The capacity of the device is not known."
    assert page.one("#room").get_attribute("class") == "muted"


def test_the_last_column_is_seen_at_1400(shown: Open) -> None:
    why = "on the cheapest cut, of a loop that is kept"
    long = [b | {"scope": "decoder/" + b["scope"], "why": why} for b in SMALL["buffers"]]
    page = shown(SMALL | {"buffers": long})
    page.size(1400)
    script = """
        const table = document.querySelector("#table"), last = table.querySelector("th:last-child");
        return [last.getBoundingClientRect().right, table.getBoundingClientRect().right];
    """
    right, edge = page.browser.execute_script(script)
    assert right <= edge + 1


def test_a_category_without_bytes_at_the_peak_says_none(shown: Open) -> None:
    assert "0 B" not in shown().texts("#legend li")
