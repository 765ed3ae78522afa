"""The data of a report's page. test_report_page_web.py tests its behaviour."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.memory.samples import HARM, harmful, transformer
from xform.errors import WrongArgument
from xform.memory.report_page import write


def page(reports: list[dict[str, Any]], path: Path, labels: tuple[str, ...] = ()) -> str:
    write(reports, path, labels)
    return path.read_text(encoding="utf-8")


def data(text: str) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_data_is_in_it(tmp_path: Path) -> None:
    report = transformer(2)
    (found,) = data(page([report], tmp_path / "page.html"))["reports"]
    assert found["label"] == "train_step on tpu:v5e:1x1"
    assert found["live"] == report["live"]
    assert found["total_bytes"] == report["total_bytes"]
    assert len(found["rows"]) == len(report["buffers"])
    for row, b in zip(found["rows"], report["buffers"], strict=True):
        shape = ",".join(map(str, b["shape"]))
        texts = [found["text"][row[i]] for i in (0, 2, 3, 4, 5, 6, 7)]
        keys = ("operation", "where", "scope", "category", "why")
        assert texts == [b["name"], f"{b['dtype']}[{shape}]", *(b[k] for k in keys)]
        assert [row[i] for i in (1, 9, 10, 11)] == [
            b[k] for k in ("bytes", "born", "dies", "at_peak")
        ]


def test_rows_have_the_source_line_of_their_place(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def f(x):\n    return x @ x  # </script>\n")
    places = (f"{tmp_path}/model.py:2 (f)", f"{tmp_path}/model.py:9 (f)", "gone.py:1 (f)", "")
    report = transformer(1)
    report["buffers"] = [report["buffers"][0] | {"where": where} for where in places]
    (found,) = data(page([report], tmp_path / "page.html"))["reports"]
    lines = [found["text"][row[8]] for row in found["rows"]]
    assert lines == ["return x @ x  # </script>", "", "", ""]


def test_page_data_has_compiled_function_arguments_policy_and_phases(tmp_path: Path) -> None:
    (found,) = data(page([transformer(1)], tmp_path / "page.html"))["reports"]
    assert found["compiled"] == "the function as it is, policy save_dots"
    assert found["given"].startswith("state (3 arrays")
    assert found["code"] == "xform.policies.save_dots"
    assert found["planned"] == "0 FLOP of unfused operations recomputed, planned in 12.0 ms"
    assert [p["name"] for p in found["phases"]] == ["forward", "backward", "update"]


def test_texts_of_the_user_are_escaped(tmp_path: Path) -> None:
    text = page([harmful()], tmp_path / "page.html", (HARM,))
    assert HARM not in text
    assert "<img" not in text
    assert text.count("</script>") == 2
    (found,) = data(text)["reports"]
    assert found["label"] == HARM
    assert HARM in found["text"]


def test_several_reports_have_labels(tmp_path: Path) -> None:
    reports = [transformer(1), transformer(1, saves=False)]
    found = data(page(reports, tmp_path / "page.html", ("all", "few")))["reports"]
    assert [r["label"] for r in found] == ["all", "few"]


@pytest.mark.parametrize(("reports", "labels"), [(0, ()), (1, ("a", "b"))])
def test_wrong_numbers_are_refused(reports: int, labels: Any, tmp_path: Path) -> None:
    with pytest.raises(WrongArgument) as caught:
        write([transformer(1)] * reports, tmp_path / "page.html", labels)
    assert f"problem: there are {reports} reports and {len(labels)} labels" in str(caught.value)
    assert "remedy:  give at least one report, and either a label for each" in str(caught.value)


def test_ten_thousand_buffers_are_a_megabyte(tmp_path: Path) -> None:
    assert len(page([transformer(220)], tmp_path / "page.html")) < 1_100_000
