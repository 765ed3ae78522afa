"""A browser for the tests of pages, if the machine has one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
NEEDS_A_BROWSER = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER),
        reason="no chromium and chromedriver here (Debian: apt install chromium chromium-driver)",
    ),
]
_FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars
    --disable-background-networking --disable-component-update --disable-sync
"""


class Page:
    """A page in the browser, with the queries that the tests need."""

    def __init__(self, browser: webdriver.Chrome) -> None:
        self.browser = browser

    def one(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
        return self.browser.execute_script(script, selector)

    def text(self, selector: str) -> str:
        (found,) = self.texts(selector)
        return found

    def column(self, n: int) -> list[str]:
        return self.texts(f"#table tbody td:nth-child({n})")

    def hover(self, selector: str, right: float = 0.5, down: float = 0.5) -> str:
        """Return the tooltip at this fraction of an element's width and height."""
        self.at(selector, right, down).perform()
        return self.text("#tip") if self.one("#tip").is_displayed() else ""

    def at(self, selector: str, right: float = 0.5, down: float = 0.5) -> ActionChains:
        element = self.one(selector)
        self.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        width, height = element.size["width"], element.size["height"]
        x, y = round((right - 0.5) * width), round((down - 0.5) * height)
        return ActionChains(self.browser, 20).move_to_element_with_offset(element, x, y)

    def search(self, words: str) -> str:
        field = self.one("#search")
        field.clear()
        field.send_keys(words)
        return self.text("#found")

    def size(self, width: int, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, scheme: str) -> None:
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)


def opened(browser: webdriver.Chrome, path: Path) -> Page:
    """Open a page from disk, in a wide window and the light theme."""
    page = Page(browser)
    page.size(1280)
    page.prefer("light")
    browser.get(path.as_uri())
    return page


def check_silence(browser: webdriver.Chrome) -> None:
    """Check that the browser's console is empty and that nothing was loaded from the network."""
    assert browser.get_log("browser") == []
    fetched = "return performance.getEntriesByType('resource').map(e => e.name)"
    assert browser.execute_script(fetched) == []


def started(profile: Path) -> webdriver.Chrome:
    """Start a browser with its own profile folder that records the console."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in (*_FLAGS.split(), f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
