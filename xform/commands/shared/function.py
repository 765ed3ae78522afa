"""Read the function, its arguments and the policy of a command line.

A function is named as `module:name` or `path.py:name`. Its arguments come from a second function,
called `inputs` here, which returns them as a tuple. `inputs` is the first of these that exists:
`--inputs module:name`, the attribute `inputs` of the function, the function `inputs` of its module.
The arguments are pytrees of arrays or of `jax.ShapeDtypeStruct`s, which allocate nothing. Other
values are passed on unchanged.

An option `--name value` that the command does not have is a keyword argument of `inputs`. The value
is read as a Python literal if possible, else as text. `--arg name=value` does the same for any
name. A bare `--name` means True, for an argument whose default is True or False.

    # model.py
    def inputs(batch: int = 8):
        return params, jax.ShapeDtypeStruct((batch, 64), "float32")

    $ python -m xform residuals model:loss --batch 32
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.export
import numpy as np

import xform
from xform import policies
from xform.commands.shared.reference import FORM, module_of, reference, resolve
from xform.commands.shared.transform import PLANNED, add_transform, arrays_alone, transformed
from xform.errors import WrongArgument
from xform.introspection.callables import argument_names
from xform.introspection.modules import nnx_object
from xform.memory.description import describe
from xform.steps.compare import within_capacity
from xform.steps.function import FunctionStep
from xform.steps.gradient import GradientStep
from xform.steps.step import is_step
from xform.transforms.inspect import derivative_at

ABOUT_POLICIES = f"which values the backward pass saves: {policies.TEXTS}"


@dataclasses.dataclass(frozen=True)
class BoundFunction:
    """A function with its arguments.

    Attributes:
      name: the function as the user named it, such as "model:loss".
      f: the function.
      args: its positional arguments.
      source: where the arguments come from, for messages, such as "inputs()".
      inputs_call: the call that made the arguments, such as "inputs(batch=8)".
      args_of_batch: `args_of_batch(batch=n)` makes the arguments for another batch size; None if
        `inputs` has no argument `batch`.
    """

    name: str
    f: Callable[..., Any]
    args: tuple[Any, ...]
    source: str
    inputs_call: str
    args_of_batch: Callable[..., tuple[Any, ...]] | None = None

    def transformed(self, args: argparse.Namespace, policy: Any = None) -> BoundFunction:
        """Return the transform that the command line names, bound to its arguments.

        `policy` is the policy of its derivative; None is the default.
        """
        if args.transform == "jit":
            return self.as_step(args)
        if is_step(self.f):
            raise WrongArgument(
                f"--transform {args.transform} of {self.name}",
                "the function is a training step of xform.jit, which takes its own derivatives",
                "",
                "leave out --transform, or name the loss",
            )
        f, values, args_of_batch = self.f, self.args, self.args_of_batch
        argnums, has_aux = getattr(args, "argnums", 0), getattr(args, "has_aux", False)
        if args.transform not in ("grad", "value_and_grad") and self.non_arrays():
            f, values = arrays_alone(f, values)
            args_of_batch = None
        run, seeds = transformed(args.transform, f, values, argnums, has_aux, policy)
        full = lambda values: (*values, *seeds(values))
        return dataclasses.replace(
            self, name=f"{args.transform} of {self.name}", f=run, args=full(values),
            args_of_batch=args_of_batch and (lambda batch: full(args_of_batch(batch=batch))),
        )  # fmt: skip

    def as_step(self, args: argparse.Namespace) -> BoundFunction:
        """Return the function as a step of `xform.jit`, unless it is one.

        The step itself donates the arguments of `--donate`. So `args.donate` is cleared: no caller
        may donate them again.
        """
        if is_step(self.f):
            return self
        donate, args.donate = getattr(args, "donate", ()), ()
        has_modules = nnx_object(self.args) is not None
        make = xform.flax.jit if has_modules else FunctionStep
        return dataclasses.replace(self, f=make(self.f, donate_argnums=donate))

    def with_note(self, report: Any, note: str) -> Any:
        """Return a report or comparison with a note, and with the call that made the arguments."""
        description = dataclasses.replace(report.description, inputs=self.inputs_call, note=note)
        return dataclasses.replace(report, description=description)

    def with_heading(self, table: Any, argnums: int | Sequence[int] | None) -> str:
        """Return the text of a table, with lines after its title that describe the arguments.

        Args:
          table: a plan, or a table of residuals.
          argnums: positions of the differentiated arguments; None for all.
        """
        wrt = range(len(self.args)) if argnums is None else argnums
        wrt = wrt if isinstance(wrt, Sequence) else (wrt,)
        about = f"differentiated by argument{'s' * (len(wrt) != 1)} {', '.join(map(str, wrt))}"
        if is_step(self.f):
            about = "planned: the derivatives inside it; bytes are of the whole function"
        arguments = dataclasses.replace(
            describe(self.f, self.args, {}), inputs=self.inputs_call
        ).given
        title, _, rest = str(table).partition("\n")
        return f"{title}\n{about}\narguments: {arguments}\n{rest}"

    def in_specs(self, specs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the PartitionSpec of each argument; None for arguments that `specs` lacks.

        `specs` maps names of arguments to PartitionSpecs.
        """
        names = argument_names(self.f, len(self.args))
        if unknown := [name for name in specs if name not in names]:
            raise WrongArgument(
                f"--in-specs {unknown[0]}=...",
                f"{self.name} has no positional argument of that name",
                "",
                f"use the names of its arguments: {', '.join(names)}",
            )
        return tuple(specs.get(name) for name in names)

    def non_arrays(self) -> str:
        """Describe the leaves of the arguments that are neither arrays nor numbers; "" if none."""
        others = [(path, x) for path, x in jax.tree.leaves_with_path(self.args)
                  if not (hasattr(x, "dtype") or isinstance(x, numbers.Number))]  # fmt: skip
        return ", ".join(f"{jax.tree_util.keystr(p)} is {type(x).__name__}" for p, x in others)


def add_function(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that takes a function; `read_function` reads them."""
    parser.add_argument("function", type=reference, metavar="FUNC", help=f"the function, as {FORM}")
    parser.add_argument("--inputs", type=reference, metavar="module:name",
                        help="function that returns the arguments of FUNC (default: `inputs`, an "
                        "attribute of FUNC or of its module)")  # fmt: skip
    add_transform(parser)
    parser.add_argument("--arg", action="append", default=[], dest="options", metavar="name=value",
                        help="keyword argument for `inputs`, such as batch=8; --batch 8 is the "
                        "same")  # fmt: skip


def add_policy(parser: argparse.ArgumentParser, default: str | None = "min_cut") -> None:
    """Add the option `--policy`; `read_policy` reads it."""
    parser.add_argument("--policy", default=default, metavar="POLICY", help=ABOUT_POLICIES)


def add_argnums(parser: argparse.ArgumentParser, default: int | None = 0) -> None:
    """Add the options `--argnums` and `--has-aux` of a derivative.

    `default` is the default of `--argnums`; None differentiates by all arguments.
    """
    shown = "all" if default is None else default
    parser.add_argument(
        "--argnums",
        type=positions,
        default=default,
        metavar="0,1",
        help=f"positions of the arguments to differentiate, or all (default: {shown})",
    )
    parser.add_argument("--has-aux", action="store_true",
                        help="FUNC returns (output, auxiliary); only output is "
                        "differentiated")  # fmt: skip


def read_function(args: argparse.Namespace, planned: bool = False) -> BoundFunction:
    """Return the function of the command line with its arguments, after `--transform` if given.

    `planned` says whether the command applies a policy to the function. A transform that takes a
    derivative then becomes a training step. Without a transform the function is a loss, unless
    `xform.jit` made it.
    """
    function = read_untransformed(args)
    if args.transform:
        function = function.transformed(args)
    if planned and args.transform in PLANNED:
        function = function.as_step(args)
    args.bound_function = function
    return function


def read_untransformed(args: argparse.Namespace) -> BoundFunction:
    """Return the function of the command line with its arguments; `--transform` is ignored."""
    f = resolve(args.function)
    if not callable(f):
        raise WrongArgument(
            args.function, f"it is {type(f).__name__}, not a function", "", "name a function"
        )
    source = f"--inputs {args.inputs}" if args.inputs else "inputs()"
    make = _inputs_function(args, f, source)
    options = {k: True if text is None else _value(text) for k, text in args.options.items()}
    bare = {name for name, text in args.options.items() if text is None}
    parameters = _check_options(args.function, make, options, bare, source)
    values = _arguments(args.function, make(**options), source)
    _check_call(args.function, f, values, source)
    n = len(values)
    if not all(-n <= i < n for i in getattr(args, "donate", ())):
        raise WrongArgument(
            f"--donate {','.join(map(str, args.donate))}",
            f"{args.function} is given {n} argument{'s' * (n != 1)}",
            "",
            "give positions of these arguments, from 0",
        )
    words = ", ".join(f"{k}={v!r}" for k, v in options.items())
    inputs_call = f"{args.inputs or 'inputs'}({words})"
    args_of_batch = None
    if "batch" in parameters:
        args_of_batch = lambda batch: tuple(make(**{**options, "batch": batch}))
    return BoundFunction(args.function, f, values, source, inputs_call, args_of_batch)


def _inputs_function(args: argparse.Namespace, f: Any, source: str) -> Callable[..., Any]:
    """Return the function that makes the arguments of `f`: `--inputs`, or else `inputs`."""
    its_own = getattr(f, "inputs", getattr(module_of(args.function), "inputs", None))
    make = resolve(args.inputs) if args.inputs else its_own
    if make is None:
        raise WrongArgument(
            f"the arguments of {args.function}",
            f"neither {args.function} nor its module has a function `inputs`",
            "",
            "write one that returns the tuple of arguments, as arrays or ShapeDtypeStructs, or "
            "name one with --inputs module:name",
        )
    if not callable(make):
        raise WrongArgument(
            f"the arguments of {args.function}, by {source}",
            f"it is {type(make).__name__}, not a function",
            "",
            "make it a function that returns the tuple of arguments",
        )
    return make


def _check_options(
    name: str, make: Callable[..., Any], options: Mapping[str, Any], bare: Set[str], source: str
) -> Mapping[str, inspect.Parameter]:
    """Check that `inputs` takes these options, and return its parameters.

    Args:
      name: the function whose arguments are made, for messages.
      make: the function `inputs`.
      options: its keyword arguments.
      bare: names of the options that were given without a value.
      source: the name of `make` in messages.
    """
    signature = inspect.signature(make)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise WrongArgument(
            f"the arguments of {name}, by {source}",
            f"{error}; the signature is inputs{signature}",
            "",
            "give its keyword arguments as --name value or --arg name=value, and no others",
        ) from error
    for option, value in options.items():
        if option in bare:
            _check_flag(option, signature.parameters.get(option), source)
        _check_option(option, value, signature.parameters.get(option), source)
    return signature.parameters


def _arguments(name: str, values: Any, source: str) -> tuple[Any, ...]:
    """Check that `inputs` returned a tuple with valid shapes, and return it."""
    if not isinstance(values, tuple | list):
        raise WrongArgument(
            f"the arguments of {name}, by {source}",
            f"it returned {type(values).__name__}, not a tuple",
            "",
            "return the tuple of positional arguments, (x,) if there is one",
        )
    types = [x for x in jax.tree.leaves(values) if isinstance(x, jax.ShapeDtypeStruct)]
    if wrong := [x.shape for x in types if not all(map(_size, x.shape))]:
        raise WrongArgument(
            f"the arguments of {name}, by {source}",
            f"it returned the invalid shape {wrong[0]}",
            "",
            "return shapes of integers that are not negative",
        )
    return tuple(values)


def _check_call(name: str, f: Callable[..., Any], values: tuple[Any, ...], source: str) -> None:
    """Raise `WrongArgument` if the function does not take these arguments."""
    try:
        inspect.signature(f).bind(*values)
    except TypeError as error:
        raise WrongArgument(
            f"{name} on the arguments by {source}",
            f"{error}; the signature is {name.rpartition(':')[2]}{inspect.signature(f)}",
            "",
            f"return one value for each argument; it returned {len(values)}",
        ) from error
    except ValueError:
        pass  # a callable without a signature cannot be checked


def _size(n: Any) -> bool:
    """Return whether this can be a size in a shape; symbolic sizes are allowed."""
    if isinstance(n, int | np.integer):
        return bool(n >= 0)
    return bool(jax.export.is_symbolic_dim(n))


def _check_flag(name: str, parameter: inspect.Parameter | None, source: str) -> None:
    """Raise `WrongArgument` for an option without a value, unless its default is a bool."""
    if parameter is not None and isinstance(parameter.default, bool):
        return
    default = None if parameter is None else parameter.default
    example = default if isinstance(default, int | float | str) else "VALUE"
    raise WrongArgument(
        f"--{name}",
        f"the option has no value; {source} takes {name if parameter is None else parameter}",
        "",
        f"give one, such as --{name} {example}",
    )


def _check_option(name: str, value: Any, parameter: inspect.Parameter | None, source: str) -> None:
    """Raise `WrongArgument` if the default is a number and the option is not."""
    default = None if parameter is None else parameter.default
    is_number = lambda x: isinstance(x, int | float) and not isinstance(x, bool)
    if is_number(default) and value is not None and not is_number(value):
        raise WrongArgument(
            f"--{name} {value}",
            f"{source} takes a number there: {parameter}",
            "",
            f"give a number, such as --{name} {default}",
        )


def read_policy(text: str) -> Any:
    """Return the policy that `--policy` names."""
    return policies.parse(text, f"--policy {text}")


def under_policy(
    function: BoundFunction, args: argparse.Namespace, text: str | None, target: str | None
) -> Callable[..., Any]:
    """Return the function under the policy that `text` names; unchanged if it is None.

    A function of `xform.jit` is a training step, and its derivatives follow the policy. Any other
    function is a loss, and its `value_and_grad` is returned as a step. That step itself donates the
    arguments of `--donate`, so `args.donate` is cleared. `target` is the device whose capacity the
    policy "auto" uses.

    Raises:
      NotScalar: the function is neither a loss nor a step of `xform.jit`.
    """
    if text is None:
        return function.f
    step = function.f
    if not is_step(step):
        # This raises an error if the function is a step that was not made by `xform.jit`.
        derivative_at(f"--policy {text}", function.f, function.args, 0, False)
        donate, args.donate = args.donate, ()
        step = GradientStep(function.f, donate_argnums=donate)
    return step.under(within_capacity(read_policy(text), target, args.capacity))


def positions(text: str) -> int | Sequence[int] | None:
    """Parse positions of arguments: `0`, `0,2`, or `all`, for which None is returned."""
    if text == "all":
        return None
    try:
        several = [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a position (0), several positions (0,2) or all"
        ) from None
    return several if "," in text else several[0]


def _value(text: str) -> Any:
    """Read a text as a Python literal if possible; else return it unchanged."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
