"""A pytest plugin for `tests/flag_matrix.py`: it skips tests, and writes outcomes.

XFORM_EVERY=8 keeps an eighth of the tests. The file XFORM_OUTCOMES gets a line for each.
"""

import os
import zlib
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    every = int(os.environ["XFORM_EVERY"])
    items[:] = [i for i in items if zlib.crc32(i.nodeid.encode()) % every == 2 % every]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.failed:
        with Path(os.environ["XFORM_OUTCOMES"]).open("a") as file:
            print("failed" if report.failed else "passed", report.nodeid, file=file)
