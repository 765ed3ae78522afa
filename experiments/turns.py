"""Run many measurements on one device: compile in many processes at once, then run one at a time.

Each measurement has two parts. The first part compiles, and puts its results into a file. The
second part waits for its turn, runs on a quiet device, and adds its results. Both parts may be in
one process. A process of its own for the second part holds no memory that the first part took.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Found = dict[str, Any]


def in_turn(
    commands: Mapping[str, Sequence[str]],
    folder: Path,
    parallel: int,
    limit: float,
    keep: Callable[[str, Found], None],
    then: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Run the commands, and call `keep` with the name and the results of each.

    Args:
      commands: for each name, the command of a process for its first part, and for its second part
        without `then`.
      folder: where the processes leave their files.
      parallel: how many processes compile at once.
      limit: seconds after which no more time is given to compilations.
      keep: called for each measurement that has ended or failed.
      then: for each name, the command of a process for its second part.
    """
    start, processes, rest = time.perf_counter(), {}, list(commands)
    seconds = processes if then is None else {}
    try:
        while rest or any(_compiles(name, p, folder) for name, p in processes.items()):
            if time.perf_counter() > start + limit:
                break
            busy = sum(_compiles(name, p, folder) for name, p in processes.items())
            for name in rest[: parallel - busy]:
                processes[name] = subprocess.Popen(commands[name])
                rest.remove(name)
            time.sleep(0.2)
        spent = time.perf_counter() - start
        print(f"{len(processes)} of {len(commands)} begun, {spent:.0f} s", flush=True)
        for name, process in processes.items():
            if not _read(name, folder):
                process.kill()
        names = list(processes)
        for i, name in enumerate(names):
            for coming in names[i : i + 2]:  # the next process imports while this one runs
                if then is not None and coming not in seconds and _compiled(coming, folder):
                    seconds[coming] = subprocess.Popen(then[coming])
            if name in seconds and seconds[name].poll() is None and _compiled(name, folder):
                (folder / f"{name}.turn").touch()
                seconds[name].wait(timeout=120)
            keep(name, _read(name, folder) or {"failed": "not compiled in time"})
    finally:
        for process in (*processes.values(), *seconds.values()):
            process.kill()


def first_part(name: str, folder: Path, run: Callable[[], tuple[Any, Found]]) -> Any:
    """Put what `run` has found into a file; return what it has made. None if it fails."""
    try:
        made, found = run()
    except Exception as error:
        return _write(name, folder, {"failed": f"{type(error).__name__}: {error}"[:400]})
    _write(name, folder, found)
    return made


def second_part(name: str, folder: Path, run: Callable[[], Found]) -> None:
    """Wait for the turn, and add the results of `run`, or its error, to those of the first part."""
    while not (folder / f"{name}.turn").exists():
        time.sleep(0.05)
    try:
        found = run()
    except Exception as error:
        found = {"failed": f"{type(error).__name__}: {error}"[:400]}
    _write(name, folder, (_read(name, folder) or {}) | found)


def wait_for(name: str, folder: Path) -> Found:
    """Return what the first part of another measurement has found, when it is there."""
    while (found := _read(name, folder)) is None:
        time.sleep(0.2)
    return found


def _compiles(name: str, process: subprocess.Popen[bytes], folder: Path) -> bool:
    return process.poll() is None and _read(name, folder) is None


def _compiled(name: str, folder: Path) -> bool:
    return "failed" not in (_read(name, folder) or {"failed": ""})


def _read(name: str, folder: Path) -> Found | None:
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _write(name: str, folder: Path, found: Found) -> None:
    """Write results so that a reader never sees half of them."""
    partial = folder / f"{name}.partial"
    partial.write_text(json.dumps(found))
    partial.rename(folder / f"{name}.json")
