"""A page is complete, escaped, and loads nothing. The tests of the reports test what pages do."""

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from xform.page.writer import source_line, web_file, write_page

HARM = "</script><img src=x onerror=alert(1)> $style & \"'"
SCRIPTS = {
    "memory": ("buffers", "timeline", "treemap", "difference", "memory"),
    "graph": ("steps", "layout", "picture", "graph"),
    "": (),
}


def written(kind: str, path: Path) -> str:
    body = web_file(f"{kind}.html") if kind else "<p>still</p>"
    write_page(path / "page.html", HARM, HARM, body, scripts=SCRIPTS[kind], data={"x": HARM})
    return (path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_page_runs_its_own_scripts_and_fetches_nothing(kind: str, tmp_path: Path) -> None:
    text = written(kind, tmp_path)
    policy, rest = text.split("<title>")
    assert "default-src 'none'" in policy
    for tag in ("style", "script"):
        found = re.findall(f"<{tag}>(.*?)</{tag}>", rest, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(x.encode()).digest()).decode() for x in found]
        assert [f"sha256-{d}" in policy for d in digests] == [True] * len(digests)
        assert len(found) == (tag == "style" or bool(kind))
    fetching = r"https?:|//[a-z]+\.|@import|url\((?!#)|src=[^x]|<link|fetch\(|XMLHttp"
    assert not re.search(fetching, text.replace("http://www.w3.org/2000/svg", ""))


@pytest.mark.parametrize("kind", SCRIPTS)
def test_texts_are_escaped_and_no_place_is_left_open(kind: str, tmp_path: Path) -> None:
    text = written(kind, tmp_path)
    assert HARM not in text
    assert "<img" not in text
    assert text.count("</script>") == (2 if kind else 0)
    assert not re.search(r"\$(title|about|body|policy)\b", text)
    if kind:
        data = re.findall(r'<script id="data" type="application/json">(.*?)</script>', text)
        assert [json.loads(d) for d in data] == [{"x": HARM}]


def test_failed_write_keeps_the_old_page_and_leaves_no_other_file(tmp_path: Path) -> None:
    before = written("graph", tmp_path)
    with pytest.raises(ValueError, match="JSON"):  # it has no such number
        write_page(tmp_path / "page.html", "", scripts=("graph",), data=float("nan"))
    assert [p.read_text() for p in tmp_path.iterdir()] == [before]


def test_the_source_line_of_a_place(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def f(x):\n    return x @ x  # </script>\n")
    places = (f"{tmp_path}/model.py:2 (f)", f"{tmp_path}/model.py:9 (f)", "gone.py:1 (f)", "")
    assert [*map(source_line, places)] == ["return x @ x  # </script>", "", "", ""]
