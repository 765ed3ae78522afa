"""Long work shows its progress in a terminal, and nowhere else; a fake step stands for the work."""

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import xform
from xform import commands
from xform.errors import BudgetInfeasible
from xform.terminal import progress_line

# A step ends when a byte arrives, so the tests do not depend on time.
STEPS = f"""
import os, signal, sys, threading
# Without the time that JAX takes to import:
sys.path.append({str(Path(progress_line.__file__).parent)!r})
import progress_line
progress_line.AFTER_SECONDS = progress_line.EVERY_SECONDS = 0.001
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
until_told = lambda: os.read(0, 1)
"""


class Run:
    """A program whose standard error is a terminal."""

    def __init__(self, body: str, **env: str) -> None:
        self.master, slave = pty.openpty()
        self.seen = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", STEPS + body], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=slave, env={**os.environ, "TERM": "xterm", **env}, text=True,
        )  # fmt: skip
        os.close(slave)

    def until(self, text: str) -> None:
        """Read until a text appears."""
        while text not in self.seen:
            assert self.read(), f"it ended: {self.seen!r}"

    def read(self) -> bool:
        try:
            more = os.read(self.master, 4096)
        except OSError:  # the terminal is closed
            more = b""
        self.seen += more.decode()
        return bool(more)

    def tell(self) -> None:
        self.process.stdin.write("x")
        self.process.stdin.flush()

    def end(self) -> str:
        """Return everything that the program wrote to the terminal."""
        while self.read():
            pass
        self.out = self.process.communicate()[0]
        return self.seen

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self.master)


@pytest.fixture
def run() -> Iterator[Callable[..., Run]]:
    with contextlib.ExitStack() as stack:
        yield lambda *body, **env: stack.enter_context(contextlib.closing(Run(*body, **env)))


def left(seen: str) -> str:
    """Return what a terminal of one row shows after everything was written to it."""
    return seen.rpartition("\r\x1b[K")[2]


def test_a_slow_step_shows_itself_and_disappears(run) -> None:
    slow = run("""
with progress_line.show("planning loss"):
    progress_line.update("7 of at most 16 candidates compiled")
    until_told()
    with progress_line.show("compiling loss for cpu"):
        until_told()
    until_told()
print([t.name for t in threading.enumerate()])
""")
    slow.until("planning loss: 7 of at most 16 candidates compiled, 0 s")
    slow.tell()
    slow.until("candidates compiled; compiling loss for cpu, 0 s")
    slow.tell()
    slow.seen = ""
    slow.until("candidates compiled, ")
    slow.tell()
    assert left(slow.end()) == ""
    assert slow.out == "['MainThread']\n"
    assert slow.process.returncode == 0


@pytest.mark.parametrize("how", ["raise ValueError('no')", "signal.raise_signal(2)"])
def test_an_error_and_an_interrupt_leave_no_line_and_no_thread(how: str, run) -> None:
    slow = run(f"""
try:
    with progress_line.show("planning loss"):
        until_told()
        {how}
        until_told()
except BaseException as error:
    print(type(error).__name__, [t.name for t in threading.enumerate()])
""")
    slow.until("planning loss, 0 s")
    slow.tell()
    assert left(slow.end()) == ""
    kind = "ValueError" if "Value" in how else "KeyboardInterrupt"
    assert slow.out == f"{kind} ['MainThread']\n"


def test_two_threads_share_one_line(run) -> None:
    slow = run("""
gate = threading.Event()
def other():
    with progress_line.show("planning other"):
        gate.wait()
thread = threading.Thread(target=other)
with progress_line.show("planning first"):
    until_told()
    thread.start()
    until_told()
until_told()
gate.set()
thread.join()
""")
    slow.until("planning first, 0 s")
    assert "other" not in slow.seen
    slow.tell()
    slow.tell()
    slow.until("planning other, ")
    slow.tell()
    seen = slow.end()
    assert left(seen) == ""
    first, _, second = seen.partition("planning other")
    assert "planning first" in first
    assert "planning first" not in second


def test_a_narrow_terminal(run) -> None:
    slow = run("""
import fcntl, struct, termios
fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 30, 0, 0))
with progress_line.show("planning " + "x" * 40):
    until_told()
""")
    slow.until("s")
    slow.tell()
    first = slow.end().split("\r\x1b[K")[1]
    assert first == "planning xxxxxxxxxxxx..., 0 s"
    assert len(first) < 30


SLOW = """
with progress_line.show("planning loss"):
    import time; time.sleep(0.2)
"""


@pytest.mark.parametrize("kind", ["dumb", "unknown"])
def test_terminals_that_erase_nothing_are_left_alone(kind: str, run) -> None:
    assert run(SLOW, TERM=kind).end() == ""


def test_short_work_shows_nothing(run) -> None:
    assert (
        run(
            "progress_line.AFTER_SECONDS = 60\nwith progress_line.show('planning'):\n    pass"
        ).end()
        == ""
    )


def test_stderr_that_is_no_terminal_gets_no_progress_line(tmp_path, run) -> None:
    with (tmp_path / "err").open("w") as file:
        for into in (subprocess.PIPE, subprocess.DEVNULL, file):
            made = subprocess.run([sys.executable, "-c", STEPS + SLOW], stderr=into, check=True)
            assert not made.stderr
    assert (tmp_path / "err").read_text() == ""
    closed = "import sys; sys.stderr = None\n" + SLOW
    assert run(closed).end() == ""


class Notebook(io.TextIOBase):
    """The standard error of a notebook: it accepts only whole texts."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("err", [None, Notebook(), io.StringIO(), sys.stderr])
def test_no_thread_starts_without_a_terminal(err, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with contextlib.redirect_stderr(err), progress_line.show("planning"):
        progress_line.update("here")
        assert not [t for t in threading.enumerate() if t.name == "xform-progress"]


# The work that shows progress: titles, and the reported progress of each.


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the lines that a terminal would show if each piece of work took long."""
    said: list[str] = []

    class Recorded(progress_line.Task):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "progress":
                said.append(str(self))

    monkeypatch.setattr(progress_line, "Task", Recorded)
    monkeypatch.setattr(progress_line, "_is_terminal", lambda: True)
    return said


def loss(w, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0].sum()


ARGS = jax.ShapeDtypeStruct((6, 16, 16), "float32"), jax.ShapeDtypeStruct((8, 16), "float32")
# Each is used in one test only, because a compiled program is not compiled again.
REFUSED = ARGS[0], jax.ShapeDtypeStruct((10, 16), "float32")
OTHERS = ARGS[0], jax.ShapeDtypeStruct((9, 16), "float32")
SMALL = xform.policies.budget("20 kB")


def in_a_jit(policy) -> None:
    jax.jit(xform.grad(loss, policy=policy)).trace(*ARGS)


def in_a_trace() -> None:
    jax.jit(lambda: xform.plan(loss, *ARGS, policy=SMALL).saved_bytes).trace()


DEVICE = "--target", "cpu", "--capacity", "1MiB"


def command(name: str, *words: str) -> None:
    here = "tests.terminal.test_progress_line"
    commands.run([name, f"{here}:loss", "--inputs", f"{here}:inputs", *words])


SAYS = {
    "plan": (lambda: xform.plan(loss, *OTHERS, policy=SMALL), ["planning loss", "0 of at most 8",
             "1 of at most 8 candidates compiled", "making candidate 1",
             "loss for cpu"]),
    "pareto": (lambda: xform.pareto(loss, *ARGS, points=2),
               ["pareto of loss", "plan 1 of 7", "plan 7 of 7", "planning loss"]),
    "compare": (lambda: xform.compare(loss, *ARGS, policies=[None, SMALL]),
                ["comparing policies of loss: 2 of 2, budget:20 kB"]),
    "max_batch": (lambda: xform.memory.max_batch(loss, *ARGS, target="cpu", capacity="40 kB"),
                  ["finding the largest batch of loss: batch 8, 0 of at most 8 sizes tried"]),
    "memory_analysis": (lambda: xform.memory_analysis(loss, *ARGS), ["compiling loss for cpu"]),
    "residuals": (lambda: xform.residuals(loss, *ARGS), ["choosing what to save"]),
    "a budget in a jit": (lambda: in_a_jit(SMALL), ["choosing what to save", "making candidate 1"]),
    "the default in a jit": (lambda: in_a_jit(None), ["choosing what to save"]),
    "a plan in a trace": (in_a_trace, ["planning loss"]),
    "jacobian": (lambda: jax.jit(xform.jacobian(jnp.sin, policy=SMALL)).trace(jnp.ones(9)),
                 ["choosing how to evaluate a Jacobian: 0 of at most 8 candidates compiled"]),
    "memory": (lambda: command("memory"), ["compiling loss for cpu"]),
    "fits": (lambda: command("fits", *DEVICE), ["compiling loss for cpu"]),
    "why-oom": (lambda: command("why-oom", *DEVICE), ["compiling loss for cpu"]),
    "max-batch": (lambda: command("max-batch", *DEVICE), ["finding the largest batch of loss"]),
    "show": (lambda: command("show", "--transform", "grad"), ["choosing what to save"]),
}  # fmt: skip


def inputs():
    return ARGS


@pytest.mark.parametrize("name", SAYS)
def test_each_long_operation_reports_its_steps_and_ends_its_thread(
    name: str, said: list[str]
) -> None:
    call, words = SAYS[name]
    call()
    for word in words:
        assert any(word in text for text in said), (word, said)
    assert progress_line._SHOWN.get() is None
    assert not [t for t in threading.enumerate() if t.name == "xform-progress"]


def test_a_refused_budget_leaves_nothing(said: list[str]) -> None:
    with pytest.raises(BudgetInfeasible):
        xform.plan(loss, *REFUSED, policy=xform.policies.budget("1 kB"))
    found = (re.search(r"(\d+) of at most 8 candidates", text) for text in said)
    counts = [int(match[1]) for match in found if match]
    assert max(counts) < 8
    assert progress_line._SHOWN.get() is None
    assert not [t for t in threading.enumerate() if t.name == "xform-progress"]


def test_several_threads_plan_at_once(said: list[str]) -> None:
    call = lambda n: jax.jit(xform.grad(loss, policy=xform.policies.budget(18_000 + n))).trace(
        *ARGS
    )
    with ThreadPoolExecutor(4) as pool:
        assert len([*pool.map(call, range(8))]) == 8
        assert not any(pool.map(lambda _: progress_line._SHOWN.get(), range(8)))
    assert progress_line._LineWriter._owner is None
