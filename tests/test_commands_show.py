"""`python -m xform show`."""

import re
import sys
from pathlib import Path

import pytest

from xform import commands
from xform.errors import FailedFunction, WrongArgument

MODEL = """
import jax, jax.numpy as jnp

def layer(h, w):
    return jnp.tanh(h @ w) * 3.0, None

def loss(ws, x):
    return jnp.sum(jax.lax.scan(layer, x, ws)[0])

def both(x):
    y = jnp.sin(x)
    return jnp.sum(jnp.sin(x) * y), {"y": y}

both.inputs = lambda: (jax.ShapeDtypeStruct((4,), "float32"),)

def mixed(x, n, name):
    return x * n if name == "times" else x

mixed.inputs = lambda: (jnp.ones(3), jnp.arange(3), "times")

def wrong(ws, x):
    return x @ ws.T @ x

def inputs(batch: int = 4):
    return jax.ShapeDtypeStruct((3, 8, 8), "float32"), jax.ShapeDtypeStruct((batch, 8), "float32")
"""


@pytest.fixture(autouse=True)
def _model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "drawn.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "drawn", raising=False)


def show(*words: str) -> str:
    return commands.run(["show", *words])


def test_the_program() -> None:
    assert (
        show("drawn:loss", "--batch", "2")
        == """\
drawn:loss: 5 equations
inputs  a:f32[3,8,8] b:f32[2,8]
  c:f32[2,8] = scan[length=3] b a
    body: d:f32[2,8] e:f32[8,8]
      f:f32[2,8] = dot_general[preferred_element_type=float32] d e
      g:f32[2,8] = tanh f
      h:f32[2,8] = mul g 3.0
    return h
  i:f32[] = reduce_sum[axes=(0,1)] c
outputs i"""
    )
    assert re.search(r"tanh f +# drawn\.py:5\S* \(layer\)", show("drawn:loss", "--lines"))


def test_the_joint_program() -> None:
    text = show("drawn:loss", "--transform", "grad", "--policy", "save_dots")
    joint, program = text.split("\n\n")
    saved = "SAVED, 128 B: save_dots saves dot_general"
    assert (
        joint
        == f"""\
joint program of drawn:loss, save_dots
inputs a:f32[4,8] b:f32[3,8,8]
forward
  c:f32[4,8] = scan[length=3] a b
    body of 3 trips, 1 carry value saved in each, forward: d:f32[4,8] e:f32[8,8]
      f:f32[4,8] = dot_general[preferred_element_type=float32] d e                {saved}
      g:f32[4,8] = tanh f
      h:f32[4,8] = mul g 3.0
    return h
  i:f32[] = reduce_sum[axes=(0,1)] c
saved: values inside loops and calls; read in place: b:f32[3,8,8]
backward, of j:f32[]
  k:f32[4,8] = broadcast_in_dim[shape=(4,8)] j
  l:f32[4,8] m:f32[3,8,8] = scan[length=3] k
    body of 3 trips, 1 carry value saved in each, backward: n:f32[4,8]
      o:f32[4,8] = mul n 3.0
      g:f32[4,8] = tanh f                                                         RECOMPUTED
      p:f32[4,8] = one_minus_square g                                             RECOMPUTED
      q:f32[4,8] = mul o p
      r:f32[4,8] = dot_general[preferred_element_type=float32] q e
      s:f32[8,8] = dot_general[preferred_element_type=float32] q d
      t:f32[8,8] = transpose[permutation=(1,0)] s
    return r t
outputs i
results m"""
    )
    assert program.startswith("grad of drawn:loss: ")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--transform", "vjp"], "vjp of drawn:loss: "),
        (["--transform", "jvp"], "jvp of drawn:loss: "),
        (["--transform", "linearize"], "tangents, of "),
        (["--transform", "remat"], "remat2"),
        (["--transform", "grad", "--argnums", "all"], "results "),
        (["--transform", "grad", "--stablehlo"], "module @jit_program"),
        (["--hlo", "--target", "cpu"], "HloModule jit_program"),
    ],
)
def test_transforms_and_forms(words: list[str], found: str) -> None:
    assert found in show("drawn:loss", *words)


def test_auxiliary_outputs_and_other_arguments() -> None:
    for transform in ("grad", "vjp", "jvp", "linearize"):
        assert f"{transform} of" in show("drawn:both", "--transform", transform, "--has-aux")
    for transform in ("jvp", "vjp"):
        assert f"{transform} of" in show("drawn:mixed", "--transform", transform)
    assert show("drawn:mixed").endswith("outputs d")


def test_passes() -> None:
    words = ["drawn:both", "--passes", "simplify,cse,dce"]
    program, table = show(*words).split("\n\n")
    assert program.startswith("drawn:both, after all passes: 3 equations")
    head, *rows = [row.split() for row in table.splitlines()]
    assert head == ["pass", "equations", "before", "after", "ms"]
    assert [row[:3] for row in rows] == [["simplify", "4", "4"], ["cse", "4", "3"],
                                         ["dce", "3", "3"]]  # fmt: skip
    after = show(*words, "--print-after-all").split("\n\n")
    assert [part.splitlines()[0] for part in after[:-1]] == [
        "after simplify: 4 equations", "after cse: 3 equations", "after dce: 3 equations",
    ]  # fmt: skip
    assert show(*words, "--stablehlo").count("stablehlo.sine") == 1


def test_errors(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(WrongArgument, match="no such target"):
        show("drawn:loss", "--hlo", "--target", "tpu:v99")
    with pytest.raises(WrongArgument, match="only --hlo compiles for a target"):
        show("drawn:loss", "--stablehlo", "--target", "cpu")
    with pytest.raises(WrongArgument, match="--policy none"):
        show("drawn:loss", "--transform", "grad", "--policy", "none")
    with pytest.raises(
        WrongArgument, match=r"missing a required argument: 'x'; the signature is loss\(ws, x\)"
    ):
        show("drawn:loss", "--inputs", "drawn:both.inputs")
    with pytest.raises(FailedFunction, match=r"show\n.*TypeError.*\n.*drawn\.py:\d+ \(wrong\)"):
        show("drawn:wrong", "--transform", "remat")
    for words, text in ((["--passes", "cse,none"], "unknown pass none; use inline, open_regions"),
                        (["--stablehlo", "--hlo"], "not allowed with"),
                        (["--transform", "hessian"], "invalid choice")):  # fmt: skip
        with pytest.raises(SystemExit) as e:
            show("drawn:loss", *words)
        assert e.value.code == 2
        assert text in capsys.readouterr().err


GREEN, DIM = "\x1b[32m", "\x1b[2m"


def test_colours() -> None:
    text = show("drawn:loss", "--color")
    assert f"{GREEN}a:f32[3,8,8]\x1b[0m {DIM}b:f32[4,8]\x1b[0m" in text
    assert text.endswith(
        f"colours {GREEN}active\x1b[0m \x1b[33mstopped\x1b[0m {DIM}constant\x1b[0m"
    )
    plain = re.sub("\x1b\\[[0-9]*m", "", text).rpartition("\n")[0]
    assert plain == show("drawn:loss")


def test_colours_of_the_arguments_that_are_asked_for() -> None:
    assert f"{DIM}a:f32[3,8,8]" in show("drawn:loss", "--color", "--argnums", "1")
    assert f"{DIM}c:" not in show("drawn:loss", "--color", "--argnums", "all")
    assert f"{DIM}b:i32[3]" in show("drawn:mixed", "--color", "--argnums", "all")
    for transform in ("grad", "vjp", "jvp", "linearize", "remat"):
        assert f"{GREEN}a:" in show("drawn:loss", "--color", "--transform", transform)
    passed = show("drawn:loss", "--color", "--passes", "dce,cse", "--print-after-all")
    assert passed.count(f"{GREEN}a:f32[3,8,8]") == 2


def test_when_there_are_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in show("drawn:loss")  # no terminal
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b" in show("drawn:loss")
    assert "\x1b" not in show("drawn:loss", "--no-color")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in show("drawn:loss")
    assert "\x1b" in show("drawn:loss", "--color")
    monkeypatch.setenv("NO_COLOR", "")
    assert "\x1b" in show("drawn:loss")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in show("drawn:loss")
