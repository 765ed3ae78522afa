"""Arguments that every command refuses, and arguments that every command on functions accepts."""

import argparse
import json
import re
import sys
from pathlib import Path

import pytest

from xform import commands
from xform.commands.shared.transform import TRANSFORMS

MODEL = """
import jax, jax.numpy as jnp, xform

def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)

def step(w, x):
    return xform.grad(loss)(w, x)

jitted = xform.jit(step)

def inputs(batch: int = 4, dtype="float32", wide: bool = False, deep=None):
    width = 16 if wide else 8
    return (jax.ShapeDtypeStruct((width, width), dtype),
            jax.ShapeDtypeStruct((batch, width), dtype))
"""
# Every command that takes a function, with its required options.
TAKE: dict[str, list[str]] = {
    "compare": ["--policy", "min_cut"],
    "fits": ["--target", "cpu", "--capacity", "1GiB"],
    "max-batch": ["--target", "cpu", "--capacity", "20kB"],
    "memory": [],
    "plan": [],
    "residuals": [],
    "show": [],
    "why-oom": ["--target", "cpu", "--capacity", "1kB"],
}


def parser_of(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    commands.COMMANDS[name].arguments(parser)
    return parser


def options_of(name: str) -> set[str]:
    return {word for action in parser_of(name)._actions for word in action.option_strings}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "written.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "written", raising=False)
    return tmp_path


def failed(capsys: pytest.CaptureFixture, *words: str, status: int = 1) -> str:
    if status == 2:
        with pytest.raises(SystemExit) as e:
            commands.main(list(words))
        assert e.value.code == 2
    else:
        assert commands.main(list(words)) == status
    return capsys.readouterr().err


def test_these_are_all_that_take_a_function() -> None:
    with_function = {n for n in commands.COMMANDS if "--inputs" in options_of(n)}
    assert with_function == TAKE.keys()


@pytest.mark.parametrize("name", TAKE)
def test_an_option_without_a_value(name: str, capsys: pytest.CaptureFixture) -> None:
    words = [name, "written:loss", *TAKE[name]]
    assert failed(capsys, *words, "--batch") == (
        "--batch\n"
        "  problem: the option has no value; inputs() takes batch: int = 4\n"
        "  remedy:  give one, such as --batch 4\n"
    )
    for option in ("--dtype", "--deep", "--batch"):
        assert "the option has no value" in failed(capsys, *words, option, "--wide")
    assert "takes a number there" in failed(capsys, *words, "--batch", "True")


def test_a_flag_is_true() -> None:
    size = lambda *more: json.loads(commands.run(["memory", "written:loss", "--json", *more]))
    assert size("--wide")["argument_bytes"] > size()["argument_bytes"]


@pytest.mark.parametrize("name", TAKE)
def test_a_path_names_a_module(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "my-model.py").write_text("from beside import loss, inputs\n")
    (inner / "beside.py").write_text(MODEL)
    (inner / "json.py").write_text(MODEL)
    for path in ("inner/my-model.py", f"{inner}/json.py", "written.py"):
        assert commands.main([name, f"{path}:loss", *TAKE[name]]) in (0, 3), path
        commands.run([name, f"{path}:loss", *TAKE[name], "--inputs", "written.py:inputs"])
    assert sys.modules["json"] is json
    capsys.readouterr()
    assert failed(capsys, name, "none.py:loss", *TAKE[name]) == (
        f"none.py:loss\n  problem: there is no file '{tmp_path}/none.py'\n"
        "  remedy:  name a Python file, or a module: module:name\n"
    )
    for wrong in ("written.py", "inner/written:loss", ".:loss"):
        text = failed(capsys, name, wrong, *TAKE[name], status=2)
        assert f"{wrong!r} does not have the form module:name or path.py:name" in text
    for made in ("beside", "my-model", str(inner / "json.py")):
        sys.modules.pop(made, None)


@pytest.mark.parametrize("name", TAKE)
def test_every_transform(name: str, capsys: pytest.CaptureFixture) -> None:
    transforms = TRANSFORMS if name in ("memory", "show") else ("grad", "vjp")
    for transform in transforms:
        words = [name, "written:loss", *TAKE[name], "--transform", transform]
        if name in ("compare", "residuals") and transform != "vjp":
            words += ["--policy", "save_everything"]
        # The gradient is not a scalar, so its own derivative cannot be compared.
        assert commands.main(words) in (0, 3), words
    capsys.readouterr()
    assert failed(capsys, name, "written:jitted", *TAKE[name], "--transform", "grad") == (
        "--transform grad of written:jitted\n"
        "  problem: the function is a training step of xform.jit, which takes its own "
        "derivatives\n"
        "  remedy:  leave out --transform, or name the loss\n"
    )


@pytest.mark.parametrize("name", [n for n in TAKE if n not in ("residuals", "show")])
def test_a_step_follows_a_policy_if_xform_jit_made_it_or_is_asked_to(
    name: str, capsys: pytest.CaptureFixture
) -> None:
    policy = [*TAKE[name], "--policy", "save_nothing"]
    assert commands.main([name, "written:jitted", *policy]) in (0, 3)
    by_function = capsys.readouterr().out
    assert commands.main([name, "written:step", *policy, "--transform", "jit"]) in (0, 3)
    assert same_but_times(capsys.readouterr().out) == same_but_times(by_function)
    assert "(on a command line --transform jit)" in failed(capsys, name, "written:step", *policy)


def same_but_times(text: str) -> str:
    """Return a text without the times of planning, which it states only if it compiled."""
    return re.sub(r"(planned in|compiled in|compile ) .*", "", text)


def test_transform_option_selects_the_compiled_derivative() -> None:
    sizes = lambda *more: json.loads(commands.run(["memory", *more, "--json"]))
    assert (sizes("written:loss", "--transform", "grad")["total_bytes"]
            == sizes("written:step")["total_bytes"]
            > sizes("written:loss")["total_bytes"])  # fmt: skip
    pushed = sizes("written:loss", "--transform", "jvp")["argument_bytes"]
    assert pushed == 2 * sizes("written:loss")["argument_bytes"]
    text = commands.run(["plan", "written:loss", "--transform", "value_and_grad"])
    assert text.startswith("plan of a derivative in value_and_grad of loss, min_cut, on cpu")


@pytest.mark.parametrize(("words", "text"), [
    (["compare", "written:loss", "--policy", "min_cut,,save_dots"],
     "entry 2 of 'min_cut,,save_dots' is empty"),
    (["memory", "written:loss", "--policy", ",min_cut"], "entry 1 of ',min_cut' is empty"),
    (["memory", "written:loss", "--policy", ""], "entry 1 of '' is empty"),
    (["memory", "written:loss", "--target", "cpu,"], "entry 2 of 'cpu,' is empty"),
    (["memory", "written:loss", "--mesh", "data=2,,model=2"], "entry 2"),
    (["memory", "written:loss", "--in-specs", "x=data,"], "entry 2"),
    (["show", "written:loss", "--passes", "cse,,dce"], "entry 2 of 'cse,,dce' is empty"),
    (["plan", "written:loss", "--donate", "0,,1"], "'0,,1' is not a position"),
    (["run", "."],
     "'.' is a folder without a __main__.py: name a script in it, or a module with -m"),
    (["run", "nowhere.py"], "there is no file 'nowhere.py'"),
])  # fmt: skip
def test_usage(words: list[str], text: str, capsys: pytest.CaptureFixture) -> None:
    assert text in failed(capsys, *words, status=2)


def test_a_folder_with_a_main_runs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "__main__.py").write_text("print('it ran')")
    assert commands.main(["run", "."]) == 0
    assert capsys.readouterr().out == "it ran\n"


@pytest.mark.parametrize(("words", "text"), [
    (["rules", "nosuchthing"], "rules nosuchthing\n"
     "  problem: no primitive has 'nosuchthing' in its name, and no rule has that word\n"
     "  remedy:  give part of a name, or a word: bilinear, composite, constant, linear, opaque, "
     "pointwise, reference, solve, structured\n"),
    (["rules", "cosn", "--json"], "rules cosn\n"
     "  problem: no primitive has 'cosn' in its name, and no rule has that word\n"
     "  remedy:  give part of a name, or a word: cos, cosh, conj\n"),
    (["rules", "--foreign", "nowhere"], "rules --foreign nowhere\n"
     "  problem: there is no module 'nowhere'\n"
     "  remedy:  name an installed module\n"),
])  # fmt: skip
def test_rules_that_are_not(words: list[str], text: str, capsys: pytest.CaptureFixture) -> None:
    assert failed(capsys, *words) == text


FILES = {(name, option) for name in (*TAKE, "run") for option in ("--html", "--png", "--save",
         "--report") if option in options_of(name)}  # fmt: skip


@pytest.mark.parametrize(("name", "option"), sorted(FILES))
def test_files_are_refused_before_the_work(name: str, option: str, capsys: pytest.CaptureFixture,
                                           monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Users cannot create files in `/proc`, whatever its permissions say to the superuser."""
    first = ["program.py"] if name == "run" else ["written:loss", *TAKE[name]]
    # Nothing is imported before an option is refused: this module or program does not exist.
    first[0] = "absent.py" if name == "run" else "absent:loss"
    for where in ("/proc/a.png", "nowhere/a.png", "written.py/a.png"):
        text = failed(capsys, name, option, where, *first, status=2)
        parent = str(Path(where).parent)
        assert f"{where!r}: the folder {parent!r} does not exist or cannot be written" in text
    if option == "--png":
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        assert failed(capsys, name, option, "a.png", *first) == (
            "a picture in a.png\n"
            "  problem: matplotlib is not installed\n"
            "  remedy:  install it: pip install 'jax-xform[plot]', or pip install matplotlib\n"
        )
    assert not list(Path().glob("*.png"))


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_each_command_mentions_only_options_it_defines(name: str) -> None:
    """The command's own file defines them; `--help` lists each, and messages advise no other."""
    text = Path(commands.COMMANDS[name].__file__).read_text()
    named = {*re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)}
    assert named <= options_of(name) | {"--help"}
