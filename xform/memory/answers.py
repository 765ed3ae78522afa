"""Answers of compilers, kept: in this process, and on disk where the user keeps compiled programs.

JAX writes what it compiles to `jax_compilation_cache_dir` if that is set; a folder in it has the
answers, one file each: a line of JSON, and the module. What cannot be read or written is no error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import jax

from xform.files import whole
from xform.packages import version
from xform.recent import Recent

_FORMAT = "xform answer 1"
# What decides besides the program and the target.
_COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt")
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a compiler said.

    Attributes:
      bytes: by kind, see `worker.KINDS`; none if the program was refused.
      compile_seconds: wall time of the compiler.
      module: the HloProto of the compiled program, with its buffer assignment.
      error: why the program was refused.
    """

    bytes: dict[str, int]
    compile_seconds: float
    module: bytes | None
    error: str = ""

    @property
    def failed(self) -> bool:
        """Whether the compiler failed, and not because the program is too big for the device."""
        return bool(self.error) and "RESOURCE_EXHAUSTED" not in self.error


# In the process.
_remembered: Recent[str, Answer] = Recent(32)


def answered(program: bytes, *decides: str, ask: Callable[[], Answer]) -> Answer:
    """What was answered to a program before, or is now; `decides` is what else it depends on."""
    key = hashlib.sha256(program)
    flags = (os.environ.get(name, "") for name in _FLAGS)
    versions = (version(package) or "" for package in _COMPILERS)
    for part in (*decides, *flags, *versions, _FORMAT):
        key.update(b"\0" + part.encode())
    name = key.hexdigest()
    if name not in _remembered:
        file = _file(name)
        answer = _read(file) if file else None
        if answer is None:
            answer = ask()
            if answer.failed:
                return answer  # it may be another one the next time
            if file:
                _write(file, answer)
        _remembered[name] = answer
    return _remembered[name]


def _file(name: str) -> Path | None:
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    if not folder or "://" in folder:
        return None
    return Path(folder) / "xform" / f"{name}.answer"


def _read(file: Path) -> Answer | None:
    try:
        head, _, module = file.read_bytes().partition(b"\n")
        record = json.loads(head)
        return Answer(record["bytes"], record["seconds"], module or None, record["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, answer: Answer) -> None:
    record = {"bytes": answer.bytes, "seconds": answer.compile_seconds, "error": answer.error}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole(file) as partial:
            partial.write_bytes(json.dumps(record).encode() + b"\n" + (answer.module or b""))
    except OSError:
        pass
