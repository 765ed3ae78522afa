"""`python -m xform run`: run an unmodified program with xform's transforms instead of JAX's."""

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
from xform.commands.record import DerivativeRecorder
from xform.commands.reports import file, write_file
from xform.memory.targets import parse_target


def run(args: argparse.Namespace) -> str:
    """Run an unmodified program with xform's transforms instead of JAX's.

    PROGRAM is a script, or with -m a module, with its arguments; options of `run` come before it.
    The program's output and exit code do not change. At its end, also after an error, a table of
    the functions that it differentiated is printed to stderr: how often each was traced or ran
    operation by operation, how many bytes JAX would save for the backward pass (everything) and how
    many xform saves, the recomputed work, the policy, and the functions that were left to JAX, with
    the reason. Without --policy, a traced function is planned by the default policy, and a function
    that runs operation by operation is not planned.
    """
    module, words = args.module is not None, args.module or args.program
    if not words:
        args.parser.error("name a program: script.py, or -m module")
    if not module and not Path(words[0]).exists():
        args.parser.error(f"there is no file {words[0]!r}")
    if not module and Path(words[0]).is_dir() and not Path(words[0], "__main__.py").is_file():
        args.parser.error(f"{words[0]!r} is a folder without a __main__.py: name a script in it, "
                          "or a module with -m")  # fmt: skip
    by = None if args.policy is None else policy(args.policy)
    recorder = DerivativeRecorder(by, compared=args.compare, detailed=args.report is not None)
    goal = None if args.target is None else parse_target(args.target)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_as_python_would(module, words))
        stack.enter_context(_late_options())
        stack.enter_context(_in_place(recorder))
        if goal is not None:
            stack.enter_context(goal.planned_for())
        # This warning asks for `batch=` of a budget, which the text of a policy cannot give.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "under vmap, budget")
        if module:
            start = lambda: runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            start = lambda: runpy.run_path(os.path.abspath(words[0]), run_name="__main__")
        status = _status(start)
        with contextlib.suppress(Exception):  # an error in effects that the program left pending
            jax.effects_barrier()
    sys.stdout.flush()
    print(recorder, file=sys.stderr)
    write_file(args.report, recorder.save_html, args)
    args.status = status  # the program's status, even if the report could not be written
    return ""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--policy", metavar="P", help=ABOUT_POLICIES)
    parser.add_argument("--target", metavar="T",
                        help="device to plan for (default: the one that it runs on)")  # fmt: skip
    parser.add_argument("--report", type=file, metavar="FILE",
                        help="write an HTML page with the saved values of each "
                        "function")  # fmt: skip
    parser.add_argument("--compare", action="store_true",
                        help="also run JAX's transforms, and print the largest "
                        "difference")  # fmt: skip
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE",
                        help="a module and its arguments, instead of a script")  # fmt: skip
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM ...",
                        help="a script and its arguments")  # fmt: skip


def _status(start: Callable[[], Any]) -> int:
    """Run a program and return its exit code; an uncaught error is printed as Python would."""
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
    """The part of a traceback that belongs to the program."""
    ours = (__file__, "<frozen runpy>", runpy.__file__)
    while trace and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


@contextlib.contextmanager
def _in_place(recorder: DerivativeRecorder) -> Generator[None]:
    """Replace JAX's transforms by the recording ones."""
    everywhere.replace_transforms(recorder.replacements())
    try:
        yield
    finally:
        everywhere.uninstall()


@contextlib.contextmanager
def _as_python_would(module: bool, words: list[str]) -> Generator[None]:
    """Set `sys.argv` and `sys.path` as Python does for a script or a module."""
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
    """Apply JAX's options that the program puts into the environment before it imports JAX.

    JAX reads the environment when it is imported. Here that is before the program starts.
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
