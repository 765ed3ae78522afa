"""A pytest plugin that notes which lines each test reaches. It needs Python 3.12 or newer.

    XFORM_TEST_PROFILE=folder python -m pytest -p experiments.tests.lines ...

It hands the lines of each test to `recorder`, as one hexadecimal number: bit `i` stands for the
line of the process's file `folder/<pid>.lines` with this number. Python calls a line's hook once
for each test, and then switches it off, so this costs little.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

_monitoring: Any = vars(sys).get("monitoring")
_TOOL = 1  # what Python reserves for coverage
_ROOT = str(Path.cwd()) + os.sep
_WATCHED = tuple(_ROOT + name + os.sep for name in ("xform", "models"))


class Lines:
    """The lines that have run since they were last taken."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{os.getpid()}.lines").open("w", buffering=1)
        self._numbers: dict[tuple[CodeType, int], int] = {}
        self._bits: set[int] = set()

    def watch(self, code: CodeType) -> None:
        """Watch the lines of a code object and of those in it."""
        _monitoring.set_local_events(_TOOL, code, _monitoring.events.LINE)
        for const in code.co_consts:
            if isinstance(const, CodeType):
                self.watch(const)

    def __call__(self, code: CodeType, line: int) -> Any:
        """Note that a line runs."""
        number = self._numbers.get((code, line))
        if number is None:
            number = self._numbers[code, line] = len(self._numbers)
            self._file.write(f"{code.co_filename.removeprefix(_ROOT)}:{line}\n")
        self._bits.add(number)
        return _monitoring.DISABLE

    def take(self) -> str:
        """Return the lines that have run since the last call."""
        number = sum(1 << i for i in self._bits)
        self._bits.clear()
        _monitoring.restart_events()
        return f"{number:x}"


class _Loader(importlib.machinery.SourceFileLoader):
    """A loader that watches the lines of the modules that it loads."""

    lines: Lines

    def get_code(self, fullname: str) -> CodeType | None:
        code = super().get_code(fullname)
        if code is not None and code.co_filename.startswith(_WATCHED):
            self.lines.watch(code)
        return code


def _finder(path: str) -> importlib.machinery.FileFinder:
    """Return what finds the modules in a folder of the project."""
    if not (path + os.sep).startswith(_WATCHED):
        raise ImportError(path)
    return importlib.machinery.FileFinder(path, (_Loader, [".py"]))


def _start(folder: Path) -> Lines:
    """Watch the lines of all modules of xform and models that are imported from now on."""
    _Loader.lines = lines = Lines(folder)
    _monitoring.use_tool_id(_TOOL, "lines of tests")
    _monitoring.register_callback(_TOOL, _monitoring.events.LINE, lines)
    sys.path_hooks.insert(0, _finder)
    sys.path_importer_cache.clear()
    return lines


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Start, before the file conftest.py imports xform."""
    early_config.stash[_LINES] = _start(Path(os.environ["XFORM_TEST_PROFILE"]))


_LINES = pytest.StashKey[Lines]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Leave the lines of a test where `recorder` finds them."""
    lines = item.config.stash[_LINES]
    lines.take()
    result = yield
    item.user_properties.append(("lines", lines.take()))
    return result
