"""`python -m xform run` on an unmodified program: its output, its exit, and the report."""

import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from xform import commands, everywhere
from xform._jax import jax_primitives
from xform.commands.shared.record import largest_difference
from xform.errors import BudgetInfeasible
from xform.planner.planning import use_planner
from xform.program.ir import clear_program_cache
from xform.registry import table

PROGRAM = """
import sys
import jax, jax.numpy as jnp
from jax import grad

def loss(w, x):
    h = x
    for _ in range(4):
        h = jnp.tanh(h @ w)
    return jnp.sum(h ** 2)

@jax.jit
def step(w, x):
    value, g = jax.value_and_grad(loss)(w, x)
    return w - 0.01 * g, value

w, x = 0.5 * jnp.eye(8), jnp.ones((32, 8))
for _ in range(3):
    w, value = step(w, x)
step(w, jnp.ones((16, 8)))
print("argv", sys.argv[1:])
slope = lambda x: x * x
print(grad(slope)(3.0), grad(slope)(4.0))
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Run:
    """Run a program's text; return exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(program: str, *words: str, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
        (tmp_path / "program.py").write_text(textwrap.dedent(program))
        code = commands.main(["run", *options, "program.py", *words])
        return code, *capsys.readouterr()

    return run


def test_the_table(run: Run) -> None:
    argv, path = sys.argv, list(sys.path)
    code, out, err = run(PROGRAM, "--policy", "x", "-m")
    assert (code, out) == (0, "argv ['--policy', 'x', '-m']\n6.0 8.0\n")
    assert err == textwrap.dedent("""\
        function  line           transform       traced  eager  JAX saves  xform saves  recomputed (unfused)  policy
        loss      program.py:6   value_and_grad       2      0    8.0 KiB      4.0 KiB                0 FLOP  min_cut
        <lambda>  program.py:22  grad                 0      2                                                not planned: eager
        """)  # noqa: E501
    assert all(getattr(jax, name) is theirs for name, theirs in everywhere.THEIRS.items())
    assert (sys.argv, sys.path) == (argv, path)


def test_a_policy(run: Run) -> None:
    _, _, err = run(PROGRAM, options=("--policy", "save_nothing"))
    loss, slope = err.splitlines()[1:]
    assert loss.split()[3:] == ["2", "0", "8.0", "KiB", "0", "B", "16.4", "kFLOP", "save_nothing"]
    assert slope.split()[3:] == ["0", "2", "0", "B", "0", "B", "0", "FLOP", "save_nothing"]


def test_a_plan_that_fails_fails_no_program(run: Run) -> None:
    def failing(*_: Any) -> Any:
        raise BudgetInfeasible("a budget", "nothing fits", "", "raise it", 1)

    with use_planner(failing):
        code, out, err = run(PROGRAM)
    assert (code, out.splitlines()[-1]) == (0, "6.0 8.0")
    assert "save_everything" in err
    assert "loss (program.py:6), value_and_grad, 2x everything is saved, because planning " \
        "failed: BudgetInfeasible: nothing fits" in err  # fmt: skip


def test_derivatives_without_a_rule_fall_back_to_jax_and_are_reported(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(table.RULES, jax_primitives.sin_p)
    clear_program_cache()  # derivatives of sin from other tests
    code, out, err = run("""
        import jax, jax.numpy as jnp
        g = jax.grad(lambda x: 2 * jnp.sin(x))
        print(g(0.0), jax.jit(g)(0.0))
        y, push = jax.linearize(jnp.sin, 0.0)
        fwd, bwd = jax.fwd_and_bwd(jnp.sin, 0)
        print(push(1.0), bwd(fwd(0.0)[1], 1.0))
        """)
    assert (code, out) == (0, "2.0 2.0\n1.0 1.0\n")
    assert "<lambda> (program.py:3), grad, 2x left to JAX: MissingRule: " in err
    assert "linearize, 1x left to JAX: MissingRule: " in err


def test_an_error_is_the_programs_own(run: Run) -> None:
    code, out, err = run("""
        import jax
        print("first")
        jax.grad(lambda x: 3)(1.0)
        """)
    assert (code, out) == (1, "first\n")
    assert "Traceback (most recent call last):\n  File " in err
    assert 'program.py", line 4, in <module>' in err
    assert "runpy" not in err
    assert "xform/commands/run.py" not in err
    assert "grad requires real-valued outputs" in err
    assert "MissingRule" not in err
    assert err.splitlines()[-1].split()[:3] == ["<lambda>", "program.py:4", "grad"]


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [("sys.exit()", 0, ""), ("sys.exit(3)", 3, ""), ("sys.exit('why')", 1, "why\n"),
     ("raise KeyboardInterrupt", 130, "KeyboardInterrupt\n"), ("", 0, "")],
)  # fmt: skip
def test_exit_codes(run: Run, end: str, code: int, said: str) -> None:
    found, out, err = run(f"import sys\nprint('ran')\n{end}")
    assert (found, out) == (code, "ran\n")
    assert err.endswith(f"{said}xform: the program did not differentiate any function\n")


def test_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package_of_a_test").mkdir()
    (tmp_path / "package_of_a_test/__init__.py").touch()
    text = "import sys, os\nprint(__name__, __package__, sys.argv, sys.path[0] == os.getcwd())"
    (tmp_path / "package_of_a_test/train.py").write_text(text)
    assert commands.main(["run", "-m", "package_of_a_test.train", "--report", "x"]) == 0
    name = str(tmp_path / "package_of_a_test/train.py")
    said = f"__main__ package_of_a_test {[name, '--report', 'x']} True\n"
    assert capsys.readouterr().out == said
    sys.modules.pop("package_of_a_test")
    with pytest.raises(SystemExit) as e:
        commands.main(["run", "no_such_file.py"])
    assert e.value.code == 2
    assert "there is no file 'no_such_file.py'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        commands.main(["run"])


def test_a_comparison_with_jax(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run(PROGRAM, options=("--compare-with-jax", "--policy", "save_nothing"))
    assert (code, out.splitlines()[-1]) == (0, "6.0 8.0")
    table, told = err.split("largest relative difference from JAX:\n")
    assert "value_and_grad" in table
    loss, slope = told.splitlines()
    assert loss.startswith("loss (program.py:6): value 0, gradient ")
    assert float(loss.split()[-1]) < 1e-5
    assert slope == "<lambda> (program.py:22): value 0, gradient 0"

    wrong = lambda *args, **options: lambda *xs: (jnp.float32(1.0), jnp.float32(3.0))
    monkeypatch.setitem(everywhere._OURS, "value_and_grad", wrong)
    _, _, err = run("import jax\njax.grad(lambda x: x * x)(2.0)", options=("--compare-with-jax",))
    assert err.endswith("<lambda> (program.py:2): value 0.75, gradient 0.25\n")


def test_a_comparison_with_jax_calls_a_loss_of_nnx_again(run: Run) -> None:
    program = """
        import jax, jax.numpy as jnp
        from flax import nnx

        class Net(nnx.Module):
            def __init__(self):
                self.w, self.calls = nnx.Param(jnp.array([2.0, 3.0])), nnx.Variable(jnp.array(1.0))

        def loss(net, x):
            net.calls[...] += 1
            return net.calls[...] * jnp.sum(net.w[...] * x), "two"

        def step(net, x):
            return nnx.value_and_grad(loss, has_aux=True)(net, x)[1]["w"][...]

        def fails(net):
            raise ValueError("the program's own")

        net = Net()
        print(step(net, 2.0), nnx.jit(step)(net, 2.0), net.calls[...])
        print(nnx.grad(loss, has_aux=True, argnums=nnx.DiffState(0, nnx.Param))(net, 2.0)[1])
        try:
            nnx.grad(fails)(net)
        except ValueError as error:
            print(error)
    """
    code, out, err = run(program, options=("--compare-with-jax",))
    assert (code, out) == (0, "[4. 4.] [6. 6.] 3.0\ntwo\nthe program's own\n"), err
    loss = "loss (program.py:9): value 0, gradient 0\n"
    assert err.endswith(f"largest relative difference from JAX:\n{2 * loss}")


def test_a_comparison_leaves_the_attributes_of_a_function_as_they_are(run: Run) -> None:
    program = """
        import jax
        from collections import deque

        class Loss:
            def __init__(self):
                self.scales, self.calls, self.seen = deque([2.0, 3.0]), [], {}

            def __call__(self, x):
                self.calls.append(len(self.calls))
                self.seen[self.scales[0]] = True
                return self.scales.popleft() * x

        loss = Loss()
        print(jax.grad(loss)(1.0), [*loss.scales], loss.calls, loss.seen)
        print(jax.grad(loss)(1.0), [*loss.scales], loss.calls, loss.seen)
    """
    _, out, err = run(program, options=("--compare-with-jax",))
    assert out == "2.0 [3.0] [0] {2.0: True}\n3.0 [] [0, 1] {2.0: True, 3.0: True}\n"
    assert "value 0, gradient 0" in err


def test_failed_comparison_with_jax_is_reported_and_keeps_the_output(run: Run) -> None:
    program = """
        import jax
        scales = iter([2.0])

        def loss(x):
            return next(scales) * x

        print(jax.grad(loss)(1.0))
    """
    code, out, err = run(program, options=("--compare-with-jax",))
    assert (code, out) == (0, "2.0\n")
    assert "loss (program.py:5), grad, 1x could not be compared: StopIteration" in err
    assert err.endswith("largest relative difference from JAX:\nnothing compared\n")


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        ([1.0, 3e-9], [1.0, 1e-9], 0.0),  # numbers that are zero except for rounding
        ([1.0, 3e-3], [1.0, 1e-3], 2.0),
        ([jnp.inf, 1.0], [jnp.inf, 2.0], 0.5),
        ([1.0, jnp.inf], [1.0, 2.0], jnp.inf),
        ([1.0, jnp.nan], [1.0, 2.0], jnp.nan),
        ([jnp.nan], [jnp.nan], 0.0),
    ],
)
def test_how_far_two_results_are_apart(ours: Any, theirs: Any, told: float) -> None:
    found = largest_difference(*(list(map(jnp.float32, xs)) for xs in (ours, theirs)))
    assert jnp.allclose(found, told, equal_nan=True)


def test_a_report(run: Run, tmp_path: Path) -> None:
    code, _, err = run(PROGRAM, options=("--report", "page.html"))
    page = (tmp_path / "page.html").read_text()
    assert code == 0
    assert "&lt;lambda&gt;" in page
    assert "kept for the backward pass of loss, min_cut" in page
    assert err.count("\n") == 3


def test_jax_options_set_in_environ_before_import_take_effect(run: Run) -> None:
    put, was = os.putenv, jax.config.jax_enable_x64
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_ENABLE_X64", "0")
        try:
            _, out, _ = run("""
                import os
                os.environ["JAX_ENABLE_X64"] = "1"
                import jax, jax.numpy as jnp
                print(jax.grad(jnp.sin)(0.0).dtype)
                """)
        finally:
            jax.config.update("jax_enable_x64", was)
    assert out == "float64\n"
    assert os.putenv is put


def test_a_budget_is_for_each_jitted_step_as_a_whole(run: Run) -> None:
    plain = run(PROGRAM)
    code, out, err = run(PROGRAM, options=("--policy", "budget:1MiB"))
    assert (code, out) == plain[:2]
    assert "planned step: step, budget:1MiB, on cpu: 1 derivative" in err
    assert "value_and_grad  " in err
    assert "planned step\n" in err  # the policy of its row


def test_a_budget_that_a_step_cannot_keep_ends_the_program(run: Run) -> None:
    code, out, err = run(PROGRAM, options=("--policy", "budget:1KiB"))
    assert code == 1
    assert not out
    assert "BudgetInfeasible: policy=budget('1KiB')" in err
    assert "the lowest peak found is" in err


def test_a_budget_of_a_step_whose_first_trace_differs(run: Run) -> None:
    first = """
        import jax, jax.numpy as jnp
        traces = []

        @jax.jit
        def step(w, x):
            traces.append(1)
            scale = 1.0 if len(traces) > 1 else jnp.cos(jnp.zeros(()))
            h = lambda w: jax.lax.scan(lambda h, w: (jnp.sin(h @ w), None), x, w)[0]
            return jax.grad(lambda w: scale * jnp.mean(h(w) ** 2))(w)

        print(float(step(jnp.ones((12, 32, 32)) / 32, jnp.ones((256, 32))).sum()))
    """
    code, out, err = run(first, options=("--policy", "budget:500KiB"))
    assert code == 0, err
    assert "planned step: step, budget:500KiB" in err
    assert " 0 FLOP of" not in err
    assert "planning failed" not in err
    assert float(out) == pytest.approx(float(run(first)[1]), rel=1e-5)
