"""Compile for absent devices until the compiler has scheduled the program and assigned its memory.

The order of operations and the bytes are then final. Making the code of the kernels would take much
longer, above all for a TPU, and is left out.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xform.memory.lowering import lower
from xform.memory.remote import WORKER, environment, last_lines
from xform.memory.sharding import on_mesh
from xform.memory.targets import Target, parse_target

_LIMIT = 1800.0


def scheduled(fast: Any, args: Any, target: str) -> tuple[bytes, float]:
    """Return the HloProto of a jitted function, and the seconds that the compiler took for it.

    Raises:
      RuntimeError: the compiler failed.
    """
    parsed = parse_target(target)
    lowered, _ = lower(fast, on_mesh(args, {}, parsed, None, None), parsed)
    request = {
        "target": {"platform": parsed.platform, "topology": parsed.topology},
        "axes": lowered.axes,
        "donated": lowered.donated,
        "options": lowered.options,
    }
    with tempfile.TemporaryDirectory(prefix="scheduled-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps(request))
        (folder / "program").write_bytes(lowered.program)
        return _module(folder, parsed)


def _module(folder: Path, target: Target) -> tuple[bytes, float]:
    """Run the worker on a request, and stop it when it has written the scheduled program."""
    log, start = folder / "log", None
    with log.open("wb") as err:
        process = subprocess.Popen(
            [*WORKER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=err,
            stderr=err,
            env=environment(target, folder),
            start_new_session=True,
        )
        try:
            begin = time.monotonic()
            while time.monotonic() < begin + _LIMIT:
                ended = process.poll() is not None
                if start is None and any(_dumps(folder, "before_optimizations")):
                    start = time.monotonic()
                for path in _dumps(folder, "after_optimizations"):
                    if ended or any(_later(folder, path)):
                        now = time.monotonic()
                        return path.read_bytes(), now - (start or now)
                if ended:
                    break
                time.sleep(0.2)
            raise RuntimeError(f"no scheduled program:\n{last_lines(log.read_text())}")
        finally:
            process.kill()
            process.wait()


def _dumps(folder: Path, name: str) -> Iterator[Path]:
    """Yield the dumps of the step that the compiler wrote at some pass."""
    return (folder / "dump").glob(f"*jit_step*{name}.hlo.pb")


def _later(folder: Path, path: Path) -> Iterator[Path]:
    """Yield the files that the compiler wrote after a dump; the dump is then complete."""
    written = path.stat().st_mtime_ns
    return (p for p in (folder / "dump").iterdir() if p.stat().st_mtime_ns > written)
