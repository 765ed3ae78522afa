"""Pictures: what is drawn is what was given, and the user's matplotlib stays as it was."""

import sys

import matplotlib as mpl
import numpy as np
import pytest

from xform.errors import MissingExtra, WrongArgument
from xform.planner.report import picture
from xform.planner.report.picture import draw_live_bytes, new_axes, save_figure

MIB = 2**20


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch):
    """The figures that are written."""
    figures = []

    def kept(figure, asked, path):
        figures.append(figure)
        save_figure(figure, asked, path)

    monkeypatch.setattr(picture, "save_figure", kept)
    return figures


def heights(area) -> set[float]:
    return set(np.asarray(area.get_paths()[0].vertices)[:, 1].tolist())


def test_areas_are_live_bytes_and_the_peak_is_marked(tmp_path, drawn) -> None:
    live, saved = [MIB, 4 * MIB, 2 * MIB], [0, 3 * MIB, 5 * MIB]
    draw_live_bytes(tmp_path / "a.png", "f, min_cut", live, saved, 7 * MIB)
    (ax,) = drawn[0].axes
    waiting, work = ax.collections
    # What waits is no more than what is live.
    assert heights(waiting) == {0.0, 3.0, 2.0}
    assert heights(work) == {0.0, 1.0, 3.0, 4.0, 2.0}
    (text,) = ax.texts
    assert (text.get_text(), text.xy) == ("peak 4.0 MiB", (1, 4.0))
    assert ax.get_title("left") == "f, min_cut\nplus 7.0 MiB of arguments and outputs"


@pytest.mark.parametrize("live", [[], [0], [0, 0]])
def test_a_program_of_no_steps_or_no_bytes_is_drawn(tmp_path, drawn, live) -> None:
    draw_live_bytes(tmp_path / "a.svg", "f", live, live, 0)
    assert (tmp_path / "a.svg").read_text().lstrip().startswith("<?xml")
    low, high = drawn[0].axes[0].get_ylim()
    assert low < high


def test_the_suffix_is_the_format(tmp_path) -> None:
    for suffix, start in ((".png", b"\x89PNG"), (".PDF", b"%PDF"), (".svg", b"<?xml")):
        path = tmp_path / f"a{suffix}"
        save_figure(new_axes("f.plot")[0], "f.plot", path)
        assert path.read_bytes().startswith(start)
    for name, problem in (("a.docx", "'docx' is not an image format"), ("a", "has no suffix")):
        with pytest.raises(WrongArgument, match=problem):
            save_figure(new_axes("f.plot")[0], "f.plot", tmp_path / name)
        assert not (tmp_path / name).exists()


def test_a_picture_appears_whole_or_not_at_all(tmp_path) -> None:
    class Full:
        canvas = new_axes("f.plot")[0].canvas

        def savefig(self, path):
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")

    (tmp_path / "a.png").write_bytes(b"before")
    with pytest.raises(OSError, match="No space"):
        save_figure(Full(), "f.plot", tmp_path / "a.png")
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]
    assert (tmp_path / "a.png").read_bytes() == b"before"


def test_nothing_of_the_users_matplotlib_is_touched(tmp_path) -> None:
    before = dict(mpl.rcParams)
    draw_live_bytes(tmp_path / "a.png", "f", [1], [1], 1)
    assert dict(mpl.rcParams) == before
    if (pyplot := sys.modules.get("matplotlib.pyplot")) is not None:
        assert pyplot.get_fignums() == []


def test_plot_without_matplotlib_raises_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match="pip install") as caught:
        new_axes("Plan.plot")
    assert str(caught.value).startswith("Plan.plot")
