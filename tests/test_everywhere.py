"""`install` replaces JAX's transforms in every module, and `uninstall` restores them."""

import functools
import pickle
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import ad

import xform
from xform import everywhere
from xform.introspection.loaded import loaded_modules

X = jnp.arange(3.0) + 1


def f(x):
    return jnp.sum(jnp.sin(x) ** 2)


def times(x, n):
    return n * f(x)


def held() -> dict[str, dict[str, object]]:
    return {
        name: dict(object.__getattribute__(module, "__dict__"))
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType)
    }


def same(before: dict[str, dict[str, object]], after: dict[str, dict[str, object]]) -> None:
    assert before.keys() == after.keys()
    for name, names in before.items():
        assert list(names) == list(after[name]), name
        for key, value in names.items():
            # Hypothesis stores when it last ran.
            moves = isinstance(value, float)
            assert moves or after[name][key] is value, f"{name}.{key}"


@contextmanager
def without_jax_ad() -> Iterator[None]:
    """Raise an error if JAX's own automatic differentiation is entered."""

    def refuse(*_: object) -> None:
        raise AssertionError("JAX's own AD was entered")

    with pytest.MonkeyPatch.context() as patch:
        for kind in (ad.JVPTrace, ad.LinearizeTrace):
            patch.setattr(kind, "__init__", refuse)
        yield


@pytest.fixture
def other() -> Iterator[types.ModuleType]:
    """A module that has imported JAX's transforms under other names."""
    module = types.ModuleType("someone")
    exec("from jax import grad as g, remat\nfrom jax._src.api import vjp", vars(module))
    sys.modules["someone"] = module
    yield module
    del sys.modules["someone"]


def test_uninstall_restores_the_transforms_in_every_module(other: types.ModuleType) -> None:
    before = held()
    xform.install()
    assert jax.grad is not before["jax"]["grad"]
    assert other.g is jax.grad
    assert other.vjp is jax.vjp
    assert other.remat is jax.remat
    assert sys.modules["jax._src.api"].grad is before["jax"]["grad"]
    xform.install(policy=xform.policies.save_dots)
    assert other.g is jax.grad
    xform.uninstall()
    same(before, held())
    xform.uninstall()
    same(before, held())
    with xform.install(), xform.install(policy=xform.policies.save_nothing):
        pass
    same(before, held())


def test_a_module_that_is_imported_later(other: types.ModuleType) -> None:
    before = held()
    with xform.install():
        exec("from jax import hessian", vars(other))
        assert other.hessian is jax.hessian
    assert other.hessian is jax.hessian
    del other.hessian
    same(before, held())


def test_an_error_restores() -> None:
    before = held()
    with pytest.raises(KeyError), xform.install():
        raise KeyError
    same(before, held())
    with pytest.raises(xform.errors.WrongArgument), xform.install(policy="full"):
        pass
    same(before, held())


def test_nested_install_block_restores_the_outer_install() -> None:
    xform.install()
    try:
        outer = jax.grad
        with xform.install(policy=xform.policies.save_dots):
            assert jax.grad is not outer
        assert jax.grad is outer
    finally:
        xform.uninstall()


CALLS = {
    "grad": lambda: jax.grad(f)(X),
    "value_and_grad": lambda: jax.value_and_grad(fun=f, reduce_axes=())(X),
    "vjp": lambda: jax.vjp(f, X, reduce_axes=())[1](2.0),
    "jvp": lambda: jax.jvp(f, primals=(X,), tangents=(X,)),
    "linearize": lambda: jax.linearize(f, X)[1](X),
    "linear_transpose": lambda: jax.linear_transpose(lambda x: 2 * x, X)(X),
    "jacfwd": lambda: jax.jacfwd(jnp.sin)(X),
    "jacrev": lambda: jax.jacrev(jnp.sin)(X),
    "jacobian": lambda: jax.jacobian(jnp.sin)(X),
    "hessian": lambda: jax.hessian(f)(X),
    "checkpoint": lambda: jax.grad(jax.checkpoint(f, prevent_cse=False))(X),
    "remat": lambda: jax.grad(functools.partial(jax.remat, static_argnums=(1,))(times))(X, 2),
    "jit": lambda: jax.jit(jax.grad(f))(X),
    "fwd_and_bwd": lambda: (lambda p: p[1](p[0](X)[1], 1.0))(jax.fwd_and_bwd(f, 0)),
}  # fmt: skip


def test_all_of_jaxs_transforms_are_called() -> None:
    assert CALLS.keys() == everywhere.THEIRS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_derivatives_are_xforms_and_equal_jaxs(name: str) -> None:
    theirs = CALLS[name]()
    with xform.install(), without_jax_ad():
        ours = CALLS[name]()
        assert pickle.loads(pickle.dumps(getattr(jax, name))) is getattr(jax, name)
        assert getattr(jax, name).__name__ == name
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, theirs)


def test_installed_policy_applies_only_to_calls_without_their_own() -> None:
    seen = []

    def mine(prim, *_, **params):
        seen.append(prim.name)
        return False

    with xform.install(policy=mine):
        jax.jit(jax.grad(f)).lower(X)
        assert "sin" in seen
        seen.clear()
        jax.jit(jax.grad(f, policy=xform.policies.save_everything)).lower(X)
        jax.jit(jax.jacfwd(f)).lower(X)
        assert not seen


def test_gradient_with_references_and_checkpoint_is_same_when_installed() -> None:
    def with_reference(x):
        ref = jax.new_ref(x)

        @jax.checkpoint
        def region(y):
            ref[...] = ref[...] * y
            return jnp.sin(y)

        return jnp.sum(region(x) + ref[...])

    before = xform.grad(with_reference)(X)
    with xform.install():
        np.testing.assert_allclose(jax.grad(with_reference)(X), before, rtol=1e-6)


@pytest.mark.parametrize("graph", [True, False])
def test_flax_nnx_is_differentiated_by_xform(graph: bool) -> None:
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    x = jnp.ones((4, 2))

    class Block(nnx.Module):
        def __init__(self):
            self.inner = model

        @nnx.remat
        def __call__(self, x):
            return jnp.sin(self.inner(x))

    def run():
        loss = lambda m, x: (m(x) ** 2).sum()
        return jax.tree.leaves((
            nnx.grad(loss, graph=graph)(model, x),
            nnx.jit(nnx.value_and_grad(loss, graph=graph), graph=graph)(Block(), x),
            nnx.vjp(lambda m, x: m(x), model, x, graph=False)[1](jnp.ones((4, 3))),
            nnx.jvp(lambda m, x: m(x), (model, x), (model, x), graph=False),
        ))  # fmt: skip

    theirs = run()
    with xform.install(), without_jax_ad():
        ours = run()
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_flax_linen_is_differentiated_by_xform() -> None:
    nn = pytest.importorskip("flax.linen")
    x = jnp.ones((4, 2))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            y, pull = nn.vjp(lambda m, x: m(x), nn.remat(nn.Dense)(3), x)
            return pull(y)[1]

    net = Net()
    params = net.init(jax.random.key(0), x)
    grads = lambda: jax.grad(lambda p: net.apply(p, x).sum())(params)
    theirs = grads()
    with xform.install(), without_jax_ad():
        ours = grads()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, theirs)


def test_is_installed_tracks_nested_installs_and_uninstall() -> None:
    assert xform.is_installed() is False
    with xform.install():
        assert xform.is_installed() is True
        with xform.install(policy=xform.policies.save_dots):
            assert xform.is_installed()
        assert xform.is_installed()
        xform.uninstall()
        assert not xform.is_installed()
    assert not xform.is_installed()


def test_an_install_that_fails_exchanges_nothing(other: types.ModuleType) -> None:
    class Key(str):
        """A name that can be read, but not set again."""

        def __hash__(self) -> int:
            if armed:
                raise KeyboardInterrupt
            return super().__hash__()

    armed = False
    vars(other)[Key("late")] = jax.grad
    before = {name: dict(names) for name, names in loaded_modules()}
    armed = True
    with pytest.raises(KeyboardInterrupt):
        xform.install()
    assert not xform.is_installed()
    armed = False
    after = {name: dict(names) for name, names in loaded_modules()}
    changed = [(name, key) for name, names in before.items() for key, value in names.items()
               if after[name][key] is not value and not isinstance(value, float)]  # fmt: skip
    assert not changed
    xform.install()
    assert other.late is jax.grad
    xform.uninstall()
