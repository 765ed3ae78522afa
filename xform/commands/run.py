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
from xform.commands.shared.function import ABOUT_POLICIES, read_policy
from xform.commands.shared.record import DerivativeRecorder
from xform.commands.shared.reports import file, write_file
from xform.memory.targets import parse_target


def run(args: argparse.Namespace) -> str:
    """Run an unmodified program with xform's transforms instead of JAX's.

    PROGRAM is a script, or with -m a module, with its arguments; options of `run` come before it.
    The program's output and exit code do not change. At its end, also after an error, a table of
    the functions that it differentiated is printed to stderr. A row says how often the function was
    traced, or ran operation by operation ("eager"). It has the bytes that JAX would save for the
    backward pass (JAX saves everything), the bytes that xform saves, the recomputed FLOPs without
    those of operations that XLA fuses, and the policy. Lines below the table list the functions
    that were left to JAX, with the reason. Without --policy, a traced function is planned by the
    default policy, and a function that runs operation by operation is not planned. A budget
    (--policy budget:8GiB, or auto) bounds each jitted step as a whole: arguments, results and
    temporary memory on each device. A line tells what each step takes. If a step cannot keep the
    budget, the program ends with an error.
    """
    is_module, words = args.module is not None, args.module or args.program
    if not words:
        args.parser.error("name a program: script.py, or -m module")
    if not is_module and not Path(words[0]).exists():
        args.parser.error(f"there is no file {words[0]!r}")
    if not is_module and Path(words[0]).is_dir() and not Path(words[0], "__main__.py").is_file():
        args.parser.error(f"{words[0]!r} is a folder without a __main__.py: name a script in it, "
                          "or a module with -m")  # fmt: skip
    policy = None if args.policy is None else read_policy(args.policy)
    recorder = DerivativeRecorder(
        policy, compared=args.compare_with_jax, detailed=args.report is not None
    )
    target = None if args.target is None else parse_target(args.target)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_argv_and_path(is_module, words))
        stack.enter_context(_jax_options_from_environment())
        stack.enter_context(_recording(recorder))
        if target is not None:
            stack.enter_context(target.planned_for())
        # This warning asks for `batch_size=` of a budget, which the text of a policy cannot give.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "under vmap, budget")
        if is_module:
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
    parser.add_argument("--policy", metavar="POLICY", help=ABOUT_POLICIES)
    parser.add_argument("--target", metavar="DEVICE",
                        help="device to plan for (default: the one that it runs on)")  # fmt: skip
    parser.add_argument("--report", type=file, metavar="FILE",
                        help="write an HTML page with the table and the saved values of each "
                        "function")  # fmt: skip
    parser.add_argument("--compare-with-jax", action="store_true",
                        help="run JAX's transforms too, and print the largest difference of their "
                        "results")  # fmt: skip
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
    """Return the part of a traceback that belongs to the program."""
    ours = (__file__, "<frozen runpy>", runpy.__file__)
    while trace and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


@contextlib.contextmanager
def _recording(recorder: DerivativeRecorder) -> Generator[None]:
    """Replace JAX's transforms by the recorder's within the context."""
    everywhere.replace_transforms(recorder.replacements())
    try:
        yield
    finally:
        everywhere.uninstall()


@contextlib.contextmanager
def _argv_and_path(is_module: bool, words: list[str]) -> Generator[None]:
    """Set `sys.argv` and `sys.path` within the context as Python does for a script or a module."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = list(words)
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(words[0]))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


@contextlib.contextmanager
def _jax_options_from_environment() -> Generator[None]:
    """Within the context, apply JAX's options that the program puts into the environment.

    JAX reads the environment only when it is imported. Here that is before the program starts.
    """
    original_putenv = os.putenv

    def putenv(name: Any, value: Any) -> None:
        original_putenv(name, value)
        key, text = os.fsdecode(name).lower(), os.fsdecode(value)
        current = getattr(jax.config, key, None) if key.startswith("jax_") else None
        if isinstance(current, bool):
            jax.config.update(key, text.lower() in ("y", "yes", "t", "true", "on", "1"))
        elif isinstance(current, int | float):
            jax.config.update(key, type(current)(text))
        elif key.startswith("jax_") and hasattr(jax.config, key):
            jax.config.update(key, text)

    os.putenv = putenv
    try:
        yield
    finally:
        os.putenv = original_putenv
