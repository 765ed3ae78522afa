"""Lower a function for devices that need not be attached, to a program serialized by JAX."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from xform._jax import argument_names, closed, compiler_options, jaxprs_of
from xform.errors import WrongArgument, XformError
from xform.introspection.callables import definition_site
from xform.memory.targets import Target
from xform.program.source import frame

Axes = list[tuple[int, str, str]]
# How JAX's messages begin if a program cannot be lowered without the device.
_ABSENT = "Cannot serialize", "the platform for the specified backend"
# JAX's message for a function that returns something other than arrays.
_WRONG_OUTPUT = re.compile(r"returned a value of type <class '(?P<type>[^']+)'>(?P<at> at [^,]+)?")


@dataclasses.dataclass(frozen=True)
class LoweringArguments:
    """The arguments that a function is lowered for, and the mesh of their shardings, if any."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mesh: AbstractMesh | None

    @property
    def axes(self) -> Axes:
        """Sizes, names and types of the mesh's axes."""
        if self.mesh is None:
            return []
        types = (t.name for t in self.mesh.axis_types)
        return [*zip(self.mesh.axis_sizes, self.mesh.axis_names, types, strict=True)]

    def on(self, devices: Sequence[Any]) -> LoweringArguments:
        """The same arguments on a mesh of these devices.

        Raises:
          WrongArgument: there are fewer devices than the mesh needs.
        """
        if self.mesh is None:
            return self
        if len(devices) < self.mesh.size:
            raise WrongArgument(
                f"a mesh of {self.mesh.size} devices",
                f"this process has {len(devices)}", "",
                f"give a target with that many devices, such as target='cpu:{self.mesh.size}'",
            )  # fmt: skip
        array = np.array(devices[: self.mesh.size]).reshape(self.mesh.axis_sizes)
        mesh = Mesh(array, self.mesh.axis_names, axis_types=self.mesh.axis_types)

        def placed(x: Any) -> Any:
            at = getattr(x, "sharding", None)
            if at is None:
                return x
            real = NamedSharding(mesh, at.spec, memory_kind=at.memory_kind)
            weak = getattr(x, "weak_type", False)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=real, weak_type=weak)

        args, kwargs = jax.tree.map(placed, (self.args, self.kwargs))
        return LoweringArguments(args, kwargs, self.mesh)


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
    """Whether a function was made by `jax.jit`, and so has its own options."""
    return hasattr(f, "trace") and hasattr(f, "lower")


def ensure_jitted(f: Any, donate_argnums: int | Sequence[int] = ()) -> Any:
    """`jax.jit(f)`; a function that is jitted already is returned unchanged.

    Raises:
      WrongArgument: `donate_argnums` is not valid, or is given for a jitted function.
    """
    if not is_jitted(f):
        try:
            return jax.jit(f, donate_argnums=donate_argnums)
        except (TypeError, ValueError) as error:
            raise WrongArgument(
                f"donate_argnums={donate_argnums!r}",
                str(error).splitlines()[0], "",
                "give positions of arguments of the function",
            ) from error  # fmt: skip
    if donate_argnums == ():
        return f
    raise WrongArgument(
        f"donate_argnums={donate_argnums!r}",
        "the function is jitted already, with its own options", "",
        "pass donate_argnums to jax.jit, or pass the function without jax.jit",
    )  # fmt: skip


def on_mesh(args: Sequence[Any], kwargs: Mapping[str, Any], target: Target,
            mesh: Mapping[str, int] | None, in_specs: Any) -> LoweringArguments:  # fmt: skip
    """The arguments as types, on `mesh` or on the mesh of their own shardings.

    Without `in_specs` the arguments keep their own PartitionSpecs. Each argument keeps its memory
    kind.

    Raises:
      WrongArgument: `mesh` is not valid or not of the target's size, the arguments are on different
        meshes, or `in_specs` do not fit.
    """
    named = _mesh_of((args, kwargs)) if mesh is None else _mesh(mesh)
    if named is None and any(map(_memory, jax.tree.leaves((args, kwargs)))):
        named = _mesh({"device": 1})  # only an argument on a mesh can have a memory kind
    specs = [] if in_specs is None else [_broadcast(in_specs, tuple(args))]
    if specs and named is None:
        raise WrongArgument(
            f"in_specs={in_specs!r}",
            "there is no mesh", "",
            "give mesh={axis: size} too, or arguments with a NamedSharding",
        )  # fmt: skip
    if named is not None:
        _check_size(named, target)
    typed = functools.partial(_type, named)
    placed = jax.tree.map(typed, tuple(args), *specs)
    return LoweringArguments(placed, jax.tree.map(typed, dict(kwargs)), named)


@contextlib.contextmanager
def lowering_context(target: Target, arguments: LoweringArguments) -> Generator[None]:
    """Context that plans traces for a target that is not attached, on its mesh."""
    mesh = arguments.mesh
    manual = jax.sharding.use_abstract_mesh(mesh) if mesh else contextlib.nullcontext()
    with target.planned_for(), manual:
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
            exported = export.export(_TracedFunction(trace), platforms=[target.platform])()
        except (NotImplementedError, ValueError) as error:
            # A foreign custom call raises ValueError, and so do many other problems.
            if isinstance(error, ValueError) and not str(error).startswith(_ABSENT):
                raise
            raise XformError(
                f"{trace.fun_name} for target={target.name!r}",
                f"it cannot be lowered without the device: {_reason(error)}",
                _callback(trace.jaxpr),
                "remove callbacks, prints and foreign calls, or compile on a machine with the "
                "device, with target=None",
            ) from None
    if exported.nr_devices > 1 and arguments.mesh is None:
        raise WrongArgument(
            f"{trace.fun_name} for target={target.name!r}",
            f"it runs on {exported.nr_devices} devices, and its arguments have no mesh", "",
            "give mesh={axis: size}, or arguments with a NamedSharding",
        )  # fmt: skip
    none = lambda x: x is None
    flat = dataclasses.replace(
        exported,
        in_tree=jax.tree.structure(((None,) * len(exported.in_avals), {}), is_leaf=none),
        out_tree=jax.tree.structure([None] * len(exported.out_avals), is_leaf=none),
    )
    names = argument_names(trace.jaxpr)
    donated = [i for i, a in enumerate(jax.tree.leaves(trace.args_info)) if a.donated]
    lowered = LoweredProgram(exported.fun_name, bytes(flat.serialize()), exported.nr_devices,
                      arguments.axes, donated,
                      tuple(names[i] for i in exported.module_kept_var_idx),
                      compiler_options(trace))  # fmt: skip
    return lowered, trace.jaxpr


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
    """Gives `jax.export` a function that is traced already, for these arguments only."""

    traced: Any

    def __call__(self) -> Any:
        raise NotImplementedError

    def trace(self) -> Any:
        return self.traced

    def lower(self) -> Any:
        return self.traced.lower()


def _type(mesh: AbstractMesh | None, x: Any, spec: PartitionSpec | None = None) -> Any:
    """The type of an array, on the mesh. With a mesh, a value that has a shape is an array too."""
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        if mesh is None or not hasattr(x, "shape"):
            return x
        x = jax.ShapeDtypeStruct(x.shape, x.dtype)
    own = getattr(x, "sharding", None)
    own = own if isinstance(own, NamedSharding) else None
    at = None
    if mesh is not None:
        spec = spec if spec is not None else own.spec if own else PartitionSpec()
        _check_spec(spec, x, mesh)
        at = NamedSharding(mesh, spec, memory_kind=_memory(x))
    weak = getattr(x, "weak_type", False)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at, weak_type=weak)


def _memory(x: Any) -> str | None:
    """The memory kind of an argument, if that is not the device's."""
    kind = getattr(getattr(x, "sharding", None), "memory_kind", None)
    return None if kind == "device" else kind


def _callback(jaxpr: Any) -> str:
    """The line of the user's code that calls back to Python, or an empty text."""
    for eqn in closed(jaxpr)[0].eqns:
        if "callback" in eqn.primitive.name or eqn.primitive.name == "debug_print":
            return frame(eqn)
        if place := next(filter(None, map(_callback, jaxprs_of(eqn))), ""):
            return place
    return ""


def _reason(error: Exception) -> str:
    """Why JAX cannot export a program, with the custom calls that its message names."""
    if str(error).startswith("the platform for"):
        return "it calls back to Python"
    first = str(error).splitlines()[0].partition(". See ")[0]
    called = sorted(set(re.findall(r"custom_call @([\w.]+)", str(error))))
    return first + (f" ({', '.join(called)})" if called else "")


def _mesh(mesh: Mapping[str, int]) -> AbstractMesh:
    """An abstract mesh with these axes."""
    count = lambda n: isinstance(n, int | np.integer) and not isinstance(n, bool) and n > 0
    if not (isinstance(mesh, Mapping) and mesh and all(map(count, mesh.values()))):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise WrongArgument(
            f"mesh={mesh!r}",
            "it does not map names of axes to positive sizes", "",
            "give axes and sizes, such as mesh={'data': 2, 'model': 2}, or the shape of a Mesh",
        )  # fmt: skip
    kinds = (AxisType.Auto,) * len(mesh)  # JAX's default differs between versions
    return AbstractMesh(tuple(map(int, mesh.values())), tuple(mesh), axis_types=kinds)


def _check_spec(spec: PartitionSpec, x: Any, mesh: AbstractMesh) -> None:
    """Raise `WrongArgument` if an array cannot be sharded so; JAX's errors would vary."""
    if problem := _misfit(spec, tuple(x.shape), mesh):
        raise WrongArgument(
            f"{spec!r} for an argument of shape {tuple(x.shape)} on a mesh of {_axes(mesh)}",
            problem, "",
            "give in_specs that name each axis of the mesh at most once, with sizes that divide "
            "the shape",
        )  # fmt: skip


def _misfit(spec: PartitionSpec, shape: tuple[int, ...], mesh: AbstractMesh) -> str | None:
    """Why an array cannot be sharded so; None if it can."""
    parts = [_names(part) for part in spec.partitions]
    named = [name for part in parts for name in part]
    if unknown := [name for name in named if name not in mesh.shape]:
        return f"the mesh has no axis {unknown[0]!r}"
    if len(set(named)) < len(named):
        return "an axis of the mesh is named twice"
    if len(parts) > len(shape):
        return f"the spec has {len(parts)} axes and the argument has {len(shape)}"
    for n, part in zip(shape, parts, strict=False):
        if n % (size := math.prod(mesh.shape[name] for name in part)):
            return f"{n} elements cannot be split evenly over {size} devices, by {', '.join(part)}"
    return None


def _names(part: Any) -> tuple[Any, ...]:
    """The axes of the mesh that one axis of an array is sharded over."""
    if part is None or part is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(part) if isinstance(part, tuple) else (part,)


def _axes(mesh: AbstractMesh) -> str:
    return "{" + ", ".join(f"{k}: {n}" for k, n in mesh.shape.items()) + "}"


def _mesh_of(tree: Any) -> AbstractMesh | None:
    """The mesh of the arguments' shardings."""
    shardings = (getattr(x, "sharding", None) for x in jax.tree.leaves(tree))
    meshes = {s.mesh.abstract_mesh for s in shardings if isinstance(s, NamedSharding)}
    if len(meshes) > 1:
        raise WrongArgument(
            "compile for a target",
            f"the arguments are on different meshes: {', '.join(sorted(map(str, meshes)))}", "",
            "put all of them on one mesh, or give mesh= and in_specs=",
        )  # fmt: skip
    return meshes.pop() if meshes else None


def _check_size(mesh: AbstractMesh, target: Target) -> None:
    if target.count is not None and mesh.size != target.count:
        raise WrongArgument(
            f"target={target.name!r} with a mesh of {_axes(mesh)}",
            f"the mesh has {mesh.size} devices and the target has {target.count}", "",
            "give axes whose sizes multiply to the number of the target's devices, or a target of "
            "that size",
        )  # fmt: skip


def _broadcast(specs: Any, args: tuple[Any, ...]) -> Any:
    """A PartitionSpec for each leaf of the arguments, from a prefix of their tree."""
    leaf = lambda x: x is None or isinstance(x, PartitionSpec)
    prefix = jax.tree.map(_spec, specs, is_leaf=leaf)
    try:
        return jax.tree.broadcast(prefix, args, is_leaf=leaf)
    except ValueError as error:
        raise WrongArgument(
            f"in_specs={specs!r}",
            f"it is not a prefix of the tree of the arguments: {str(error).splitlines()[0]}", "",
            "give one PartitionSpec for all arguments, or a tuple with an entry for each argument: "
            "a PartitionSpec or a tree of them",
        ) from error  # fmt: skip


def _spec(x: Any) -> PartitionSpec:
    """The PartitionSpec for an argument; None means replicated."""
    if isinstance(x, PartitionSpec):
        return x
    if x is not None:
        raise WrongArgument(
            f"in_specs with {x!r}",
            "it is not a PartitionSpec", "",
            "give a jax.sharding.PartitionSpec for each argument, such as PartitionSpec('data'), "
            "or None for an argument that is replicated",
        )  # fmt: skip
    return PartitionSpec()
