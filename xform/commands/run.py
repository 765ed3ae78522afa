"""`python -m xform run`: a program as it is, with xform's transforms in the place of JAX's."""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from xform import everywhere
from xform.commands.function import ABOUT_POLICIES, policy
from xform.commands.met import Met
from xform.commands.reports import file, wrote
from xform.memory.targets import parse_target


def run(args: argparse.Namespace) -> str:
    """A program as it is, with xform's transforms in the place of JAX's.

    PROGRAM is a script, or with -m a module, with its arguments; options of `run` stand before it.
    Its output and exit code are its own. At its end, also after an error, stderr gets a table of
    the functions that it differentiated: how often each was traced or ran operation by operation,
    what JAX keeps for its backward pass (everything) and what is kept here, what is run again, by
    which policy, and what was left to JAX, and why. Without --policy each transform does what it
    does by itself: the default where it is traced, no plan where it runs operation by operation.
    """
    module, words = args.module is not None, args.module or args.program
    if not words:
        args.parser.error("name a program: script.py, or -m module")
    if not module and not Path(words[0]).exists():
        args.parser.error(f"there is no file {words[0]!r}")
    if not module and Path(words[0]).is_dir() and not Path(words[0], "__main__.py").is_file():
        args.parser.error(f"{words[0]!r} is a folder without a __main__.py: name a script in it, "
                          "or a module by -m")  # fmt: skip
    by = None if args.policy is None else policy(args.policy)
    met = Met(by, compared=args.compare, detailed=args.report is not None)
    goal = None if args.target is None else parse_target(args.target)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_as_python_would(module, words))
        stack.enter_context(_late_options())
        stack.enter_context(_in_place(met))
        if goal is not None:
            stack.enter_context(goal.planned_for())
        # Of a budget without `batch=`, which no policy's text can give.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "under vmap, budget")
        if module:
            start = lambda: runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            start = lambda: runpy.run_path(os.path.abspath(words[0]), run_name="__main__")
        status = _status(start)
        with contextlib.suppress(Exception):  # the program's, which it did not wait for
            jax.effects_barrier()
    sys.stdout.flush()
    print(met, file=sys.stderr)
    wrote(args.report, met.save_html, args)
    args.status = status  # the program's, whatever became of the report
    return ""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("--policy", metavar="P", help=ABOUT_POLICIES)
    parser.add_argument("--target", metavar="T", help="what to plan for, if not what it runs on")
    parser.add_argument("--report", type=file, metavar="FILE",
                        help="a page for the browser, with what each function keeps")  # fmt: skip
    parser.add_argument("--compare", action="store_true",
                        help="let JAX do the same too, and tell how far it differs")  # fmt: skip
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE",
                        help="a module and its arguments, rather than a script")  # fmt: skip
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM ...",
                        help="a script and its arguments")  # fmt: skip


def _status(start: Callable[[], Any]) -> int:
    """Run a program to its end: its exit code; what it does not catch is shown as by Python."""
    try:
        start()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        kind = type(error)
        sys.excepthook(kind, error.with_traceback(_own(error.__traceback__)), error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _own(trace: TracebackType | None) -> TracebackType | None:
    """The program's part of a traceback."""
    ours = (__file__, "<frozen runpy>", runpy.__file__)
    while trace and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


@contextlib.contextmanager
def _in_place(met: Met) -> Generator[None]:
    everywhere.put(met.doors())
    try:
        yield
    finally:
        everywhere.uninstall()


@contextlib.contextmanager
def _as_python_would(module: bool, words: list[str]) -> Generator[None]:
    """`sys.argv` and `sys.path` as Python sets them for a script, or for a module."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = list(words)
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.realpath(words[0]))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


@contextlib.contextmanager
def _late_options() -> Generator[None]:
    """Options of JAX that the program puts into the environment before it imports JAX.

    JAX has read the environment when it was imported, which here is before the program begins.
    """
    put = os.putenv

    def putenv(name: Any, value: Any) -> None:
        put(name, value)
        key, text = os.fsdecode(name).lower(), os.fsdecode(value)
        now = getattr(jax.config, key, None) if key.startswith("jax_") else None
        if isinstance(now, bool):
            jax.config.update(key, text.lower() in ("y", "yes", "t", "true", "on", "1"))
        elif isinstance(now, int | float):
            jax.config.update(key, type(now)(text))
        elif key.startswith("jax_") and hasattr(jax.config, key):
            jax.config.update(key, text)

    os.putenv = putenv
    try:
        yield
    finally:
        os.putenv = put
