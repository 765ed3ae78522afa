"""Compilers' answers are cached in the process, and on disk where JAX caches compiled programs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from xform.memory import answers
from xform.memory.answers import Answer, cached_answer
from xform.storage.bounded_cache import BoundedCache

ANSWERS = (
    Answer({"temp": 3}, 1.5, b"module\nwith lines\x00"),
    Answer({}, 0.5, None, "RESOURCE_EXHAUSTED: too big"),
)


def never() -> Answer:
    raise AssertionError("asked again")


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear the memory of the process, like a new process."""
    monkeypatch.setattr(answers, "_answers", BoundedCache())


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Set the folder of JAX's compilation cache."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    forget(monkeypatch)
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize("answer", ANSWERS, ids=["compiled", "refused"])
def test_another_process_finds_an_answer(answer: Answer, folder: Path, monkeypatch) -> None:
    ask = lambda: cached_answer(b"program", "cpu", ask=never)
    assert cached_answer(b"program", "cpu", ask=lambda: answer) is answer
    first = ask()
    forget(monkeypatch)
    assert first == ask() == answer
    assert (answer.known, first.known, ask().known) == (False, True, True)
    assert [p.suffix for p in (folder / "xform").iterdir()] == [".answer"]


def test_a_failure_may_pass(folder: Path) -> None:
    failed = Answer({}, 0.1, None, "INTERNAL: no ptxas")
    assert cached_answer(b"program", ask=lambda: failed) is failed
    assert cached_answer(b"program", ask=lambda: ANSWERS[0]) is ANSWERS[0]
    assert len(list((folder / "xform").iterdir())) == 1


def test_cache_key_has_program_target_xla_flags_and_versions(folder: Path, monkeypatch) -> None:
    one, other = ANSWERS
    cached_answer(b"program", "cpu", ask=lambda: one)
    assert cached_answer(b"program", "gpu:h100", ask=lambda: other) is other
    assert cached_answer(b"programs", "cpu", ask=lambda: other) is other
    monkeypatch.setenv("XLA_FLAGS", "--xla_any=1")
    assert cached_answer(b"program", "cpu", ask=lambda: other) is other
    monkeypatch.setattr(answers, "version", lambda package: f"{package} 99")
    assert cached_answer(b"program", "cpu", ask=lambda: one) is one


@pytest.mark.parametrize("spoiled", [b"", b"{}", b"\xff\xfe", b"[1]\nmodule"])
def test_a_spoiled_file_is_asked_for_again(spoiled: bytes, folder: Path, monkeypatch) -> None:
    cached_answer(b"program", ask=lambda: ANSWERS[0])
    (file,) = (folder / "xform").iterdir()
    file.write_bytes(spoiled)
    forget(monkeypatch)
    assert cached_answer(b"program", ask=lambda: ANSWERS[0]) == ANSWERS[0]
    assert file.read_bytes().endswith(ANSWERS[0].module or b"")


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path) -> None:
    (folder / "xform").write_text("a file in the way")
    assert cached_answer(b"program", ask=lambda: ANSWERS[0]) == ANSWERS[0]


@pytest.mark.parametrize("elsewhere", [None, "", "gs://bucket/cache"])
def test_no_folder_no_file(elsewhere: str | None, folder: Path, monkeypatch) -> None:
    jax.config.update("jax_compilation_cache_dir", elsewhere)
    monkeypatch.chdir(folder)
    assert cached_answer(b"program", ask=lambda: ANSWERS[0]) == ANSWERS[0]
    assert not list(folder.iterdir())
