"""Arithmetic on tangents and cotangents."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from xform.program.arithmetic import reshard_tangent


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_a_tangent_gets_the_explicit_axes_of_its_value(kind: AxisType) -> None:
    mesh = jax.make_mesh((2,), ("i",), (kind,), devices=jax.devices()[:2])
    x = jax.device_put(jnp.ones((4, 3)), NamedSharding(mesh, PartitionSpec("i")))
    dx = jax.device_put(jnp.ones((4, 3)), NamedSharding(mesh, PartitionSpec()))
    with jax.set_mesh(mesh):
        new = reshard_tangent(dx, jax.typeof(x))
    spec = PartitionSpec("i", None) if kind is AxisType.Explicit else PartitionSpec()
    assert new.sharding.spec == spec
    assert (new is dx) is (kind is AxisType.Auto)
