"""`python -m xform rules`."""

import json

import pytest

import xform
from xform import commands


def table(*args: str) -> list[dict[str, str]]:
    return json.loads(commands.run(["rules", "--json", *args]))


def test_rules() -> None:
    rows = {row["primitive"]: row for row in table()}
    assert rows["sin"] | {"tested": ""} == {
        "primitive": "sin", "word": "pointwise", "jvp": "yes", "pull": "yes",
        "transpose": "if linear", "tested": "", "reason": "",
    }  # fmt: skip
    assert "case" in rows["sin"]["tested"]
    assert rows["scan"]["tested"] == "tests/rules/test_structured.py"
    assert (rows["custom_vjp_call"]["jvp"], rows["custom_vjp_call"]["pull"]) == ("no", "yes")
    assert rows["pure_callback"]["word"] == "opaque"
    assert rows["schur"]["word"] == "-"
    assert "qr" in rows["schur"]["reason"]
    assert len(rows) > 230


def test_filter() -> None:
    assert {row["primitive"] for row in table("triangular")} == {"triangular_solve"}
    assert {row["word"] for row in table("opaque")} == {"opaque"}


def test_text() -> None:
    text = commands.run(["rules", "schur"])
    assert text.splitlines()[-1].startswith("schur: ")
    assert "0 with a rule, 1 without." in text
    assert "tan  " in commands.run(["rules", "tan"])


def test_outside_of_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(xform, "__file__", str(tmp_path / "xform" / "__init__.py"))
    text = commands.run(["rules", "sin"])
    assert "?" in text
    assert "checkout" in text.splitlines()[-1]
