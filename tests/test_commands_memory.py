"""`python -m xform memory | compare | fits | max-batch | why-oom | doctor`."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest

from xform import commands
from xform.errors import BudgetInfeasible, MissingExtra, WrongArgument
from xform.introspection import packages
from xform.memory import targets

MODEL = """
import functools
import jax, jax.numpy as jnp, xform

def loss(w, x):
    return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)

def alone(x):
    return jnp.max(x)

alone.inputs = lambda: (jax.ShapeDtypeStruct((64, 128), "float32"),)

quick = jax.jit(loss)

def words():
    return jax.ShapeDtypeStruct((64, 64), "float32"), {"x": "rows"}

@functools.partial(jax.jit, static_argnums=1)
def tall(x, how):
    return x * len(how)

tall.inputs = lambda: (jax.ShapeDtypeStruct((64, 64), "float32"), "rows")

def step(w, x):
    return w - xform.grad(loss)(w, x)

jitted = xform.jit(step)

def inputs(batch: int = 64):
    return jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((batch, 64), "float32")
"""


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "small.py").write_text(textwrap.dedent(MODEL))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "small", raising=False)
    return tmp_path


def test_memory_reports_the_untransformed_function() -> None:
    text = commands.run(["memory", "small:loss"])
    for part in ("loss on cpu (cpu)", "total", "live at the peak", "small.py:"):
        assert part in text


def test_a_static_argument_is_no_array() -> None:
    assert "tall on cpu" in commands.run(["memory", "small:tall"])


def test_a_report_as_json_picture_and_page(model: Path) -> None:
    command = ["memory", "small:step", "--batch", "32", "--policy", "save_nothing", "--donate", "0",
               "--transform", "jit"]  # fmt: skip
    text = commands.run([*command, "--png", "a.png", "--html", "a.html"])
    assert text.endswith("wrote a.png\nwrote a.html")
    assert (model / "a.png").exists()
    assert "small.py" in (model / "a.html").read_text()
    data = json.loads(commands.run([*command, "--json"]))
    assert data["alias_bytes"] == 64 * 64 * 4
    assert data["argument_bytes"] == (64 * 64 + 32 * 64) * 4


def test_a_peak_that_grew_fails(model: Path) -> None:
    command = ["memory", "small:loss", "--policy", "min_cut,save_nothing"]
    assert commands.run([*command, "--save", "peaks.json"]).endswith("wrote peaks.json")
    text, status = commands.answer([*command, "--against", "peaks.json"])
    assert (status, text.count("the total unchanged")) == (0, 2)
    source = (model / "small.py").read_text()
    (model / "small.py").write_text(source.replace("batch: int = 64", "batch: int = 128"))
    del sys.modules["small"]
    text, status = commands.answer([*command, "--against", "peaks.json", "--tolerance", "5%"])
    assert status == 3
    assert text.count("more than the accepted") == 2
    assert "small.py:6 (loss)" in text


def test_a_budget_that_nothing_fits_has_no_peak_to_save(model: Path) -> None:
    with pytest.raises(BudgetInfeasible, match="a peak that does not exist"):
        commands.run(
            ["memory", "small:loss", "--policy", "min_cut,budget:1KiB", "--save", "a.json"]
        )
    assert not (model / "a.json").exists()


def test_several_targets_without_a_policy_compile_the_bare_function() -> None:
    for function in ("small:loss", "small:step"):
        words = ["memory", function, "--json", "--target"]
        alone = json.loads(commands.run([*words, "cpu"]))
        both = json.loads(commands.run([*words, "cpu,cpu:1"]))
        assert both["compiled"] == "the function as it is"
        assert [e["report"]["total_bytes"] for e in both["entries"]] == [alone["total_bytes"]] * 2


def test_several_policies_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["small:loss", "--policy", "save_everything,save_nothing,budget:1MiB"]
    text = commands.run(["memory", *words])
    assert text.splitlines()[:3] == [
        "loss", "compiled: its value_and_grad by argument 0",
        "arguments: w f32[64,64], x f32[64,64], by inputs()",
    ]  # fmt: skip
    assert [line.split()[0] for line in text.splitlines()[4:]] == [
        "policy", "save_everything", "save_nothing", "budget:1MiB",
    ]  # fmt: skip
    assert text == commands.run(["compare", *words, "--target", "cpu"])
    assert capsys.readouterr().err == ""  # no progress bar without a terminal


def test_fits_answers_by_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    fits = ["fits", "small:loss", "--target", "cpu", "--capacity"]
    assert commands.main([*fits, "1MiB"]) == 0
    assert "it fits" in capsys.readouterr().out
    assert commands.main([*fits, "10KiB"]) == 3
    assert "it is over by" in capsys.readouterr().out
    assert commands.main([*fits, "much"]) == 1
    assert "it is not a number of bytes" in capsys.readouterr().err


def test_shardings_by_name() -> None:
    words = ["memory", "small:loss", "--target", "cpu:2", "--mesh", "data=2"]
    size = lambda *more: json.loads(commands.run([*words, *more, "--json"]))["argument_bytes"]
    w, x = 64 * 64 * 4, 64 * 64 * 4
    assert "no argument is sharded over the mesh" in commands.run(words)
    assert "no argument is sharded" not in commands.run([*words, "--in-specs", "x=data"])
    assert size("--in-specs", "w=,x=:data") == w + x // 2
    words[-1] = "data=2,model=1"
    assert size("--in-specs", "w=data:model,x=data+model") == (w + x) // 2
    with pytest.raises(WrongArgument, match=r"no positional argument .*\n.*its arguments: w, x"):
        commands.run([*words, "--in-specs", "y=data"])
    with pytest.raises(WrongArgument, match="the mesh has no axis 'rows'"):
        commands.run([*words, "--in-specs", "x=rows"])
    with pytest.raises(SystemExit):
        commands.run([*words, "--in-specs", "data"])


def test_the_largest_batch_by_inputs_or_by_axis() -> None:
    command = ["max-batch", "small:loss", "--target", "cpu", "--capacity", "256KiB"]
    assert "(by inputs(batch=n))" in commands.run(command)
    assert "(axis 0 of x)" in commands.run([*command, "--batch", "32", "--batch-argnums", "1"])


def test_the_largest_batch() -> None:
    command = ["max-batch", "small:loss", "--target", "cpu", "--capacity", "256KiB"]
    data = json.loads(commands.run([*command, "--json"]))
    assert data["tried"][str(data["batch"])] <= 2**18 < data["tried"][str(data["batch"] + 1)]
    assert f"the largest batch is {data['batch']}" in commands.run(command)
    alone = ["max-batch", "small:alone", *command[2:], "--batch-argnums", "all"]
    assert "the largest batch is 511" in commands.run(alone)  # including the output


def test_why_not() -> None:
    text = commands.run(["why-oom", "small:loss", "--target", "cpu", "--capacity", "1KiB"])
    assert "it is over by" in text


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_can_import", lambda *modules: False)
    text = commands.run(["doctor"])
    assert "pip install 'jax-xform[tpu]'" in text
    assert "pip install 'jax-xform[gpu-aot]'" in text
    data = json.loads(commands.run(["doctor", "--json"]))
    assert data["packages"]["jax"]
    assert {t["name"] for t in data["targets"]} >= {"cpu", "tpu:v5e:1x1", "gpu:h100"}


def test_doctor_says_how_to_keep_plugins_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "version", lambda name: "1.0" if name == "libtpu" else None)
    advice = "libtpu found no device here."
    assert advice not in commands.run(["doctor"])  # these tests set JAX_PLATFORMS
    monkeypatch.delenv("JAX_PLATFORMS")
    assert advice in commands.run(["doctor"])
    monkeypatch.setattr(packages, "version", lambda name: None)
    assert advice not in commands.run(["doctor"])


def test_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_can_import", lambda *modules: False)
    with pytest.raises(MissingExtra) as caught:
        commands.run(["memory", "small:loss", "--target", "tpu:v5e:1x1"])
    assert "pip install 'jax-xform[tpu]'" in str(caught.value)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["memory", "small:loss", "--target", "tpu:v9"], "no such target"),
        (["memory", "small:loss", "--policy", "best"], "no policy has the name 'best'"),
        (["compare", "small:loss", "--policy", "budget:lots"], "it is not a number of bytes"),
        (["memory", "small:loss", "--donate", "5"], "--donate 5\n.*loss is given 2 arguments"),
        (
            ["memory", "small:quick", "--inputs", "small:words"],
            r"compile loss\n.*of type <class 'str'> and was passed .* at path x\['x'\]",
        ),
    ],
)
def test_bad_input(command: list[str], said: str) -> None:
    with pytest.raises(WrongArgument, match=said):
        commands.run(command)


@pytest.mark.parametrize(
    "command",
    [["fits", "small:loss"], ["memory", "small:loss", "--mesh", "data"],
     ["memory", "small:loss", "--donate", "first"], ["memory", "small:loss", "--target", ","],
     ["compare", "small:loss", "--target", ""], ["memory", "small:loss", "--policy", ","]],
)  # fmt: skip
def test_a_command_line_that_cannot_be_read(command: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        commands.run(command)
    assert caught.value.code == 2


@pytest.mark.parametrize("command", ["fits", "max-batch", "why-oom"])
def test_fits_max_batch_and_why_oom_accept_a_policy(command: str) -> None:
    ask = [command, "small:loss", "--target", "cpu", "--capacity", "1MiB"]
    assert "the function as it is" in commands.run(ask)
    under = commands.run([*ask, "--policy", "save_nothing"])
    assert "compiled: its value_and_grad by argument 0, policy save_nothing" in under
    donated = commands.run([*ask, "--policy", "save_nothing", "--donate", "0"])
    assert "compiled: its value_and_grad by argument 0, policy save_nothing" in donated
    for step in (["small:jitted"], ["small:step", "--transform", "jit", "--donate", "0"]):
        budget = commands.run(["fits", *step, *ask[2:], "--policy", "budget:200KiB"])
        assert "it fits" in budget
        assert "the function as it is, policy budget:200KiB" in budget
