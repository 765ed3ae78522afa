"""The picture of a report: its texts, and that it is drawn even if the report lacks parts."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.memory.samples import transformer
from xform.errors import MissingExtra, WrongArgument
from xform.memory.report_plot import bytes_by_category, draw, squarify
from xform.terminal.text import human_bytes


def tiny(**more: Any) -> dict[str, Any]:
    return transformer(1) | more


def drawn(data: dict[str, Any], path: Path) -> str:
    """Return the texts of a picture, which matplotlib leaves in an SVG as comments."""
    draw(data, path)
    return "\n".join(re.findall(r"<!-- (.*?) -->", path.read_text(), re.DOTALL))


def test_plot_has_title_peak_capacity_categories_and_lines(tmp_path: Path) -> None:
    data = tiny()
    texts = drawn(data, tmp_path / "report.svg")
    peak = f"peak {human_bytes(max(data['live']))}"
    for text in ("train_step on tpu:v5e:1x1", "to spare", peak, "capacity of TPU v5e: 16.0 GiB"):
        assert text in texts
    for text in ("activation", "optimizer state", "model.py:52 (layer)", "optim.py:31 (adamw)"):
        assert text in texts


@pytest.mark.parametrize(
    ("lacking", "text"),
    [
        ({"live": [], "buffers": []}, "reported no steps"),
        ({"live": [7], "peak_step": 0, "buffers": []}, "not attributed"),
        ({"function": "$\\frac$", "live": [0], "peak_step": 0, "buffers": []}, "peak 0 B"),
    ],
)
def test_plot_omits_unknown_capacity_steps_and_buffers(
    lacking: Any, text: str, tmp_path: Path
) -> None:
    data = tiny(**lacking)
    data["device"] = data["device"] | {"capacity_bytes": None, "limit_bytes": None}
    texts = drawn(data, tmp_path / "report.svg")
    assert text in texts
    assert "capacity" not in texts


def test_plot_labels_a_peak_over_the_capacity_as_too_much(tmp_path: Path) -> None:
    assert "too much" in drawn(transformer(1, capacity=2**30), tmp_path / "report.svg")


def test_layers_add_up() -> None:
    data = tiny()
    np.testing.assert_allclose(sum(bytes_by_category(data).values()), data["live"])
    more = data | {"live": [n + 9 for n in data["live"]]}
    np.testing.assert_allclose(bytes_by_category(more)["not attributed"], 9)


def test_a_long_program_is_drawn_by_its_highest_steps(tmp_path: Path) -> None:
    live = [1] * 50_000
    live[31_415] = 2**20
    data = tiny(live=live, peak_step=31_415, buffers=[])
    draw(data, tmp_path / "long.svg")
    assert (tmp_path / "long.svg").stat().st_size < 500_000


def test_formats_by_name(tmp_path: Path) -> None:
    for kind, start in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
        path = tmp_path / f"report.{kind}"
        draw(tiny(), path)
        assert path.read_bytes().startswith(start)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.pdf", "report.png"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [("report.docx", "'docx' is not an image format"), ("report", "has no suffix")],
)
def test_a_format_that_is_not_known_is_refused(name: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(WrongArgument) as caught:
        draw(tiny(), tmp_path / name)
    assert problem in str(caught.value)
    assert "remedy:  end the file name in .png, .svg or .pdf" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match="pip install"):
        draw(tiny(), tmp_path / "report.png")


@pytest.mark.parametrize("n", [1, 2, 7, 300])
@pytest.mark.parametrize(("width", "height"), [(10, 4), (3, 9)])
def test_boxes_have_their_areas_and_do_not_overlap(n: int, width: int, height: int) -> None:
    sizes = sorted(np.random.default_rng(n).pareto(1, n) + 0.01, reverse=True)
    boxes = squarify(sizes, 1, 2, width, height)
    areas = np.array([w * h for _, _, w, h in boxes])
    np.testing.assert_allclose(areas, np.array(sizes) / sum(sizes) * width * height, rtol=1e-6)
    for x, y, w, h in boxes:
        assert x >= 1 - 1e-6
        assert y >= 2 - 1e-6
        assert x + w <= 1 + width + 1e-6
        assert y + h <= 2 + height + 1e-6
    x, y, w, h = np.array(boxes).T
    shared = lambda a, n: np.minimum(a[:, None] + n[:, None], a + n) - np.maximum(a[:, None], a)
    over = np.clip(shared(x, w), 0, None) * np.clip(shared(y, h), 0, None)
    assert np.abs(over - np.diag(areas)).max() < 1e-5


def test_equal_sizes_are_nearly_squares() -> None:
    assert max(max(w / h, h / w) for _, _, w, h in squarify([1] * 48, 0, 0, 8, 6)) < 2


def test_nothing_is_no_box() -> None:
    assert squarify([], 0, 0, 1, 1) == []
