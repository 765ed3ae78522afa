"""Compile in a separate process (`worker.py`), so that this process is not affected.

The worker needs another environment, backend and devices than this process. Both exchange files in
a folder. This process always removes the folder, also if the compiler crashes, is killed or takes
too long, and if the user presses Ctrl-C. If this process itself is killed, the worker sees the end
of its standard input and removes the folder.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xform.errors import CompilationFailed
from xform.memory import worker
from xform.memory.answers import Answer
from xform.memory.lowering import LoweredProgram
from xform.memory.targets import Target

# `-P`: the worker must not import the modules in its own folder.
WORKER: Sequence[str] = (sys.executable, "-P", worker.__file__)

# Lines of a compiler's log that do not explain a failure: non-fatal messages and the preamble.
_UNINFORMATIVE = re.compile(
    r"[IWE]\d{4} |WARNING: All log messages before|Failed to find host bounds|\s*$"
)
# The most lines of a log in an error message.
_MOST_LINES = 8


def read_answer(data: dict[str, Any], module: bytes | None) -> Answer:
    """Return the `Answer` in a worker's plain data and HloProto."""
    return Answer(data.get("bytes", {}), data["compile_seconds"], module, data.get("error", ""))


def compile_there(lowered: LoweredProgram, target: Target, timeout_seconds: float) -> Answer:
    """Compile a program for a target in another process, and return the compiler's answer.

    Raises:
      CompilationFailed: the process failed, or took too long.

    Cost: the time of the compiler, and of a new process that imports JAX.
    """
    with tempfile.TemporaryDirectory(prefix="xform-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        request = {
            "target": {"platform": target.platform, "topology": target.topology},
            "axes": lowered.axes,
            "donated": lowered.donated,
            "options": lowered.options,
        }
        (folder / "request.json").write_text(json.dumps(request))
        (folder / "program").write_bytes(lowered.program)
        log = folder / "log"
        try:
            code = _run_worker(folder, log, environment(target, folder), timeout_seconds)
        except subprocess.TimeoutExpired as error:
            raise _failed(
                lowered, target, f"the compiler took more than {timeout_seconds:g} s", log
            ) from error
        if code != 0 or not (folder / "answer.json").exists():
            raise _failed(lowered, target, _exit_text(code), log)
        data = json.loads((folder / "answer.json").read_text())
        module = folder / "module"
        return read_answer(data, module.read_bytes() if module.exists() else None)


def environment(target: Target, folder: Path) -> dict[str, str]:
    """Return the worker's environment variables, without this process's settings of JAX.

    `folder` is for temporary files.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    flags = re.sub(r"--xla_force_host_platform_device_count=\S+", "", kept.get("XLA_FLAGS", ""))
    return kept | {
        "XLA_FLAGS": flags.strip(),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(target.count if target.platform == "cpu" else 1),
        "JAX_ENABLE_X64": "1",  # the program may have 64-bit types
        "JAX_ENABLE_COMPILATION_CACHE": "0",  # a cached program would not be dumped
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_LOG_DIR": "disabled",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # other processes may compile for TPU at the same time
        "TMPDIR": str(folder),
        "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
    }


def _run_worker(folder: Path, log: Path, env: dict[str, str], timeout_seconds: float) -> int:
    """Run the worker and return its exit status.

    Afterwards the worker and the processes that it started have always ended.
    """
    with log.open("wb") as err:
        process = subprocess.Popen(
            [*WORKER, str(folder)],
            stdin=subprocess.PIPE,  # nothing is written; it ends when this process ends
            stdout=err,
            stderr=err,
            env=env,
            start_new_session=True,  # Ctrl-C reaches this process only; ptxas is in the new group
        )
        with process:
            try:
                return process.wait(timeout_seconds)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


def _exit_text(code: int) -> str:
    """Return how a process ended, from its exit status, as text."""
    if code >= 0:
        return f"the compiler exited with status {code}"
    return f"the compiler was killed by {signal.Signals(-code).name}"


def _failed(lowered: LoweredProgram, target: Target, what: str, log: Path) -> CompilationFailed:
    """Return the error for a failed compilation: what happened, and the end of the log."""
    tail = last_lines(log.read_text(errors="replace")) if log.exists() else ""
    return CompilationFailed(
        f"{lowered.name} for target={target.name!r}",
        f"{what}{f'; the end of its log:{chr(10)}{tail}' if tail else ''}",
        "",
        "try a smaller program; if that fails too, report the compiler's log",
    )


def last_lines(log: str) -> str:
    """Return the last informative lines of a compiler's log."""
    lines = [line for line in log.splitlines() if not _UNINFORMATIVE.match(line)]
    return "\n".join(f"    {line}" for line in lines[-_MOST_LINES:])
