"""Caches of compilers' answers: in this process, and on disk if JAX's compilation cache is on.

An answer is what a compiler says about one program: its bytes, the compiled module, or an error.
JAX writes compiled programs to `jax_compilation_cache_dir` if that is set. The folder `xform` in it
holds the answers, one file each: a line of JSON, then the compiled module. A file that cannot be
read or written is ignored.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import jax

from xform.introspection.packages import version
from xform.storage.bounded_cache import BoundedCache
from xform.storage.files import atomic_write

_FORMAT = "xform answer 2"
# The versions of these packages and these environment variables are part of the cache's key.
_COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt")
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


@dataclasses.dataclass(frozen=True)
class Answer:
    """A compiler's answer to one program.

    Attributes:
      bytes: bytes of each kind of memory (`worker.KINDS`); empty if the compiler refused the
        program.
      compile_seconds: wall time of the compiler.
      module: the HloProto of the compiled program, with its buffer assignment; None if the compiler
        wrote none.
      error: the compiler's error message; empty if it compiled the program.
      known: whether it was known before it was asked for, so that nothing was compiled.
    """

    bytes: dict[str, int]
    compile_seconds: float
    module: bytes | None
    error: str = ""
    known: bool = dataclasses.field(default=False, compare=False)

    @property
    def failed(self) -> bool:
        """Whether the compiler failed, and not because the program is too large for the device."""
        return bool(self.error) and "RESOURCE_EXHAUSTED" not in self.error


_answers: BoundedCache[str, Answer] = BoundedCache(32)


def depends_on() -> list[str]:
    """Return the flags of XLA and the versions of JAX's packages: every answer depends on them."""
    flags = [os.environ.get(name, "") for name in _FLAGS]
    return [*flags, *(version(package) or "" for package in _COMPILERS)]


def cached_answer(program: bytes, *details: str, ask: Callable[[], Answer]) -> Answer:
    """Return the cached answer for a program; if there is none, compile it and cache the answer.

    The answer of a compiler that failed is not cached.

    Args:
      program: the serialized program.
      *details: what else the answer depends on, such as the target.
      ask: compiles the program and returns the answer.
    """
    key = hashlib.sha256(program)
    for part in (*details, *depends_on(), _FORMAT):
        key.update(b"\0" + part.encode())
    name = key.hexdigest()
    if name in _answers:
        return _answers[name]
    file = _answer_file(name)
    if file and (read := _read(file)):
        _answers[name] = read
        return read
    answer = ask()
    if not answer.failed:  # the next attempt may succeed
        if file:
            _write(file, answer)
        _answers[name] = dataclasses.replace(answer, known=True)
    return answer


def _answer_file(name: str) -> Path | None:
    """Return the file of an answer; None without a cache on a local disk."""
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    if not folder or "://" in folder:
        return None
    return Path(folder) / "xform" / f"{name}.answer"


def _read(file: Path) -> Answer | None:
    """Return the answer in a file; None if the file is absent or not valid."""
    try:
        head, _, module = file.read_bytes().partition(b"\n")
        record = json.loads(head)
        return Answer(record["bytes"], record["seconds"], module or None, record["error"], True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, answer: Answer) -> None:
    """Write an answer to a file. An error of the file system is ignored."""
    record = {"bytes": answer.bytes, "seconds": answer.compile_seconds, "error": answer.error}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as partial:
            partial.write_bytes(json.dumps(record).encode() + b"\n" + (answer.module or b""))
    except OSError:
        pass
