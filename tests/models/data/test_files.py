"""Which files a path names: regular ones, in one order, and nothing that waits or goes round."""

import os
import socket
from pathlib import Path

import pytest

from models.data.files import files_of
from models.errors import InputError


def names(folder: Path, without: Path | None = None) -> list[str]:
    return [file.relative_to(folder).as_posix() for file in files_of(folder, without)]


def test_files_come_in_an_order_of_their_names_alone(tmp_path: Path) -> None:
    some = [f"{i}.txt" for i in range(8)]
    for folder, order in (("one", some), ("two", some[::-1])):
        (tmp_path / folder / "inner").mkdir(parents=True)
        for name in order:
            (tmp_path / folder / "inner" / name).touch()
    one, two = names(tmp_path / "one"), names(tmp_path / "two")
    assert one == two
    assert sorted(one) == [f"inner/{name}" for name in some] != one


def test_only_regular_files_are_taken(tmp_path: Path) -> None:
    (tmp_path / "text").touch()
    (tmp_path / ".hidden").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/log").touch()
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        here = Path.cwd()
        os.chdir(tmp_path)  # names of sockets are short
        listening.bind("socket")
        os.chdir(here)
        assert names(tmp_path, without=tmp_path / "run") == ["text"]


def test_a_pipe_alone_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe is neither a file nor a folder"):
        files_of(tmp_path / "pipe")


def test_a_folder_within_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/up").symlink_to(tmp_path)
    with pytest.raises(
        InputError, match=r"a/up is a link to a folder that contains it: remove the"
    ):
        files_of(tmp_path)


def test_missing_and_overlong_paths_raise(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no such file or folder: .*missing"):
        files_of(tmp_path / "missing")
    with pytest.raises(InputError, match="File name too long"):
        files_of(tmp_path / ("x" * 300))


def test_default_files_are_the_python_standard_library() -> None:
    found = files_of(None)
    assert len(found) > 100
    assert {file.suffix for file in found} == {".py"}
