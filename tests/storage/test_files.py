"""Files are written completely, or not at all."""

from pathlib import Path

import pytest

from xform.errors import FileNotWritten
from xform.storage.files import atomic_write


def test_a_file_takes_its_place(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    with atomic_write(target) as partial:
        assert partial.suffix == ".html"  # readers that derive the format from the name still work
        partial.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def _break_off(target: Path) -> None:
    with atomic_write(target) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt


def test_interrupted_write_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        _break_off(tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


def _write(target: Path) -> None:
    with atomic_write(target) as partial:
        partial.write_text("all")


def test_write_errors_name_the_requested_path_not_the_partial_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in ("nope", "file"):
        with pytest.raises(FileNotWritten) as caught:
            _write(tmp_path / folder / "x.html")
        assert f"{folder}/x.html" in str(caught.value)
        assert "partial" not in str(caught.value)


def _fail(target: Path) -> None:
    with atomic_write(target):
        raise OSError(2, "of its own", "other")


def test_errors_of_other_files_are_left_alone(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="of its own") as caught:
        _fail(tmp_path / "x.html")
    assert not isinstance(caught.value, FileNotWritten)
