"""`python -m xform`: the named function, its inputs, errors, exit codes."""

import errno
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import xform
from xform import commands, policies
from xform.commands.shared import function
from xform.errors import FailedFunction, NotScalar, WrongArgument

MODEL = """
import jax, jax.numpy as jnp, xform

def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)

def inputs(batch: int = 4, dtype="float32"):
    return jax.ShapeDtypeStruct((8, 8), dtype), jax.ShapeDtypeStruct((batch, 8), dtype)

def other():
    return [jnp.ones((8, 8)), jnp.ones((3, 8))]

def no_tuple():
    return jnp.ones(3)

def half():
    return jnp.ones((8, 8)), jax.ShapeDtypeStruct((2.5, 8), "float32")

def bad(w, x):
    return x @ w @ x

def bare(x):
    return x

def square(x):
    return jnp.sum(x * x)

def step(w, x):
    return w - xform.grad(loss)(w, x)

jitted = xform.jit(step, donate_argnums=0)

def scaled(w, x, how):
    return w - how["rate"] * xform.grad(loss)(w, x)

def of_words():
    return *inputs(), {"rate": 0.1, "name": "sgd"}

SIZE = 3

def odd(x):
    return x

odd.inputs = 3

square.inputs = lambda n=5: (jax.ShapeDtypeStruct((n,), "float32"),)

class Model:
    def loss(w, x):
        return jnp.sum(x @ w)
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder on the path with modules `written` and `lonely`."""
    (tmp_path / "written.py").write_text(textwrap.dedent(MODEL))
    (tmp_path / "lonely.py").write_text("def f(x):\n    return x\n")
    (tmp_path / "broken.py").write_text("def f(x:\n    return x\n")
    (tmp_path / "missing.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("written", "lonely", "broken", "missing"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def kept(*words: str) -> dict:
    return json.loads(commands.run(["residuals", *words, "--json"]))


def shapes(*words: str) -> list[list[int]]:
    rows = kept(*words, "--policy", "save_nothing")["rows"]
    return sorted(row["shape"] for row in rows if row["kind"] == "argument")


@pytest.mark.usefixtures("model")
def test_inputs() -> None:
    assert shapes("written:loss") == [[4, 8], [8, 8]]
    assert shapes("written:loss", "--batch", "2") == [[2, 8], [8, 8]]
    assert shapes("written:loss", "--batch=2", "--dtype", "float16") == [[2, 8], [8, 8]]
    assert shapes("written:loss", "--arg", "batch=6") == [[6, 8], [8, 8]]
    assert shapes("written:loss", "--inputs", "written:other") == [[3, 8], [8, 8]]
    assert shapes("written:square") == [[5]]
    assert shapes("written:square", "--n", "7") == [[7]]
    assert shapes("written:Model.loss") == [[4, 8], [8, 8]]


@pytest.mark.usefixtures("model")
def test_policies() -> None:
    for name in ("min_cut", "save_everything", "save_dots", "save_nothing"):
        assert function.read_policy(name) is getattr(policies, name)
    assert function.read_policy("budget:8GiB") == policies.budget("8 GiB")
    assert function.read_policy("saved:1000") == policies.budget(1000, of="saved")
    assert kept("written:loss", "--policy", "save_nothing")["total_bytes"] == 0
    assert kept("written:loss", "--policy", "save_dots")["total_bytes"] == 4 * 8 * 4
    with pytest.raises(
        WrongArgument, match=r"--policy some\n.*no policy has the name 'some'\n.*budget:6GiB"
    ):
        function.read_policy("some")
    with pytest.raises(WrongArgument, match=r"^--policy budget:8 apples\n"):
        function.read_policy("budget:8 apples")
    for before, now in (("default", "min_cut"), ("full", "save_nothing"), ("dots", "save_dots"),
                        ("everything", "save_everything")):  # fmt: skip
        with pytest.raises(WrongArgument, match=f"\n  remedy:  did you mean '{now}'"):
            function.read_policy(before)


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nowhere:f"], "nowhere:f\n  problem: there is no module 'nowhere'\n"
         "  remedy:  run in the folder that has it, put that folder on PYTHONPATH, or name the "
         "file: path/to/nowhere.py:f"),
        (["lonely:g"], "lonely:g\n  problem: the module has no 'g'\n"
         "  remedy:  name a function of it: f"),
        (["lonely:f"], "the arguments of lonely:f\n"
         "  problem: neither lonely:f nor its module has a function `inputs`\n"
         "  remedy:  write one that returns the tuple of arguments, as arrays or "
         "ShapeDtypeStructs, or name one with --inputs module:name"),
        (["written:loss", "--bach", "8"], "the arguments of written:loss, by inputs()\n"
         "  problem: got an unexpected keyword argument 'bach'; the signature is "
         "inputs(batch: int = 4, dtype='float32')\n"
         "  remedy:  give its keyword arguments as --name value or --arg name=value, and no "
         "others"),
        (["written:loss", "--inputs", "written:no_tuple"],
         "the arguments of written:loss, by --inputs written:no_tuple\n"
         "  problem: it returned ArrayImpl, not a tuple\n"
         "  remedy:  return the tuple of positional arguments, (x,) if there is one"),
        (["written:SIZE"], "written:SIZE\n"
         "  problem: it is int, not a function\n"
         "  remedy:  name a function"),
        (["written:loss", "--inputs", "written:SIZE"],
         "the arguments of written:loss, by --inputs written:SIZE\n"
         "  problem: it is int, not a function\n"
         "  remedy:  make it a function that returns the tuple of arguments"),
        (["written:odd"], "the arguments of written:odd, by inputs()\n"
         "  problem: it is int, not a function\n"
         "  remedy:  make it a function that returns the tuple of arguments"),
        (["written:loss", "--batch", "-3"], "the arguments of written:loss, by inputs()\n"
         "  problem: it returned the invalid shape (-3, 8)\n"
         "  remedy:  return shapes of integers that are not negative"),
        (["written:loss", "--batch", "abc"], "--batch abc\n"
         "  problem: inputs() takes a number there: batch: int = 4\n"
         "  remedy:  give a number, such as --batch 4"),
        (["written:loss", "--inputs", "written:half"],
         "the arguments of written:loss, by --inputs written:half\n"
         "  problem: it returned the invalid shape (2.5, 8)\n"
         "  remedy:  return shapes of integers that are not negative"),
    ],
)  # fmt: skip
def test_errors(words: list[str], text: str, capsys: pytest.CaptureFixture) -> None:
    assert commands.main(["residuals", *words]) == 1
    out, err = capsys.readouterr()
    assert err == f"{text}\n"
    assert out == ""


def test_errors_of_the_users_code_say_which_line(model: Path) -> None:
    with pytest.raises(FailedFunction) as e:
        commands.run(["residuals", "written:bad"])
    assert str(e.value).startswith(
        "python -m xform residuals\n  problem: TypeError: dot_general requires"
    )
    line = MODEL.splitlines().index("    return x @ w @ x") + 1
    assert f"\n  where:   {model / 'written.py'}:{line} (bad)\n" in str(e.value)
    with pytest.raises(FailedFunction, match=r"SyntaxError.*\n.*broken\.py:1"):
        commands.run(["plan", "broken:f"])
    with pytest.raises(FailedFunction, match=r"no_such_library.*\n.*missing\.py:1"):
        commands.run(["plan", "missing:f"])
    with pytest.raises(FailedFunction, match=r"TypeError: data type.*\n.*written\.py"):
        commands.run(["plan", "written:loss", "--dtype", "apples"])


def test_the_line_of_an_error_may_be_in_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line is the innermost one outside of frameworks, wherever its file is installed."""
    package = tmp_path / "lib" / "site-packages"
    package.mkdir(parents=True)
    (package / "installed_loss.py").write_text(
        "import flax.linen as nn\n\n\ndef f(x):\n    return nn.Dense(3.5).init(x, x)\n"
    )
    monkeypatch.syspath_prepend(package)
    (tmp_path / "script.py").write_text(
        "import jax.numpy as jnp\nimport installed_loss\n\n\n"
        "def loss(x):\n    return installed_loss.f(x)\n\n\n"
        "def inputs():\n    return (jnp.ones(4),)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FailedFunction) as e:
        commands.run(["residuals", "script:loss"])
    assert f"  where:   {package / 'installed_loss.py'}:5 (f)\n" in str(e.value)


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "required: command"),
        (["unknown"], "invalid choice"),
        (["rules", "sin", "--what"], "unrecognized arguments: --what"),
        (["plan"], "required: FUNC"),
        (["plan", "written"], "'written' does not have the form module:name"),
        (["plan", "written:loss", "extra"], "unrecognized arguments: extra"),
        (["plan", "written:loss", "--arg", "batch"], "--arg takes name=value"),
        (["plan", "written:loss", "--argnums", "first"], "'first' is not a position"),
        (
            ["plan", "written:loss", "--donate", "all"],
            "'all' is not a position (0) or several positions (0,1)",
        ),
        (
            ["plan", "written:loss", "--save", "nowhere/plan.json"],
            "folder 'nowhere' does not exist",
        ),
        (["plan", "written:loss", "--save", "."], "'.' is not the name of a file"),
        (["plan", "written:loss", "--png", "plan.bmp"], "does not end in .png, .svg or .pdf"),
        (["memory", "written:loss", "--html", "nowhere/a.html"], "folder 'nowhere' does not exist"),
    ],
)
def test_usage(words: list[str], text: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as e:
        commands.main(words)
    assert e.value.code == 2
    assert text in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as e:
        commands.main(["--help"])
    assert e.value.code == 0
    out = capsys.readouterr().out
    for name, module in commands.COMMANDS.items():
        assert name in out
        assert module.run.__doc__.splitlines()[0][:40] in " ".join(out.split())


@pytest.mark.usefixtures("model")
def test_plan(tmp_path: Path) -> None:
    text = commands.run(["plan", "written:loss", "--no-verify", "--argnums", "0,1"])
    assert text.splitlines()[0] == "plan of loss, min_cut, on cpu"
    words = ["plan", "written:loss", "--policy", "saved:1kB", "--donate", "0", "--json",
             "--save", "plan.json"]  # fmt: skip
    data = json.loads(commands.run(words))
    assert (data["function"], data["policy"]) == ("loss", "saved:1kB")
    assert data["compiled_bytes"] > 0
    assert data["rows"]
    assert xform.Plan.load(tmp_path / "plan.json").saved_bytes == data["saved_bytes"]
    with pytest.raises(WrongArgument, match=r"--donate 7\n.*loss is given 2 arguments"):
        commands.run(["plan", "written:loss", "--donate", "7"])


@pytest.mark.usefixtures("model")
def test_plan_of_a_step_plans_the_derivatives_inside_it_and_refuses_argnums(tmp_path: Path) -> None:
    for words in (["written:jitted"], ["written:step", "--transform", "jit", "--donate", "0"]):
        title, what, arguments, *_ = commands.run(["plan", *words, "--no-verify"]).splitlines()
        assert title == "plan of a derivative in step, min_cut, on cpu"
        assert what == "planned: the derivatives inside it; bytes are of the whole function"
        assert arguments.startswith("arguments: w f32[8,8], x f32[4,8]")
        data = json.loads(commands.run(["plan", *words, "--json", "--save", "plan.json"]))
        assert data["compiled_bytes"] > 0
        assert [row["decision"] for row in data["plans"][0]["rows"]]
        follows = ["plan", *words, "--policy", "plan:plan.json", "--no-verify"]
        assert commands.run(follows).startswith(title)
    with pytest.raises(WrongArgument, match="with argnums="):
        commands.run(["plan", "written:jitted", "--argnums", "1"])
    with pytest.raises(WrongArgument, match=r"give donate_argnums to xform\.jit"):
        commands.run(["plan", "written:jitted", "--donate", "0"])
    with pytest.raises(NotScalar, match="--transform jit"):
        commands.run(["plan", "written:step"])


@pytest.mark.usefixtures("model")
def test_a_step_may_have_arguments_that_are_not_arrays() -> None:
    words = ["written:scaled", "--inputs", "written:of_words", "--transform", "jit"]
    for name in ("plan", "compare", "memory"):
        assert "min_cut" in commands.run([name, *words, "--policy", "min_cut"])


@pytest.mark.usefixtures("model")
def test_a_file_that_cannot_be_written_costs_no_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def full(plan: xform.Plan, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", ".plan.1.partial.json")

    monkeypatch.setattr(xform.Plan, "save", full)
    assert commands.main(["plan", "written:loss", "--no-verify", "--save", "plan.json"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("plan of loss")
    assert err.startswith("writing plan.json\n  problem: OSError: No space left on device\n")


@pytest.mark.usefixtures("model")
def test_plan_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    commands.run(["plan", "written:loss", "--no-verify", "--png", "plan.png"])
    assert (tmp_path / "plan.png").stat().st_size > 1000


ENV = {**os.environ, "PYTHONPATH": str(Path(xform.__file__).parents[1])}


def test_command_line(model: Path) -> None:
    command = [sys.executable, "-m", "xform", "residuals", "lonely:g"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=model, env=ENV)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("lonely:g\n  problem: the module has no 'g'")


def test_a_reader_that_has_enough() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "xform", "rules"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=ENV)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
