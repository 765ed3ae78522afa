"""Lower a function for devices that need not be attached, to a program serialized by `jax.export`.

The function is traced on types of its arguments, on an abstract mesh if they are sharded
(`sharding.py`). Another process can then compile the program for the real devices (`worker.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from xform._jax import (
    argument_names,
    compiler_options,
    jaxpr_and_consts,
    jaxprs_of,
    jit,
    side_effects,
)
from xform.errors import WrongArgument, XformError
from xform.introspection.callables import definition_site
from xform.introspection.modules import arguments_for_jit, nnx_object, take_static_out
from xform.memory.cudnn import UNCHECKED
from xform.memory.sharding import Axes, LoweringArguments
from xform.memory.targets import Target
from xform.passes.structured import inputs_read
from xform.program.dimensions import numbers, symbolic_dimensions
from xform.program.ir import program
from xform.program.source import frame
from xform.registry.repeatable import PRINTS

# The first words of JAX's messages if a program cannot be lowered without the device.
_NEEDS_DEVICE = "Cannot serialize", "the platform for the specified backend"
# JAX's message for a function that returns something other than arrays.
_WRONG_OUTPUT = re.compile(r"returned a value of type <class '(?P<type>[^']+)'>(?P<at> at [^,]+)?")


@dataclasses.dataclass(frozen=True)
class LoweredProgram:
    """A program lowered for devices that need not be attached.

    Attributes:
      name: name of the function.
      program: serialized by `jax.export`; it takes and returns flat arrays.
      devices: the number of devices that it runs on.
      axes: sizes, names and types of the axes of its mesh; empty without a mesh.
      donated: positions of the flat arguments whose memory it may reuse.
      arguments: a name for each argument that it reads.
      options: the compiler options that `jax.jit` was called with.
    """

    name: str
    program: bytes
    devices: int
    axes: Axes
    donated: list[int]
    arguments: tuple[str, ...]
    options: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])


def is_jitted(f: Any) -> bool:
    """Return whether a function was made by `jax.jit`, and so has its own options."""
    return hasattr(f, "trace") and hasattr(f, "lower")


def jitted_with_arguments(
    f: Any, args: Sequence[Any], kwargs: Mapping[str, Any], donate_argnums: int | Sequence[int] = ()
) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    """Return a function made by `jax.jit`, and the arguments as that function takes them.

    If `f` is not jitted yet, static values are taken out of its arguments. If an argument holds an
    object of Flax NNX, `nnx.jit` makes the function: its outputs are those of `f`, and the
    Variables that `f` changes.

    Raises:
      WrongArgument: `donate_argnums` is not valid, or is given for a jitted function.
    """
    if not is_jitted(f):
        f, args, kwargs = take_static_out(*arguments_for_jit(f, args, kwargs))
        has_objects = nnx_object((args, kwargs)) is not None
        try:
            make = _nnx_jit if has_objects else jit
            return make(f, donate_argnums=donate_argnums), args, kwargs
        except (TypeError, ValueError) as error:
            raise WrongArgument(
                f"donate_argnums={donate_argnums!r}",
                str(error).splitlines()[0], "",
                "give positions of arguments of the function",
            ) from error  # fmt: skip
    refuse_donation(donate_argnums)
    return f, args, kwargs


def refuse_donation(donate_argnums: int | Sequence[int]) -> None:
    """Raise WrongArgument if `donate_argnums` is given for a function that is jitted already."""
    if donate_argnums != ():
        raise WrongArgument(
            f"donate_argnums={donate_argnums!r}",
            "the function is jitted already, with its own options", "",
            "pass donate_argnums to jax.jit or xform.jit, or pass the function without it",
        )  # fmt: skip


def _nnx_jit(f: Any, donate_argnums: int | Sequence[int]) -> Any:
    """Return `nnx.jit(f)`, which returns new values of Variables, and no unchanged ones."""
    nnx = importlib.import_module("flax.nnx")
    return nnx.jit(f, donate_argnums=donate_argnums, graph_updates=False)


def device_count(lowered: Any) -> int:
    """Return the number of devices that a program runs on, from JAX's `Lowered` object."""
    return lowered.compiler_ir().operation.attributes["mhlo.num_partitions"].value


@contextlib.contextmanager
def lowering_context(target: Target, arguments: LoweringArguments) -> Generator[None]:
    """Return a context for traces on the arguments' mesh, planned for a target not attached."""
    mesh = arguments.mesh
    on_mesh = jax.sharding.use_abstract_mesh(mesh) if mesh else contextlib.nullcontext()
    with target.planned_for(), on_mesh:
        yield


def lower(f: Any, arguments: LoweringArguments, target: Target) -> tuple[LoweredProgram, Any]:
    """Lower a jitted function for a target, and return the program and its jaxpr.

    Raises:
      XformError: JAX cannot export an operation of the program.
      WrongArgument: the program runs on several devices, and its arguments have no mesh.
    """
    with lowering_context(target, arguments):
        trace = trace_jitted(f, arguments)
        try:
            exported, kept = _export_traced(trace, target.platform)
        except (NotImplementedError, ValueError) as error:
            # A ValueError may be about a custom call of another library, or about anything else.
            if isinstance(error, ValueError) and not str(error).startswith(_NEEDS_DEVICE):
                raise
            raise XformError(
                f"{trace.fun_name} for target={target.name!r}",
                f"it cannot be lowered without the device: {_why_not_exported(error)}",
                _callback_line(trace.jaxpr),
                "remove callbacks, prints and foreign calls, or compile on a machine with the "
                "device, with target=None",
            ) from None
    if exported.nr_devices > 1 and arguments.mesh is None:
        raise WrongArgument(
            f"{trace.fun_name} for target={target.name!r}",
            f"it runs on {exported.nr_devices} devices, and its arguments have no mesh", "",
            "give mesh={axis: size}, or arguments with a NamedSharding",
        )  # fmt: skip
    is_none = lambda x: x is None
    # Flat lists instead of the user's trees, which the other process may not know.
    flat = dataclasses.replace(
        exported,
        in_tree=jax.tree.structure(((None,) * len(exported.in_avals), {}), is_leaf=is_none),
        out_tree=jax.tree.structure([None] * len(exported.out_avals), is_leaf=is_none),
    )
    names, infos = argument_names(trace.jaxpr), jax.tree.leaves(trace.args_info)
    donated = [k for k, i in enumerate(kept) if infos[i].donated]
    lowered = LoweredProgram(exported.fun_name, bytes(flat.serialize()), exported.nr_devices,
                      arguments.axes, donated,
                      tuple(names[kept[k]] for k in exported.module_kept_var_idx),
                      compiler_options(trace))  # fmt: skip
    return lowered, trace.jaxpr


def lower_traced(traced: Any, platform: str) -> Any:
    """Lower a program for a platform of this process, from JAX's object `traced`.

    The result is JAX's `Lowered` object. Symbolic dimensions have their sizes at the current sample
    (`xform.program.dimensions`).
    """
    if not has_symbols(traced):
        return traced.lower()
    jitted, types, _ = _at_sample(traced, platform)
    return jitted.lower(*types)


def _export_traced(traced: Any, platform: str) -> tuple[export.Exported, Sequence[int]]:
    """Export a program for a platform; with symbolic dimensions, at the current sample.

    Also return the positions of its leaves among those of the arguments.
    """
    if not has_symbols(traced):
        exported = _export(_TracedFunction(traced), platform)()
        return exported, range(len(exported.in_avals))
    jitted, types, read = _at_sample(traced, platform)
    return _export(jitted, platform)(*types), read


def _export(jitted: Any, platform: str) -> Any:
    """Return JAX's function that exports a jitted function for a platform."""
    return export.export(jitted, platforms=[platform], disabled_checks=UNCHECKED)


def has_symbols(traced: Any) -> bool:
    """Return whether an argument of a traced program has a symbolic dimension."""
    return bool(symbolic_dimensions(jax.tree.leaves(traced.args_info)))


def _at_sample(
    traced: Any, platform: str
) -> tuple[Any, Sequence[jax.ShapeDtypeStruct], Sequence[int]]:
    """Return a program with symbolic dimensions at the current sample, as a jitted function.

    XLA replaces the symbols by their sizes. The function takes the leaves of the arguments that the
    program reads. Their types are returned too, and their positions.
    """
    exported = _export(_TracedFunction(traced), platform)()
    is_read = inputs_read(program(traced.jaxpr))
    avals, read = exported.in_avals, [i for i, on in enumerate(is_read) if on]

    def run(*given: Any) -> Any:
        by_position = dict(zip(read, given, strict=True))
        zeros = lambda a: jnp.zeros(numbers(a.shape), a.dtype)
        leaves = [by_position[i] if i in by_position else zeros(a) for i, a in enumerate(avals)]
        args, kwargs = jax.tree.unflatten(exported.in_tree, leaves)
        return exported.call(*args, **kwargs)

    run.__name__ = traced.fun_name
    types = [jax.ShapeDtypeStruct(numbers(avals[i].shape), avals[i].dtype) for i in read]
    infos = jax.tree.leaves(traced.args_info)
    donated = [k for k, i in enumerate(read) if infos[i].donated]
    return jit(run, donate_argnums=donated), types, read


def trace_jitted(f: Any, arguments: LoweringArguments) -> Any:
    """Trace a jitted function on its arguments, and return JAX's `Traced` object.

    Raises:
      WrongArgument: an argument is neither an array nor static, or the function returned something
        other than arrays.
    """
    try:
        trace = f.trace(*arguments.args, **arguments.kwargs)
    except TypeError as error:
        if wrong := _WRONG_OUTPUT.search(str(error)):
            raise WrongArgument(
                f"compile {getattr(f, '__name__', 'a function')}",
                f"it returned a value of type {wrong['type']}{wrong['at'] or ''}, which is no "
                "array",
                definition_site(f),
                "return only arrays in pytrees",
            ) from None
        if not str(error).startswith("Error interpreting argument"):
            raise
        raise WrongArgument(
            f"compile {getattr(f, '__name__', 'a function')}",
            str(error).splitlines()[0], "",
            "pass arrays or jax.ShapeDtypeStructs in pytrees; bind other arguments with "
            "functools.partial, or name them in static_argnums of jax.jit",
        ) from None  # fmt: skip
    return getattr(trace, "traced", trace)  # `nnx.jit` wraps what `jax.jit` traced


@dataclasses.dataclass(frozen=True)
class _TracedFunction:
    """A function that is traced already, in the form that `jax.export` takes."""

    traced: Any

    def __call__(self) -> Any:
        raise NotImplementedError

    def trace(self) -> Any:
        return self.traced

    def lower(self) -> Any:
        return self.traced.lower()


def _callback_line(jaxpr: Any) -> str:
    """Return the line of the user's code that calls back to Python; "" if there is none."""
    for eqn in jaxpr_and_consts(jaxpr)[0].eqns:
        if line := next(filter(None, map(_callback_line, jaxprs_of(eqn))), ""):
            return line
        if "callback" in eqn.primitive.name or not PRINTS.isdisjoint(side_effects(eqn)):
            return frame(eqn)
    return ""


def _why_not_exported(error: Exception) -> str:
    """Return why JAX cannot export a program, with the custom calls that its message names."""
    if str(error).startswith("the platform for"):
        return "it calls back to Python"
    first_sentence = str(error).splitlines()[0].partition(". See ")[0]
    custom_calls = sorted(set(re.findall(r"custom_call @\"?([\w.$]+)", str(error))))
    return first_sentence + (f" ({', '.join(custom_calls)})" if custom_calls else "")
