"""Derivatives of collectives in one `shard_map`, and over a named axis of `vmap`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import xform
from tests.parameters import slow
from tests.sharding import BATCH, agree, checked, inputs, mesh, placed, same, shard, total
from xform.registry.table import rules_by_name

pytestmark = pytest.mark.usefixtures("x64")

RING = [(j, (j + 1) % 8) for j in range(8)]


def column(x: Any, w: Any) -> Any:
    return jnp.outer(jnp.arange(8.0) + 1, (x @ w)[0])


COLLECTIVES: dict[str, Callable[[Any, Any], Any]] = {
    "psum": lambda x, w: total(jnp.sin(lax.psum(x @ w, "i") * x)),
    "pmean": lambda x, w: lax.pmean(jnp.sum(jnp.sin(x @ w)), "i"),
    "all_gather": lambda x, w: total(jnp.sin(lax.all_gather(x @ w, "i")) * lax.axis_index("i")),
    "all_gather_tiled": lambda x, w: total(
        jnp.sin(lax.all_gather(x @ w, "i", tiled=True)) * lax.axis_index("i")
    ),
    "psum_scatter": lambda x, w: total(jnp.sin(lax.psum_scatter(column(x, w), "i")) * x),
    "psum_scatter_tiled": lambda x, w: total(
        jnp.sin(lax.psum_scatter(column(x, w), "i", tiled=True)) * x
    ),
    "all_to_all_tiled": lambda x, w: total(
        jnp.sin(lax.all_to_all(column(x, w), "i", 0, 1, tiled=True) * x[0, 0])
    ),
    "ppermute": lambda x, w: total(jnp.sin(lax.ppermute(x @ w, "i", RING) * x)),
    "ppermute_part": lambda x, w: total(jnp.sin(lax.ppermute(x @ w, "i", RING[:5]) * x)),
}


@checked
@pytest.mark.parametrize("name", slow(COLLECTIVES, *list(COLLECTIVES)[1::2]))
def test_collective(name: str, check_vma: bool) -> None:
    body = COLLECTIVES[name]

    def results(grad: Any, jvp: Any) -> Any:
        f = shard(body, check_vma)
        return lambda x, w: (
            grad(f, (0, 1))(x, w),
            shard(grad(body, (0, 1)), check_vma, BATCH, BATCH)(x, w),
            jvp(f, (x, w), (x * x, w)),
        )

    mine, jaxs = results(xform.grad, xform.jvp), results(jax.grad, jax.jvp)
    push = lambda x, w: xform.linearize(shard(body, check_vma), x, w)[1](x * x, w)
    got, wanted, pushed = jax.jit(lambda *a: (mine(*a), jaxs(*a), push(*a)))(*inputs())
    same((*got, pushed), (*wanted, wanted[2][1]))


@checked
def test_untiled_all_to_all(check_vma: bool) -> None:
    """JAX's own transpose of it has the wrong shape (0.10.2)."""

    def untiled(x: Any, w: Any) -> Any:
        return total(jnp.sin(lax.all_to_all(column(x, w), "i", 0, 1) * x[0][:, None]))

    def tiled(x: Any, w: Any) -> Any:
        y = lax.all_to_all(column(x, w)[:, :, None], "i", 0, 2, tiled=True)[0]
        return total(jnp.sin(y * x[0][:, None]))

    grads = [xform.grad(shard(f, check_vma), (0, 1)) for f in (untiled, tiled)]
    same(*jax.jit(lambda *a: tuple(g(*a) for g in grads))(*inputs()))


@checked
@pytest.mark.parametrize("collective", [lax.pmax, lax.pmin])
def test_extremes(collective: Any, check_vma: bool) -> None:
    """JAX does not differentiate them: the reference is `jnp.max` of the whole array."""
    whole, tie = (jnp.max, 0) if collective is lax.pmax else (jnp.min, 1)

    def wave(x: Any, w: Any) -> Any:
        return jnp.sin(x @ w).at[:, 0].set(2.0 - 4 * tie + 0 * x[:, 0]) * w[0, 0]

    f = shard(lambda x, w: jnp.sum(collective(wave(x, w), "i")), check_vma)
    wanted = jax.grad(lambda x, w: jnp.sum(whole(wave(x, w), 0)), (0, 1))
    same(*jax.jit(lambda *a: (xform.grad(f, (0, 1))(*a), wanted(*a)))(*inputs()))


def test_gather_to_invarying() -> None:
    for tiled in (True, False):
        agree(
            shard(
                lambda x, w, tiled=tiled: jnp.sum(
                    lax.all_gather(jnp.sin(x @ w), "i", tiled=tiled, to="invarying") ** 2
                )
            ),
            *inputs(),
        )


def test_pbroadcast() -> None:
    """XLA:CPU has no such collective. The formula is compared with that of a gather."""

    def chosen(x: Any) -> Any:
        return lax.all_gather(x, "i")[3]

    def both(x: Any) -> Any:
        ct = jnp.cos(x)
        want = xform.vjp(chosen, x)[1](ct)[0]
        mine = rules_by_name()["pbroadcast"].formulas[0](ct, x, axis_name="i", source=3)
        other = rules_by_name()["pbroadcast_dynamic"].formulas[0](ct, x, np.int32(3), axis_name="i")
        return jnp.concatenate([mine, other]), jnp.concatenate([want, want])

    same(*jax.jit(shard(both, True, P("i"), (P("i"), P("i"))))(inputs()[0]))


@pytest.mark.parametrize("name", [n for n in COLLECTIVES if n != "ppermute_part"])
def test_named_vmap(name: str) -> None:
    """Collectives over an axis of `vmap` rather than of a mesh."""
    body = lambda x: COLLECTIVES[name](x[None], jnp.eye(4) + 0.1)
    x = inputs()[0]
    f = lambda x: jnp.sum(jax.vmap(body, axis_name="i")(x))

    def both(grad: Any) -> Any:
        return grad(f)(x), jax.vmap(grad(body), axis_name="i")(x)

    same(*jax.jit(lambda: (both(xform.grad), both(jax.grad)))())


def test_partial_sums() -> None:
    """`reduced` and `unreduced` values, and the collectives between them."""
    bodies: list[Callable[[Any, Any], Any]] = [
        lambda x, w: total(jnp.sin(x @ lax.pcast(w, "i", to="reduced"))),
        lambda x, w: total(jnp.sin(x @ jnp.sin(lax.pcast(jnp.sin(w), "i", to="reduced")))),
        lambda x, w: total(jnp.sin(x @ lax.all_gather(x @ w, "i", tiled=True, to="reduced")[:4])),
        lambda x, w: jnp.sin(lax.psum(lax.pcast(jnp.sum(x @ w), "i", to="unreduced"), "i")),
        lambda x, w: total(
            jnp.sin(lax.psum_scatter(lax.pcast(column(x, w), "i", to="unreduced"), "i", tiled=True))
        ),
    ]
    with jax.set_mesh(mesh(AxisType.Explicit)):
        for body in bodies:
            f = jax.shard_map(body, in_specs=(P("i"), P()), out_specs=P())
            agree(f, *placed(AxisType.Explicit))


# CPUs have no ragged collective. It is written out here, for lanes of a vmap.


def ragged(x, into, starts, sizes, places, received, *, axis_name, axis_index_groups=None):
    me = lax.axis_index(axis_name)
    for sent, first, size, place in zip(
        *(lax.all_gather(a, axis_name) for a in (x, starts, sizes, places)), strict=True
    ):
        row = jnp.arange(x.shape[0]) - first[me]
        goes = (row >= 0) & (row < size[me])
        into = into.at[jnp.where(goes, place[me] + row, into.shape[0])].set(sent, mode="drop")
    return into


def test_ragged_all_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged)
    x, into, ct = np.random.default_rng(0).normal(size=(3, 2, 5, 2))
    how = np.array([
        [[0, 1], [2, 0]], [[1, 2], [3, 1]], [[1, 0], [2, 3]], [[1, 3], [2, 1]]
    ], np.int32)  # fmt: skip
    (transpose,) = rules_by_name()["ragged_all_to_all"].formulas
    names = {"axis_name": "i", "axis_index_groups": None}
    lanes = lambda f: jax.vmap(f, axis_name="i")
    y = lanes(lambda *args: ragged(*args, **names))(x, into, *how)
    back = lanes(lambda *args: transpose(*args, **names)[:2])(ct, x, into, *how)
    assert np.count_nonzero(np.asarray(y) != into) == 2 * how[1].sum()
    np.testing.assert_allclose(np.vdot(ct, y), np.vdot(back[0], x) + np.vdot(back[1], into), 1e-6)
