"""`python -m xform rules`."""

import json
from pathlib import Path

from jax.extend.core import Primitive
from jax.interpreters import ad

from tests.rules.tested import how_tested
from tests.versions import NEW
from xform import commands
from xform.commands.rules import TESTED


def table(*args: str) -> list[dict[str, str]]:
    return json.loads(commands.run(["rules", "--json", *args]))


def test_rules() -> None:
    rows = {row["primitive"]: row for row in table()}
    assert rows["sin"] | {"tested": ""} == {
        "primitive": "sin", "word": "pointwise", "jvp": "yes", "pull": "yes",
        "transpose": "if linear", "tested": "", "traits": "elementwise", "reason": "",
    }  # fmt: skip
    assert "case" in rows["sin"]["tested"]
    assert rows["scan"]["tested"] == "tests/rules/test_scan.py"
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


def test_packaged_list_of_tested_rules_is_up_to_date() -> None:
    said, known = json.loads(TESTED.read_text()), how_tested()
    assert known.items() <= said.items(), "run, with the newest JAX: python -m tests.rules.tested"
    assert said.keys() - known.keys() <= NEW
    assert TESTED.parent == Path(commands.__file__).parent


def test_traits() -> None:
    rows = {row["primitive"]: row["traits"] for row in table()}
    assert rows["reshape"] == "movement, view"
    assert rows["jit"] == "call=jaxpr"
    assert rows["psum"] == "collective"


def test_the_rules_of_other_libraries() -> None:
    ad.deflinear2(LISTED_P, lambda ct, x: [ct])
    text = commands.run(["rules", "--foreign", "json"])
    (line,) = [line for line in text.splitlines() if line.startswith("listed ")]
    assert line.split() == ["listed", __name__, "yes", "yes"]
    assert not [line for line in text.splitlines()[1:-2] if line.split()[1].startswith("jax.")]


LISTED_P = Primitive("listed")
