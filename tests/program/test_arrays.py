"""Transforms that make arrays of their own, at values of every kind of type: as in JAX."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import xform
from tests.sharding import BATCH, mesh, shard, types
from xform import adjoints, curvature, sparse
from xform.errors import WrongArgument, WrongCotangent

pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices"),
]

X = np.linspace(0.1, 1.7, 16)
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
Run = Callable[[Any], Any]


def vector(x: Any) -> Any:
    return jnp.sin(x) * x


def scalar(x: Any) -> Any:
    return jnp.sum(vector(x) * x)


# The result at `x` of a transform of `t`, for a vector function `f` and a scalar function `s`.
OF_BOTH: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "value_and_grad": lambda t, f, s, x: t.value_and_grad(s)(x),
    "vjp": lambda t, f, s, x: t.vjp(f, x)[1](f(x)),
    "linearize": lambda t, f, s, x: t.linearize(f, x)[1](x),
    "jacfwd": lambda t, f, s, x: t.jacfwd(f)(x),
    "jacrev": lambda t, f, s, x: t.jacrev(f)(x),
    "jacrev of a scalar": lambda t, f, s, x: t.jacrev(s)(x),
    "jacrev of a tree": lambda t, f, s, x: t.jacrev(lambda x: (s(x), f(x)))(x),
    "hessian": lambda t, f, s, x: t.hessian(s)(x),
    "jacrev of jacrev": lambda t, f, s, x: t.jacrev(t.jacrev(s))(x),
    "jacrev of jacfwd": lambda t, f, s, x: t.jacrev(t.jacfwd(s))(x),
}
# Functions of xform alone, each with the same computation in JAX.
OF_XFORM: dict[str, tuple[Callable[[Any, Any, Any], Any], Callable[[Any, Any, Any], Any]]] = {
    "jacobian": (
        lambda f, s, x: xform.jacobian(f)(x),
        lambda f, s, x: jax.jacrev(f)(x),
    ),
    "jacobian by columns": (
        lambda f, s, x: xform.jacobian(f, mode="forward", chunk=2)(x),
        lambda f, s, x: jax.jacfwd(f)(x),
    ),
    "sparse jacobian": (
        lambda f, s, x: sparse.jacobian(f)(x).todense(),
        lambda f, s, x: jax.jacfwd(f)(x),
    ),
    "sparse hessian": (
        lambda f, s, x: sparse.hessian(s)(x).todense(),
        lambda f, s, x: jax.hessian(s)(x),
    ),
    "laplacian": (
        lambda f, s, x: sparse.laplacian(f, return_jacobian=True)(x)[1],
        lambda f, s, x: jax.jacfwd(f)(x).T,
    ),
    "hutchinson": (
        lambda f, s, x: curvature.hutchinson(s, (x,), jax.random.key(0), samples=2).trace,
        lambda f, s, x: jnp.sum(jax.jvp(jax.grad(s), (x,), (jnp.ones_like(x),))[1]),
    ),
    "hessian_spectrum": (
        lambda f, s, x: curvature.hessian_spectrum(s, (x,), jax.random.key(0), samples=1).trace,
        lambda f, s, x: jnp.sum(jax.jvp(jax.grad(s), (x,), (jnp.ones_like(x),))[1]),
    ),
    "partials": (
        lambda f, s, x: adjoints.partials(lambda x: s(adjoints.name(x, "x")), "x")(x),
        lambda f, s, x: jax.grad(s)(x),
    ),
}
TRANSFORMS = [*OF_BOTH, *OF_XFORM]


def manual(run: Run, check_vma: bool = True, spec: Any = BATCH[0]) -> Any:
    """Run inside a `shard_map`; the results of the devices are stacked."""

    def inside(x: Any) -> Any:
        return jax.tree.map(lambda y: varied(y)[None] if check_vma else y[None], run(x))

    return shard(inside, check_vma, spec, P("i"))(X if spec else X[:2])


def varied(y: Any) -> Any:
    return y if jax.typeof(y).mat.varying else lax.pcast(y, "i", to="varying")


def jitted(place: Callable[..., Any], **options: Any) -> Callable[[Run], Any]:
    return lambda run: jax.jit(lambda: place(run, **options))()


def partly_manual(kind: AxisType) -> Callable[[Run], Any]:
    def run_in_shard_map(run: Run) -> Any:
        summed = lambda x: jax.tree.map(lambda y: lax.psum(varied(y), "i"), run(x))
        f = jax.shard_map(summed, in_specs=P("i"), out_specs=P(), axis_names={"i"})
        with jax.set_mesh(mesh(kind, i=4, j=2)):
            return jax.jit(f)(X)

    return run_in_shard_map


def sharded(kind: AxisType, is_set: bool) -> Callable[[Run], Any]:
    def run_on_mesh(run: Run) -> Any:
        x = jax.device_put(X, NamedSharding(mesh(kind), P("i")))
        if not is_set:
            return run(x)
        with jax.set_mesh(mesh(kind)):
            return run(x)

    return run_on_mesh


scaled = lambda x: x * (1.0 + lax.axis_index("i"))
# For each kind of type: a vector function, a scalar function, and how to run at a point.
PLACES: dict[str, tuple[Run, Run, Callable[[Run], Any]]] = {
    "manual": (vector, scalar, jitted(manual)),
    "manual, outside jit": (vector, scalar, manual),
    "manual, unchecked": (vector, scalar, jitted(manual, check_vma=False)),
    "output the same on all devices": (
        lambda x: vector(lax.psum(x, "i")),
        lambda x: lax.psum(scalar(x), "i"),
        jitted(manual),
    ),
    "input the same on all devices": (
        lambda x: vector(scaled(x)),
        lambda x: scalar(scaled(x)),
        jitted(manual, spec=P()),
    ),
    "partly manual": (vector, scalar, partly_manual(AxisType.Auto)),
    "partly manual, explicit": (vector, scalar, partly_manual(AxisType.Explicit)),
    "explicit": (vector, scalar, sharded(AxisType.Explicit, True)),
    "explicit, mesh not set": (vector, scalar, sharded(AxisType.Explicit, False)),
    "auto": (vector, scalar, sharded(AxisType.Auto, False)),
    "host": (
        lambda x: jax.device_put(vector(jax.device_put(x, DEVICE)), HOST),
        lambda x: scalar(jax.device_put(x, DEVICE)),
        lambda run: run(jax.device_put(jnp.asarray(X), HOST)),
    ),
    "committed": (vector, scalar, lambda run: run(jax.device_put(X, jax.devices()[3]))),
    "weak type": (vector, scalar, lambda run: run(1.5)),
    "bfloat16": (vector, scalar, lambda run: run(jnp.asarray(X, jnp.bfloat16))),
}
NOT_IN_JAX = {"host", "explicit, mesh not set"}  # JAX refuses a part of the transforms
REFUSED = [
    ("sparse jacobian", "output the same on all devices"),
    ("sparse hessian", "input the same on all devices"),
]
NOT_ON_A_MESH = {  # without `jax.set_mesh`, JAX asks for it
    ("sparse hessian", "explicit, mesh not set"),
    ("sparse hessian", "partly manual, explicit"),
    ("hessian", "explicit, mesh not set"),
    ("hessian_spectrum", "explicit, mesh not set"),
}
QUICK = {
    ("jacrev", "manual"), ("jacrev", "manual, outside jit"), ("jacrev", "manual, unchecked"),
    ("jacrev", "host"),
    ("jacrev", "explicit"), ("jacrev", "explicit, mesh not set"), ("jacrev", "partly manual"),
    ("jacrev", "output the same on all devices"), ("jacrev", "input the same on all devices"),
    ("jacobian by columns", "explicit"),
    ("sparse hessian", "manual"), ("sparse jacobian", "explicit"), ("laplacian", "manual"),
    ("hutchinson", "manual"), ("hessian_spectrum", "explicit"), ("partials", "manual"),
    ("jacrev of a tree", "committed"), ("hessian", "weak type"), ("linearize", "bfloat16"),
}  # fmt: skip


def cases() -> Iterator[Any]:
    for transform in TRANSFORMS:
        for place in PLACES:
            marks = [] if (transform, place) in QUICK else [pytest.mark.slow]
            if (transform, place) in {*REFUSED, *NOT_ON_A_MESH}:
                continue
            yield pytest.param(transform, place, marks=marks)


@pytest.mark.parametrize(("transform", "place"), [*cases()])
def test_results_are_those_of_jax(transform: str, place: str) -> None:
    f, s, run_there = PLACES[place]
    if transform in OF_BOTH:
        ours, theirs = (functools.partial(OF_BOTH[transform], t) for t in (xform, jax))
    else:
        ours, theirs = OF_XFORM[transform]
    if place in NOT_IN_JAX:
        got, wanted = run_there(lambda x: ours(f, s, x)), theirs(vector, scalar, X)
    else:
        got, wanted = run_there(lambda x: (ours(f, s, x), theirs(f, s, x)))
    if transform in OF_BOTH and place not in NOT_IN_JAX:
        assert types(got) == types(wanted)
    tolerance = 0.05 if place == "bfloat16" else 1e-8
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, tolerance, tolerance)


@pytest.mark.parametrize(("transform", "place"), REFUSED)
def test_methods_that_cannot_follow_values_to_other_devices(transform: str, place: str) -> None:
    f, s, run_there = PLACES[place]
    with pytest.raises(WrongArgument, match=r"depend on those of others|may be nonzero"):
        run_there(lambda x: OF_XFORM[transform][0](f, s, x))


def test_a_cotangent_must_not_vary_where_the_output_is_the_same() -> None:
    def pulled(x: Any) -> Any:
        return xform.vjp(lambda x: lax.psum(x, "i"), x)[1](x)[0]

    with pytest.raises(WrongCotangent, match=r"varies over \('i',\) within a shard_map"):
        manual(pulled)
