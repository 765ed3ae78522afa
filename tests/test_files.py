"""Files appear whole, or not at all."""

from pathlib import Path

import pytest

from xform.files import whole


def test_a_file_takes_its_place(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    with whole(target) as partial:
        assert partial.suffix == ".html"  # what reads a format from a name is not misled
        partial.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def _break_off(target: Path) -> None:
    with whole(target) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt


def test_what_is_broken_off_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        _break_off(tmp_path / "report.html")
    assert not list(tmp_path.iterdir())
