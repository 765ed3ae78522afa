"""Lower a function for devices that are not here: its program, as JAX serializes it."""

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
from xform.callables import written
from xform.errors import WrongArgument, XformError
from xform.memory.targets import Target
from xform.source import frame

Axes = list[tuple[int, str, str]]
# How JAX begins to say that something is not lowered without the device.
_ABSENT = "Cannot serialize", "the platform for the specified backend"
# What JAX says of a function that returns something else than arrays.
_WRONG_OUTPUT = re.compile(r"returned a value of type <class '(?P<type>[^']+)'>(?P<at> at [^,]+)?")


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What a function is lowered on: `mesh` is the one of the arguments' shardings, if any."""

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

    def on(self, devices: Sequence[Any]) -> Arguments:
        """The same on a mesh of these devices.

        Raises:
          WrongArgument: they are too few.
        """
        if self.mesh is None:
            return self
        if len(devices) < self.mesh.size:
            raise WrongArgument(
                f"a mesh of {self.mesh.size} devices",
                f"this process has {len(devices)}",
                "",
                f"give a target with that many devices, such as target='cpu:{self.mesh.size}'",
            )
        array = np.array(devices[: self.mesh.size]).reshape(self.mesh.axis_sizes)
        mesh = Mesh(array, self.mesh.axis_names, axis_types=self.mesh.axis_types)

        def there(x: Any) -> Any:
            at = getattr(x, "sharding", None)
            if at is None:
                return x
            real = NamedSharding(mesh, at.spec, memory_kind=at.memory_kind)
            weak = getattr(x, "weak_type", False)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=real, weak_type=weak)

        args, kwargs = jax.tree.map(there, (self.args, self.kwargs))
        return Arguments(args, kwargs, self.mesh)


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A program for devices that are not here.

    Attributes:
      name: of the function.
      program: serialized by `jax.export`; it takes and returns flat arrays.
      devices: on how many it runs.
      axes: sizes, names and types of the axes of its mesh; none without a mesh.
      donated: places of arguments whose memory it may reuse.
      arguments: a name for each argument that it reads.
      options: those that `jax.jit` was given for the compiler.
    """

    name: str
    program: bytes
    devices: int
    axes: Axes
    donated: list[int]
    arguments: tuple[str, ...]
    options: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])


def is_jitted(f: Any) -> bool:
    """Whether `jax.jit` made a function, with options of its own."""
    return hasattr(f, "trace") and hasattr(f, "lower")


def jitted(f: Any, donate_argnums: int | Sequence[int] = ()) -> Any:
    """`f` as `jax.jit` makes it; one that is made already keeps its own options."""
    if not is_jitted(f):
        try:
            return jax.jit(f, donate_argnums=donate_argnums)
        except (TypeError, ValueError) as error:
            raise WrongArgument(
                f"donate_argnums={donate_argnums!r}",
                str(error).splitlines()[0],
                "",
                "give positions of arguments that the function has",
            ) from error
    if donate_argnums == ():
        return f
    raise WrongArgument(
        f"donate_argnums={donate_argnums!r}",
        "the function is jitted already, with options of its own",
        "",
        "give jax.jit the donate_argnums, or pass the function that is not jitted",
    )


def on_mesh(args: Sequence[Any], kwargs: Mapping[str, Any], target: Target,
            mesh: Mapping[str, int] | None, in_specs: Any) -> Arguments:  # fmt: skip
    """The arguments as types, on the mesh that is given or that their own shardings have.

    Without `in_specs` the arguments keep those of their own shardings. Each stays in its memory.

    Raises:
      WrongArgument: the mesh is none, or not of the target's size, there are two, or `in_specs` do
        not fit.
    """
    named = _mesh_of((args, kwargs)) if mesh is None else _mesh(mesh)
    if named is None and any(map(_memory, jax.tree.leaves((args, kwargs)))):
        named = _mesh({"device": 1})  # which says of each argument in which memory it is
    specs = [] if in_specs is None else [_broadcast(in_specs, tuple(args))]
    if specs and named is None:
        raise WrongArgument(
            f"in_specs={in_specs!r}",
            "there is no mesh whose axes they could name",
            "",
            "give mesh={axis: size} too, or arguments that have a NamedSharding",
        )
    if named is not None:
        _check_size(named, target)
    typed = functools.partial(_type, named)
    placed = jax.tree.map(typed, tuple(args), *specs)
    return Arguments(placed, jax.tree.map(typed, dict(kwargs)), named)


@contextlib.contextmanager
def lowered_for(target: Target, arguments: Arguments) -> Generator[None]:
    """Within it, what is traced is planned for a target that is not here, on its mesh."""
    mesh = arguments.mesh
    manual = jax.sharding.use_abstract_mesh(mesh) if mesh else contextlib.nullcontext()
    with target.planned_for(), manual:
        yield


def lower(f: Any, arguments: Arguments, target: Target) -> tuple[Lowered, Any]:
    """The program of a jitted function for a target, and its jaxpr.

    Raises:
      XformError: the program holds what JAX cannot export.
    """
    with lowered_for(target, arguments):
        trace = traced(f, arguments)
        try:
            exported = export.export(_Traced(trace), platforms=[target.platform])()
        except (NotImplementedError, ValueError) as error:
            # What has custom calls of its own is a ValueError, and so is much else.
            if isinstance(error, ValueError) and not str(error).startswith(_ABSENT):
                raise
            raise XformError(
                f"{trace.fun_name} for target={target.name!r}",
                f"it cannot be lowered without the device: {_reason(error)}",
                _callback(trace.jaxpr),
                "take out callbacks, prints and foreign calls, or compile where the device is, "
                "with target=None",
            ) from None
    if exported.nr_devices > 1 and arguments.mesh is None:
        raise WrongArgument(
            f"{trace.fun_name} for target={target.name!r}",
            f"it runs on {exported.nr_devices} devices, and its arguments name no mesh",
            "",
            "give mesh={axis: size}, or arguments that have a NamedSharding",
        )
    none = lambda x: x is None
    flat = dataclasses.replace(
        exported,
        in_tree=jax.tree.structure(((None,) * len(exported.in_avals), {}), is_leaf=none),
        out_tree=jax.tree.structure([None] * len(exported.out_avals), is_leaf=none),
    )
    names = argument_names(trace.jaxpr)
    donated = [i for i, a in enumerate(jax.tree.leaves(trace.args_info)) if a.donated]
    lowered = Lowered(exported.fun_name, bytes(flat.serialize()), exported.nr_devices,
                      arguments.axes, donated,
                      tuple(names[i] for i in exported.module_kept_var_idx),
                      compiler_options(trace))  # fmt: skip
    return lowered, trace.jaxpr


def traced(f: Any, arguments: Arguments) -> Any:
    """A jitted function, traced on its arguments.

    Raises:
      WrongArgument: one of them is no array, and is not static.
    """
    try:
        trace = f.trace(*arguments.args, **arguments.kwargs)
    except TypeError as error:
        if wrong := _WRONG_OUTPUT.search(str(error)):
            raise WrongArgument(
                f"compile {getattr(f, '__name__', 'a function')}",
                f"it returned a value of type {wrong['type']}{wrong['at'] or ''}, which is no "
                "array",
                written(f),
                "return arrays in pytrees, and nothing else",
            ) from None
        if not str(error).startswith("Error interpreting argument"):
            raise
        raise WrongArgument(
            f"compile {getattr(f, '__name__', 'a function')}",
            str(error).splitlines()[0],
            "",
            "pass arrays or jax.ShapeDtypeStructs in pytrees; bind other arguments with "
            "functools.partial, or name them in static_argnums of jax.jit",
        ) from None
    return getattr(trace, "traced", trace)  # `nnx.jit` wraps what `jax.jit` traced


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A function that is traced already, as `jax.export` takes it: it traces no other arguments."""

    traced: Any

    def __call__(self) -> Any:
        raise NotImplementedError

    def trace(self) -> Any:
        return self.traced

    def lower(self) -> Any:
        return self.traced.lower()


def _type(mesh: AbstractMesh | None, x: Any, spec: PartitionSpec | None = None) -> Any:
    """An array as its type, on the mesh; what is no array stays."""
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
    """The memory that an argument is in, if that is not the device's."""
    kind = getattr(getattr(x, "sharding", None), "memory_kind", None)
    return None if kind == "device" else kind


def _callback(jaxpr: Any) -> str:
    """Where the user's code calls back to Python, if it does."""
    for eqn in closed(jaxpr)[0].eqns:
        if "callback" in eqn.primitive.name or eqn.primitive.name == "debug_print":
            return frame(eqn)
        if place := next(filter(None, map(_callback, jaxprs_of(eqn))), ""):
            return place
    return ""


def _reason(error: Exception) -> str:
    """Why JAX cannot export a program, and which foreign functions it names."""
    if str(error).startswith("the platform for"):
        return "it calls back to Python"
    first = str(error).splitlines()[0].partition(". See ")[0]
    called = sorted(set(re.findall(r"custom_call @([\w.]+)", str(error))))
    return first + (f" ({', '.join(called)})" if called else "")


def _mesh(mesh: Mapping[str, int]) -> AbstractMesh:
    """A mesh of axes by name."""
    count = lambda n: isinstance(n, int | np.integer) and not isinstance(n, bool) and n > 0
    if not (isinstance(mesh, Mapping) and mesh and all(map(count, mesh.values()))):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise WrongArgument(
            f"mesh={mesh!r}",
            "it is not a positive size for each of some axes, by name",
            "",
            "give axes and sizes, such as mesh={'data': 2, 'model': 2}, or the `shape` of a Mesh",
        )
    kinds = (AxisType.Auto,) * len(mesh)  # what JAX takes for granted differs by version
    return AbstractMesh(tuple(map(int, mesh.values())), tuple(mesh), axis_types=kinds)


def _check_spec(spec: PartitionSpec, x: Any, mesh: AbstractMesh) -> None:
    """Raise where an array cannot be laid out so: what JAX raises differs by what is wrong."""
    if problem := _misfit(spec, tuple(x.shape), mesh):
        raise WrongArgument(
            f"{spec!r} for an argument of shape {tuple(x.shape)} on a mesh of {_axes(mesh)}",
            problem,
            "",
            "give in_specs of axes of the mesh, each once and whose sizes divide the shape",
        )


def _misfit(spec: PartitionSpec, shape: tuple[int, ...], mesh: AbstractMesh) -> str | None:
    """What is wrong with the layout of an array, if anything."""
    parts = [_names(part) for part in spec.partitions]
    named = [name for part in parts for name in part]
    if unknown := [name for name in named if name not in mesh.shape]:
        return f"the mesh has no axis {unknown[0]!r}"
    if len(set(named)) < len(named):
        return "an axis of the mesh is named twice"
    if len(parts) > len(shape):
        return f"the spec is of {len(parts)} axes and the argument has {len(shape)}"
    for n, part in zip(shape, parts, strict=False):
        if n % (size := math.prod(mesh.shape[name] for name in part)):
            return f"{n} elements are not divided evenly among {size} devices, by {', '.join(part)}"
    return None


def _names(part: Any) -> tuple[Any, ...]:
    """The axes of the mesh along which one axis of an array is divided."""
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
            f"the arguments are on different meshes: {', '.join(sorted(map(str, meshes)))}",
            "",
            "put all of them on one mesh, or give mesh= and in_specs=",
        )
    return meshes.pop() if meshes else None


def _check_size(mesh: AbstractMesh, target: Target) -> None:
    if target.count is not None and mesh.size != target.count:
        raise WrongArgument(
            f"target={target.name!r} with a mesh of {_axes(mesh)}",
            f"the mesh has {mesh.size} devices and the target {target.count}",
            "",
            "give axes whose sizes multiply to the number of the target's devices, or a target of "
            "that size",
        )


def _broadcast(specs: Any, args: tuple[Any, ...]) -> Any:
    """A PartitionSpec for each leaf of the arguments, from a prefix of their tree."""
    leaf = lambda x: x is None or isinstance(x, PartitionSpec)
    prefix = jax.tree.map(_spec, specs, is_leaf=leaf)
    try:
        return jax.tree.broadcast(prefix, args, is_leaf=leaf)
    except ValueError as error:
        raise WrongArgument(
            f"in_specs={specs!r}",
            f"it is no prefix of the tree of the arguments: {str(error).splitlines()[0]}",
            "",
            "give one PartitionSpec for all, or a tuple with one entry for each argument, each a "
            "PartitionSpec or a tree of them",
        ) from error


def _spec(x: Any) -> PartitionSpec:
    """What is given for an argument; None is on every device."""
    if isinstance(x, PartitionSpec):
        return x
    if x is not None:
        raise WrongArgument(
            f"in_specs with {x!r}",
            "it is no PartitionSpec",
            "",
            "give a jax.sharding.PartitionSpec for each argument, such as PartitionSpec('data'), "
            "or None for what is on every device",
        )
    return PartitionSpec()
