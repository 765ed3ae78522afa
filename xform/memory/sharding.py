"""Shard a function's arguments over a mesh of devices that need not be attached.

The mesh is abstract: it has axes with sizes, and no devices. The arguments become types with a
sharding over it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_map_with_path

from xform.errors import WrongArgument
from xform.memory.targets import Target

# Size, name and type of each axis of a mesh.
Axes = list[tuple[int, str, str]]


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
        """Return the same arguments on a mesh of these devices; unchanged without a mesh.

        Raises:
          WrongArgument: there are fewer devices than the mesh needs.
        """
        if self.mesh is None:
            return self
        if len(devices) < self.mesh.size:
            raise WrongArgument(
                f"a mesh of {self.mesh.size} devices",
                f"this process has {len(devices)} devices", "",
                f"give a target with that many devices, such as target='cpu:{self.mesh.size}'",
            )  # fmt: skip
        array = np.array(devices[: self.mesh.size]).reshape(self.mesh.axis_sizes)
        mesh = Mesh(array, self.mesh.axis_names, axis_types=self.mesh.axis_types)

        def placed(x: Any) -> Any:
            abstract = getattr(x, "sharding", None)
            if abstract is None:
                return x
            sharding = NamedSharding(mesh, abstract.spec, memory_kind=abstract.memory_kind)
            weak = getattr(x, "weak_type", False)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=weak)

        args, kwargs = jax.tree.map(placed, (self.args, self.kwargs))
        return LoweringArguments(args, kwargs, self.mesh)


def on_mesh(args: Sequence[Any], kwargs: Mapping[str, Any], target: Target,
            mesh: Mapping[str, int] | None, in_specs: Any) -> LoweringArguments:  # fmt: skip
    """Return the arguments as types, on `mesh` or on the mesh of their own shardings.

    Args:
      args: arrays or types in pytrees.
      kwargs: keyword arguments, of the same kinds.
      target: the devices; their number must be the size of the mesh.
      mesh: sizes of the axes of a mesh, by name; None for the mesh in the arguments' shardings.
      in_specs: a `PartitionSpec` for each of `args`, or a prefix of their tree. None keeps the
        arguments' own. Each argument keeps its memory kind.

    Raises:
      WrongArgument: `mesh` is not valid or not of the target's size, the arguments are on different
        meshes, or `in_specs` do not fit.
    """
    abstract = _mesh_of((args, kwargs)) if mesh is None else _abstract_mesh(mesh)
    if abstract is None and any(map(_other_memory, jax.tree.leaves((args, kwargs)))):
        abstract = _abstract_mesh({"device": 1})  # a memory kind needs a mesh
    specs = [] if in_specs is None else [_broadcast(in_specs, tuple(args))]
    if specs and abstract is None:
        raise WrongArgument(
            f"in_specs={in_specs!r}",
            "there is no mesh", "",
            "give mesh={axis: size} too, or arguments with a NamedSharding",
        )  # fmt: skip
    if abstract is not None:
        _check_size(abstract, target)
    types = tree_map_with_path(
        functools.partial(_type_on_mesh, abstract, "args"), tuple(args), *specs
    )
    of_keywords = functools.partial(_type_on_mesh, abstract, "kwargs")
    return LoweringArguments(types, tree_map_with_path(of_keywords, dict(kwargs)), abstract)


def _type_on_mesh(mesh: AbstractMesh | None, tree: str, path: Any, x: Any,
                  spec: PartitionSpec | None = None) -> Any:  # fmt: skip
    """Return the type of an array on the mesh; any other value is returned unchanged.

    With a mesh, any value that has a shape counts as an array. It is at `path` of the arguments
    that are called `tree`.
    """
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        if mesh is None or not hasattr(x, "shape"):
            return x
        x = jax.ShapeDtypeStruct(x.shape, x.dtype)
    own = getattr(x, "sharding", None)
    own = own if isinstance(own, NamedSharding) else None
    sharding = None
    if mesh is not None:
        spec = spec if spec is not None else own.spec if own else PartitionSpec()
        _check_spec(spec, tree + keystr(path), x, mesh)
        sharding = NamedSharding(mesh, spec, memory_kind=_other_memory(x))
    weak = getattr(x, "weak_type", False)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=weak)


def _other_memory(x: Any) -> str | None:
    """Return the memory kind of an argument; None for the device's own memory."""
    kind = getattr(getattr(x, "sharding", None), "memory_kind", None)
    return None if kind == "device" else kind


def _abstract_mesh(mesh: Mapping[str, int]) -> AbstractMesh:
    """Return an abstract mesh with these axes."""
    is_size = lambda n: isinstance(n, int | np.integer) and not isinstance(n, bool) and n > 0
    if not (isinstance(mesh, Mapping) and mesh and all(map(is_size, mesh.values()))):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise WrongArgument(
            f"mesh={mesh!r}",
            "it does not map names of axes to positive sizes", "",
            "give axes and sizes, such as mesh={'data': 2, 'model': 2}, or the shape of a Mesh",
        )  # fmt: skip
    kinds = (AxisType.Auto,) * len(mesh)  # JAX's default differs between versions
    return AbstractMesh(tuple(map(int, mesh.values())), tuple(mesh), axis_types=kinds)


def _check_spec(spec: PartitionSpec, name: str, x: Any, mesh: AbstractMesh) -> None:
    """Raise `WrongArgument` if an array cannot be sharded by a spec; `name` is that of the array.

    JAX would raise one of several kinds of errors.
    """
    if problem := _sharding_problem(spec, tuple(x.shape), mesh):
        raise WrongArgument(
            f"{spec!r} for {name} of shape {tuple(x.shape)} on a mesh of {_axes_text(mesh)}",
            problem, "",
            "give in_specs that name each axis of the mesh at most once, with sizes that divide "
            "the shape",
        )  # fmt: skip


def _sharding_problem(
    spec: PartitionSpec, shape: tuple[int, ...], mesh: AbstractMesh
) -> str | None:
    """Return why an array of this shape cannot be sharded by a spec; None if it can."""
    mesh_axes = [_mesh_axes(part) for part in spec.partitions]
    named = [name for names in mesh_axes for name in names]
    if unknown := [name for name in named if name not in mesh.shape]:
        return f"the mesh has no axis {unknown[0]!r}"
    if len(set(named)) < len(named):
        return "an axis of the mesh is named twice"
    if len(mesh_axes) > len(shape):
        return f"the spec has {len(mesh_axes)} axes and the argument has {len(shape)}"
    for n, names in zip(shape, mesh_axes, strict=False):
        if n % (size := math.prod(mesh.shape[name] for name in names)):
            return f"{n} elements cannot be split evenly over {size} devices, by {', '.join(names)}"
    return None


def _mesh_axes(part: Any) -> tuple[Any, ...]:
    """Return the axes of the mesh in one entry of a PartitionSpec."""
    if part is None or part is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(part) if isinstance(part, tuple) else (part,)


def _axes_text(mesh: AbstractMesh) -> str:
    """Return the axes of a mesh as text, such as "{data: 4}"."""
    return "{" + ", ".join(f"{k}: {n}" for k, n in mesh.shape.items()) + "}"


def _mesh_of(tree: Any) -> AbstractMesh | None:
    """Return the mesh of the arguments' shardings; None if there is none."""
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
    """Raise `WrongArgument` if a mesh and a target have different numbers of devices."""
    if target.count is not None and mesh.size != target.count:
        raise WrongArgument(
            f"target={target.name!r} with a mesh of {_axes_text(mesh)}",
            f"the mesh has {mesh.size} devices and the target has {target.count}", "",
            "give axes whose sizes multiply to the number of the target's devices, or a target of "
            "that size",
        )  # fmt: skip


def _broadcast(specs: Any, args: tuple[Any, ...]) -> Any:
    """Return a PartitionSpec for each leaf of the arguments, from a prefix of their tree."""
    is_spec = lambda x: x is None or isinstance(x, PartitionSpec)
    prefix = jax.tree.map(_partition_spec, specs, is_leaf=is_spec)
    try:
        return jax.tree.broadcast(prefix, args, is_leaf=is_spec)
    except ValueError as error:
        raise WrongArgument(
            f"in_specs={specs!r}",
            f"it is not a prefix of the tree of the arguments: {str(error).splitlines()[0]}", "",
            "give one PartitionSpec for all arguments, or a tuple with an entry for each argument: "
            "a PartitionSpec or a tree of them",
        ) from error  # fmt: skip


def _partition_spec(x: Any) -> PartitionSpec:
    """Return `x` as a PartitionSpec, or raise `WrongArgument`; None means replicated."""
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
