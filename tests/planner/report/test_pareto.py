"""The curve of bytes against work as text, data and picture: of points made by hand."""

import json

import pytest

from xform.planner.report import pareto, picture
from xform.planner.report.pareto import Pareto, ParetoPoint

MIB = 2**20
CURVE = Pareto("loss", "cpu", False, (
    ParetoPoint("min_cut", False, 4 * MIB, 0, 0, 0.25, 1.0),
    ParetoPoint("budget:2MiB", False, 2 * MIB, 3_000_000_000, None, 1.5, 1.25),
    ParetoPoint("save_nothing", True, 3 * MIB, 5_000_000_000, 2_000_000_000, 0.0, 1.5),
))  # fmt: skip


def test_text_has_a_row_per_point_and_marks_unknown_bounds() -> None:
    title, head, *rows = str(CURVE).splitlines()
    assert title == "loss on cpu"
    assert [w.strip() for w in head.split("  ") if w] == [
        "policy", "peak", "recomputed (unfused)", "lower bound", "estimated time", "planned in",
    ]  # fmt: skip
    cells = [[w.strip() for w in row.split("  ") if w] for row in rows]
    assert [row[0] for row in cells] == [p.name for p in CURVE]
    assert [row[1] for row in cells] == ["4.0 MiB", "2.0 MiB", "3.0 MiB"]
    assert [row[3] == "not known" for row in cells] == [False, True, False]
    assert [row[4] for row in cells] == ["1.00", "1.25", "1.50"]
    assert cells[1][2].startswith("3.0 G")


def test_the_time_of_compilations_is_shown_apart() -> None:
    point = ParetoPoint("min_cut", False, MIB, 0, 0, 0.25, 1.0, compile_seconds=3.0)
    _, head, row = str(Pareto("loss", "cpu", True, (point,))).splitlines()
    assert head.endswith("planned in  compiled in")
    assert [cell.strip() for cell in row.split("  ") if cell][-2:] == ["250.0 ms", "3.0 s"]


def test_pareto_is_a_sequence_of_points_and_converts_to_json() -> None:
    assert (len(CURVE), *CURVE) == (3, *CURVE.points)
    data = json.loads(json.dumps(CURVE.to_dict()))
    assert tuple(ParetoPoint(**p) for p in data.pop("points")) == CURVE.points
    assert data == {"function": "loss", "target": "cpu", "compiled": False}


def test_plot_draws_the_points_and_an_empty_curve(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = []
    monkeypatch.setattr(pareto, "save_figure", lambda figure, asked, path: (
        figures.append(figure), picture.save_figure(figure, asked, path)))  # fmt: skip
    CURVE.plot(tmp_path / "curve.png")
    Pareto("loss", "cpu", True, ()).plot(tmp_path / "none.svg")
    assert {p.name for p in tmp_path.iterdir()} == {"curve.png", "none.svg"}
    (ax,), (empty,) = (figure.axes for figure in figures)
    ours, stock = ([*zip(*line.get_data(), strict=True)] for line in ax.lines)
    assert (ours, stock) == ([(4.0, 0.0), (2.0, 3.0)], [(3.0, 5.0)])
    assert [t.get_text() for t in ax.texts] == ["save_nothing"]
    assert "simulated" in ax.get_xlabel()
    assert "compiled" in empty.get_xlabel()


def test_labels_that_would_cover_each_other_are_one(tmp_path, monkeypatch) -> None:
    figures = []
    monkeypatch.setattr(pareto, "save_figure", lambda figure, asked, path: figures.append(figure))
    points = [ParetoPoint(name, True, size * MIB, 0, 0, 0.0, 1.0)
              for name, size in (("a", 100), ("b", 101), ("c", 300))]  # fmt: skip
    Pareto("loss", "cpu", True, tuple(points)).plot(tmp_path / "curve.png")
    assert [t.get_text() for t in figures[0].axes[0].texts] == ["a\nb", "c"]


def test_two_curves_are_drawn_in_one_figure() -> None:
    figure = picture.new_figure("test", 8, 4)
    for ax in figure.subplots(1, 2):
        CURVE.draw(ax)
    left, right = figure.axes
    assert [len(ax.lines) for ax in (left, right)] == [2, 2]
    assert left.get_title(loc="left") == "loss on cpu"
