"""Operations on one mutable reference, as operations on the value that it holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from xform._jax import Primitive, primitive_named
from xform.program.arithmetic import Value
from xform.program.reference_indexing import add_at, read_at, write_at


@dataclasses.dataclass(eq=False)
class RefCell:
    """A Python object in place of a reference. It holds the reference's current value.

    Attributes:
      value: the value.
      constant: whether no derivative passes through it (a reference of kind "no_grad_no_remat").
      written: whether a nested program that gets the reference writes to it.
    """

    value: Value
    constant: bool = False
    written: bool = False

    def put(self, value: Value) -> None:
        """Replace the value."""
        self.value = lax.stop_gradient(value) if self.constant else value


# Each function gets the parameters and the operands of an operation, and returns its outputs.


def _new(params: dict[str, Any], value: Value) -> list[Any]:
    """Create a reference."""
    cell = RefCell(None, params["kind"] == "no_grad_no_remat")
    cell.put(value)
    return [cell]


def _empty(params: dict[str, Any]) -> list[Any]:
    """Create a reference without a value; it holds zeros."""
    ty = params["ty"]
    return [RefCell(lax.full(ty.shape, 0, ty.dtype))]


def _get(params: dict[str, Any], cell: RefCell, *indices: Value) -> list[Any]:
    return [read_at(cell.value, jax.tree.unflatten(params["tree"], indices))]


def _swap(params: dict[str, Any], cell: RefCell, value: Value, *indices: Value) -> list[Any]:
    """Write a part of the value, and return what was there."""
    transforms = jax.tree.unflatten(params["tree"], indices)
    old = read_at(cell.value, transforms)
    cell.put(write_at(cell.value, transforms, value))
    return [old]


def _addupdate(params: dict[str, Any], cell: RefCell, value: Value, *indices: Value) -> list[Any]:
    """Add to a part of the value."""
    transforms = jax.tree.unflatten(params["tree"], indices)
    cell.put(add_at(cell.value, transforms, value))
    return []


NEW_REF, EMPTY_REF = primitive_named("new_ref"), primitive_named("empty_ref")
OPERATIONS: dict[Primitive | None, Callable[..., list[Any]]] = {
    NEW_REF: _new,
    EMPTY_REF: _empty,
    primitive_named("free_ref"): lambda params, cell: [],
    primitive_named("freeze"): lambda params, cell: [cell.value],
    primitive_named("get"): _get,
    primitive_named("swap"): _swap,
    primitive_named("addupdate"): _addupdate,
}
