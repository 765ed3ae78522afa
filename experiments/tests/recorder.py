"""A pytest plugin that writes down what each test costs: CPU seconds, memory, and phases.

    XFORM_TEST_PROFILE=folder python -m pytest -p experiments.tests.recorder ...

Each process of pytest writes `folder/<pid>.jsonl`. Its lines are about one test, or about what the
process did before its first test (`start` and `collect`). A thread looks at the stack of the main
thread every 5 ms. The innermost frame that `PHASES` knows says which phase the test is in.
"""

from __future__ import annotations

import builtins
import collections
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

_EVERY = 0.005  # seconds
_PAGE = resource.getpagesize()
# A part of a file's path, the function there (empty: each one), and the phase.
PHASES = (
    ("jax/_src/compilation_cache.py", "", "read or write the cache"),
    ("jax/_src/compiler.py", "_get_cache_key", "read or write the cache"),
    ("jax/_src/compiler.py", "", "compile"),
    ("jax/_src/interpreters/mlir.py", "", "lower"),
    ("jaxlib/mlir/", "", "lower"),
    ("jax/_src/interpreters/pxla.py", "__call__", "run"),
    ("jax/_src/array.py", "", "run"),
    ("jax/_src/dispatch.py", "", "run"),
    ("subprocess.py", "", "subprocess"),
    ("importlib", "", "import"),
    ("scipy/", "", "integer programs"),
    ("xform/planner/", "", "xform: planner"),
    ("xform/memory/", "", "xform: memory"),
    ("xform/passes/", "", "xform: passes"),
    ("xform/", "", "xform: the rest"),
    ("models/", "", "models"),
    ("jax/", "", "trace"),
    ("numpy/", "", "numpy"),
    ("tests/", "", "the test itself"),
    ("_pytest/", "", "pytest"),
)
_phase_of_code: dict[Any, str] = {}


def phase(frame: FrameType | None) -> str:
    """Return the phase of the innermost frame that has one."""
    while frame is not None:
        code = frame.f_code
        if code not in _phase_of_code:
            name, function = code.co_filename, code.co_name
            matches = (p for part, f, p in PHASES if part in name and f in ("", function))
            _phase_of_code[code] = next(matches, "")
        if _phase_of_code[code]:
            return _phase_of_code[code]
        frame = frame.f_back
    return "other"


def cpu() -> float:
    """Return the CPU seconds of this process and of its processes that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def resident() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


class Recorder:
    """Write a line for each test of this process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)
        self._samples: collections.Counter[str] = collections.Counter()
        self._main = threading.main_thread().ident or 0
        self._cpu, self._wall = 0.0, time.perf_counter()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(_EVERY)
            self._samples[phase(sys._current_frames().get(self._main))] += 1

    def write(self, what: str, **more: Any) -> None:
        """Write what was spent since the last line."""
        now, wall, samples = cpu(), time.perf_counter(), self._samples
        self._samples = collections.Counter()
        spent = {"cpu": now - self._cpu, "wall": wall - self._wall}
        line = {"what": what, **spent, "resident": resident(), "phases": samples, **more}
        if reached := getattr(builtins, "_faults_reached", None):  # see `faults`
            line["reached"] = sorted(reached)
            reached.clear()
        self._file.write(json.dumps(line) + "\n")
        self._cpu, self._wall = now, wall

    def pytest_collection(self) -> None:
        """Write what was spent before the collection."""
        self.write("start")

    def pytest_collection_finish(self) -> None:
        """Write what the collection took."""
        self.write("collect")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        """Write what the fixtures took that are made once for several tests."""
        before = cpu()
        result = yield
        if fixturedef.scope != "function":
            seconds = cpu() - before
            self._file.write(json.dumps({"fixture": fixturedef.argname, "cpu": seconds}) + "\n")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write that a test failed."""
        if report.failed:
            self._file.write(json.dumps({"failed": report.nodeid}) + "\n")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Write what a test took."""
        self.write("between")
        result = yield
        self.write("test", id=item.nodeid, **dict(item.user_properties))
        return result


def pytest_configure(config: pytest.Config) -> None:
    """Record, if a folder is named and if this process runs tests."""
    folder = os.environ.get("XFORM_TEST_PROFILE")
    workers = getattr(config.option, "numprocesses", None)
    if folder and not (workers and not hasattr(config, "workerinput")):
        config.pluginmanager.register(Recorder(Path(folder)))
