"""Options and output that the commands about compiled memory share."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

from xform.commands.function import ABOUT_POLICIES, add_policy_argument
from xform.errors import FailedFunction, XformError
from xform.planner.report.picture import figure_module


def add_targets(parser: argparse.ArgumentParser, several: bool = True) -> None:
    """Add the options of the target: devices, mesh, shardings, capacity and donation."""
    about = "device, such as cpu, tpu:v5e:2x2, gpu:h100 or gpu:h100:8; see `python -m xform doctor`"
    if several:
        parser.add_argument(
            "--target", type=split_commas, default=[None], metavar="T,T", help=about
        )
    else:
        parser.add_argument("--target", required=True, metavar="T", help=about)
    parser.add_argument("--mesh", type=_mesh, metavar="data=4,model=4",
                        help="axes of the device mesh, with their sizes")  # fmt: skip
    parser.add_argument("--in-specs", type=_specs, metavar="w=,x=data",
                        help="shardings of arguments, by name: the mesh axis for each array axis. "
                        "x=data shards the first axis of x, x=:data the second, x=data:model both, "
                        "and x=data+model the first over two mesh axes; other arguments are "
                        "replicated")  # fmt: skip
    parser.add_argument("--capacity", metavar="14GiB",
                        help="usable memory of each device (default: all of it)")  # fmt: skip
    parser.add_argument("--donate", type=_numbers, default=(), metavar="0,1",
                        help="positions of the arguments whose memory may be reused")  # fmt: skip


def add_policies(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Add the options for several policies of a function that may be a training step."""
    names = split_commas(default) if default else None
    parser.add_argument("--policy", type=split_commas, default=names, metavar="P,P",
                        help=ABOUT_POLICIES)  # fmt: skip
    add_policy_argument(parser)


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add the options for other forms of output."""
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    parser.add_argument("--png", type=picture, metavar="FILE", help="write a plot (PNG, SVG, PDF)")
    parser.add_argument("--html", type=file, metavar="FILE", help="write an HTML page")


def options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `memory_analysis` on the command line, except for the target."""
    specs = None if args.in_specs is None else args.bound.in_specs(args.in_specs)
    values: dict[str, Any] = {"capacity": args.capacity, "mesh": args.mesh, "in_specs": specs}
    values = {k: v for k, v in values.items() if v is not None}
    return values | ({"donate_argnums": args.donate} if args.donate else {})


def render(report: Any, args: argparse.Namespace) -> str:
    """Write the requested files of a report or comparison, and return its text or JSON."""
    wanted = ((args.png, report.plot), (args.html, report.save_html))
    written = [path for path, write in wanted if write_file(path, write, args)]
    if args.json:
        return json.dumps(report.to_dict(), indent=1)
    return "\n".join([str(report), *(f"wrote {path}" for path in written)])


def write_file(path: Path | None, write: Callable[[Path], None], args: argparse.Namespace) -> bool:
    """Write a file, if one is requested, and return whether that succeeded.

    A failure is printed to stderr and sets the exit status, so that the text is still printed.
    """
    if path is None:
        return False
    try:
        write(path)
    except (OSError, XformError) as error:
        if isinstance(error, OSError):  # its own message names the partial file
            kind, why = type(error).__name__, error.strerror
            error = FailedFunction(f"writing {path}", f"{kind}: {why}", "", "name another file")
        print(error, file=sys.stderr)
        args.status = 1
        return False
    return True


def file(text: str) -> Path:
    """The path of an output file; checked before the work starts, as a type of argparse."""
    path = Path(text)
    if not text or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file")
    try:  # permissions are not reliable for every user and file system
        with tempfile.TemporaryFile(dir=path.parent):
            return path
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: the folder {str(path.parent)!r} does not exist or cannot be written to "
            f"({error.strerror})"
        ) from None


def picture(text: str) -> Path:
    """The path of a plot; its suffix selects the format."""
    path = file(text)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .png, .svg or .pdf")
    figure_module(f"a picture in {text}")
    return path


def split_commas(text: str) -> list[str]:
    """Split a text at commas; an empty word is an error."""
    several = text.split(",")
    if not all(several):
        raise argparse.ArgumentTypeError(f"entry {several.index('') + 1} of {text!r} is empty")
    return several


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a position, or 0,1") from None


def _specs(text: str) -> dict[str, PartitionSpec]:
    specs: dict[str, PartitionSpec] = {}
    for word in split_commas(text):
        name, equals, axes = word.partition("=")
        if not (name.isidentifier() and equals):
            raise argparse.ArgumentTypeError(f"{word!r} is not argument=axes, such as x=data")
        parts = [tuple(filter(None, part.split("+"))) for part in axes.split(":")] if axes else []
        specs[name] = PartitionSpec(*[part if len(part) > 1 else next(iter(part), None)
                                      for part in parts])  # fmt: skip
    return specs


def _mesh(text: str) -> dict[str, int]:
    axes: dict[str, int] = {}
    for word in split_commas(text):
        name, equals, size = word.partition("=")
        if not (name.isidentifier() and equals and size.isdecimal()):
            raise argparse.ArgumentTypeError(f"{word!r} is not axis=size")
        axes[name] = int(size)
    return axes
