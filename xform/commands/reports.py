"""What commands about compiled memory share: targets, pictures, progress."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Generator
from typing import Any

from xform.commands.given import ABOUT_POLICIES

Progress = Callable[[str, str], None]


def add_targets(parser: argparse.ArgumentParser, several: bool = True) -> None:
    """Options that say what to compile for."""
    about = "cpu, tpu:v5e:2x2, gpu:h100, gpu:h100:8 ...: see `python -m xform doctor`"
    if several:
        parser.add_argument("--target", type=_words, default=[None], metavar="T,T", help=about)
    else:
        parser.add_argument("--target", required=True, metavar="T", help=about)
    parser.add_argument("--mesh", type=_mesh, metavar="data=4,model=4",
                        help="axes of a mesh of the target's devices")  # fmt: skip
    parser.add_argument("--capacity", metavar="14GiB", help="memory of a device, if not all of it")
    parser.add_argument("--donate", type=_numbers, default=(), metavar="0,1",
                        help="arguments whose memory may be reused")  # fmt: skip


def add_policies(parser: argparse.ArgumentParser, default: str | None) -> None:
    """The option for several policies: of a function with a `policy` argument, or of a loss."""
    parser.add_argument("--policy", type=_words, default=_words(default) if default else None,
                        metavar="P,P", help=ABOUT_POLICIES)  # fmt: skip


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Options for what is written besides the text."""
    parser.add_argument("--json", action="store_true", help="an object, rather than text")
    parser.add_argument("--png", metavar="FILE", help="a picture (PNG, SVG or PDF)")
    parser.add_argument("--html", metavar="FILE", help="a page for the browser")


def options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `memory_analysis` that a command line gives, but for the target."""
    found: dict[str, Any] = {"capacity": args.capacity, "mesh": args.mesh}
    found = {k: v for k, v in found.items() if v is not None}
    return found | ({"donate_argnums": args.donate} if args.donate else {})


def told(what: Any, args: argparse.Namespace) -> str:
    """A report, or a comparison, in the forms that a command line asks for."""
    if args.png:
        what.plot(args.png)
    if args.html:
        what.save_html(args.html)
    if args.json:
        return json.dumps(what.to_dict(), indent=1)
    written = [path for path in (args.png, args.html) if path]
    return "\n".join([str(what), *(f"wrote {path}" for path in written)])


@contextlib.contextmanager
def progress(total: int) -> Generator[Progress]:
    """A bar of so many compilations on the terminal's error stream; none where there is none."""
    if not sys.stderr.isatty():
        yield lambda policy, target: None
    elif importlib.util.find_spec("rich") is None:
        yield lambda policy, target: print(f"compiling {policy} for {target}", file=sys.stderr)
    else:
        shown: Any = importlib.import_module("rich.progress")
        console = importlib.import_module("rich.console").Console(stderr=True)
        kinds = ("SpinnerColumn", "BarColumn", "MofNCompleteColumn", "TimeElapsedColumn")
        columns = [getattr(shown, kind)() for kind in kinds]
        columns.append(shown.TextColumn("{task.description}"))
        with shown.Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=total)
            begun: list[str] = []

            def step(policy: str, target: str) -> None:
                about = f"compiling {policy} for {target}"
                bar.update(task, description=about, completed=len(begun))
                begun.append(about)

            yield step


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a position, or 0,1") from None


def _mesh(text: str) -> dict[str, int]:
    axes: dict[str, int] = {}
    for word in _words(text):
        name, equals, size = word.partition("=")
        if not (name.isidentifier() and equals and size.isdecimal()):
            raise argparse.ArgumentTypeError(f"{word!r} is not axis=size")
        axes[name] = int(size)
    return axes
