"""Options and output that the commands about compiled memory share: devices, tables and files."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

from xform.commands.shared.function import ABOUT_POLICIES
from xform.errors import FailedFunction, XformError
from xform.planner.report.picture import figure_module


def add_targets(parser: argparse.ArgumentParser, several: bool = True) -> None:
    """Add the options for the device: target, mesh, shardings, capacity and donation."""
    about = (
        "device to compile for, such as cpu, tpu:v5e:2x2, gpu:h100 or gpu:h100:8; "
        "`python -m xform doctor` lists them"
    )
    if several:
        parser.add_argument(
            "--target", type=split_commas, default=[None], metavar="DEVICE,DEVICE",
            help=f"{about}; several are compared",
        )  # fmt: skip
    else:
        parser.add_argument("--target", required=True, metavar="DEVICE", help=about)
    parser.add_argument("--mesh", type=_mesh, metavar="data=4,model=4",
                        help="axes of the device mesh, with their sizes")  # fmt: skip
    parser.add_argument("--in-specs", type=_specs, metavar="w=,x=data",
                        help="shardings of arguments by name, as the mesh axis of each array axis: "
                        "x=data shards the first axis of x, x=:data the second, x=data:model both, "
                        "and x=data+model the first over two mesh axes; other arguments are "
                        "replicated")  # fmt: skip
    parser.add_argument("--capacity", metavar="14GiB",
                        help="usable memory of each device (default: all of it)")  # fmt: skip
    add_donate(parser)


def add_donate(parser: argparse.ArgumentParser) -> None:
    """Add the option `--donate`."""
    parser.add_argument("--donate", type=_numbers, default=(), metavar="0,1",
                        help="positions of the arguments whose memory the results may reuse (as "
                        "donate_argnums of jax.jit)")  # fmt: skip


def add_policies(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Add the option `--policy` for one or several policies."""
    names = split_commas(default) if default else None
    parser.add_argument("--policy", type=split_commas, default=names, metavar="POLICY,POLICY",
                        help=f"{ABOUT_POLICIES}. Several are compared")  # fmt: skip


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add the options for other forms of output."""
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    parser.add_argument("--png", type=picture, metavar="FILE",
                        help="write a plot to this file (.png, .svg or .pdf)")  # fmt: skip
    parser.add_argument("--html", type=file, metavar="FILE", help="write an HTML page to this file")


def options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments for `memory_analysis`, except `target`, from a command line."""
    specs = None if args.in_specs is None else args.bound_function.in_specs(args.in_specs)
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
    """Return the path of an output file, after a check that it can be written.

    As `type=` of an argparse option it fails before the work starts.
    """
    path = Path(text)
    if not text or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a file")
    try:  # permissions are not reliable for every user and file system
        with tempfile.TemporaryFile(dir=path.parent):
            return path
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: the folder {str(path.parent)!r} does not exist or cannot be written to "
            f"({error.strerror})"
        ) from None


def picture(text: str) -> Path:
    """Return the path of a plot, after the checks of `file`; its suffix selects the format."""
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
    """Parse `0` or `0,1` to a tuple of integers."""
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a position (0) or several positions (0,1)"
        ) from None


def _specs(text: str) -> dict[str, PartitionSpec]:
    """Parse `w=,x=data:model` to PartitionSpecs by argument; the help of `--in-specs` explains."""
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
    """Parse `data=4,model=4` to the size of each mesh axis."""
    axes: dict[str, int] = {}
    for word in split_commas(text):
        name, equals, size = word.partition("=")
        if not (name.isidentifier() and equals and size.isdecimal()):
            raise argparse.ArgumentTypeError(f"{word!r} is not axis=size, such as data=4")
        axes[name] = int(size)
    return axes
