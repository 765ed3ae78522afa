"""Functions lowered for absent devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from xform import errors
from xform.memory.lowering import jitted_with_arguments, lower
from xform.memory.sharding import on_mesh
from xform.memory.targets import parse_target

CPU, FOUR = parse_target("cpu:1"), parse_target("cpu:4")
MESH = {"data": 2, "model": 2}
W, X = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.float32)


def product(p, x):
    return x @ p["w"]


def jitted(f, donate_argnums=()):
    return jitted_with_arguments(f, (), {}, donate_argnums)[0]


def at(mesh, *spec):
    return NamedSharding(mesh, P(*spec))


def specs(given) -> list:
    return [x.sharding.spec for x in jax.tree.leaves((given.args, given.kwargs))]


def test_arguments_without_shardings_are_types() -> None:
    given = on_mesh(({"w": np.ones((8, 16)), "n": 3}, jnp.ones((4, 8))), {}, CPU, None, None)
    assert given.mesh is None
    assert given.axes == []
    assert isinstance(given.args[0]["w"], np.ndarray)
    assert given.args[0]["n"] == 3
    assert given.args[1] == jax.ShapeDtypeStruct((4, 8), jnp.float32)


def test_specs_are_a_prefix_of_the_arguments() -> None:
    args = ({"w": W, "v": W}, X)
    for in_specs, found in (
        (None, [P(), P(), P()]),
        (P("data"), [P("data")] * 3),
        ((P("data"), P(None, "model")), [P("data"), P("data"), P(None, "model")]),
        (({"w": P("model"), "v": P()}, P()), [P(), P("model"), P()]),
        ((None, P("data")), [P(), P(), P("data")]),
        (({"w": P("model"), "v": None}, None), [P(), P("model"), P()]),
    ):
        given = on_mesh(args, {"k": X}, FOUR, MESH, in_specs)
        assert specs(given) == [*found, P()]
        assert given.axes == [(2, "data", "Auto"), (2, "model", "Auto")]


def test_shardings_of_the_arguments_are_kept() -> None:
    mesh = AbstractMesh((4,), ("i",), axis_types=(AxisType.Explicit,))
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=at(mesh, "i"))
    given = on_mesh(({"w": W}, x), {}, FOUR, None, None)
    assert specs(given) == [P(), P("i")]
    assert given.axes == [(4, "i", "Explicit")]
    copy = NamedSharding(mesh, P(reduced={"i"}))
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=copy)
    assert specs(on_mesh((x,), {}, FOUR, None, None)) == [copy.spec]
    alone = on_mesh((X,), {}, FOUR, None, None)
    assert alone.on(()) is alone


def test_shardings_of_the_arguments_are_kept_on_a_mesh_that_is_given() -> None:
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=at(AbstractMesh((4,), ("i",)), "i"))
    for in_specs, found in ((None, P("i")), (P(None, "i"), P(None, "i")), ((None,), P())):
        given = on_mesh((x,), {"k": x}, FOUR, {"i": 4}, in_specs)
        assert specs(given) == [found, P("i")]
        assert specs(on_mesh((x,), {}, FOUR, None, in_specs)) == [found]


def test_of_a_mesh_of_other_devices_the_axes_count() -> None:
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    given = on_mesh((jax.device_put(jnp.ones((4, 8)), at(mesh, "b")),), {}, FOUR, None, None)
    assert given.mesh == mesh.abstract_mesh
    (real,) = given.on(jax.devices()[4:]).args
    assert real.sharding.mesh.devices.tolist() == np.array(jax.devices()[4:]).reshape(2, 2).tolist()
    assert real.sharding.spec == P("b")


def test_inconsistent_meshes_specs_and_donate_argnums_raise() -> None:
    one, two = AbstractMesh((4,), ("i",)), AbstractMesh((4,), ("j",))
    x, y = (jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=at(m)) for m in (one, two))
    for call, text in (
        (
            lambda: on_mesh((X,), {}, CPU, MESH, None),
            "target='cpu:1' with a mesh of {data: 2, model: 2}\n"
            "  problem: the mesh has 4 devices and the target has 1\n"
            "  remedy:  give axes whose sizes multiply to the number of the target's devices, or a "
            "target of that size",
        ),
        (
            lambda: on_mesh((x, y), {}, FOUR, None, None),
            "compile for a target\n"
            "  problem: the arguments are on different meshes: "
            f"{', '.join(sorted((str(one), str(two))))}\n"
            "  remedy:  put all of them on one mesh, or give mesh= and in_specs=",
        ),
        (
            lambda: on_mesh((X, X), {}, FOUR, MESH, None).on(()),
            "a mesh of 4 devices\n"
            "  problem: this process has 0 devices\n"
            "  remedy:  give a target with that many devices, such as target='cpu:4'",
        ),
        (
            lambda: on_mesh((X,), {}, FOUR, None, P("data")),
            f"in_specs={P('data')!r}\n"
            "  problem: there is no mesh\n"
            "  remedy:  give mesh={axis: size} too, or arguments with a NamedSharding",
        ),
        (
            lambda: on_mesh((X,), {}, FOUR, MESH, "data"),
            "in_specs with 'data'\n"
            "  problem: it is not a PartitionSpec\n"
            "  remedy:  give a jax.sharding.PartitionSpec for each argument, such as "
            "PartitionSpec('data'), or None for an argument that is replicated",
        ),
        (
            lambda: jitted(product, 5),
            "donate_argnums=5\n"
            "  problem: Jitted function has donate_argnums=(5,), but only accepts 2 positional "
            "arguments.\n"
            "  remedy:  give positions of arguments of the function",
        ),
        (
            lambda: jitted(jax.jit(product), 0),
            "donate_argnums=0\n"
            "  problem: the function is jitted already, with its own options\n"
            "  remedy:  pass donate_argnums to jax.jit or xform.jit, or pass the function without "
            "it",
        ),
    ):
        with pytest.raises(errors.WrongArgument) as caught:
            call()
        assert str(caught.value) == text


@pytest.mark.parametrize("mesh", [{}, {"d": 0}, {"d": -4}, {"d": 2.0}, {"d": True}, (4,), "d"])
def test_a_mesh_that_is_none_is_refused(mesh) -> None:
    with pytest.raises(errors.WrongArgument, match="does not map names of axes to positive"):
        on_mesh((X,), {}, FOUR, mesh, None)


@pytest.mark.parametrize(
    ("spec", "shape", "problem"),
    [
        (P("nope"), (4, 8), "the mesh has no axis 'nope'"),
        (P("data", "data"), (4, 8), "an axis of the mesh is named twice"),
        (P(None, None, "data"), (4, 8), "the spec has 3 axes and the argument has 2"),
        (P("data"), (), "the spec has 1 axes and the argument has 0"),
        (P("data"), (5, 8), "5 elements cannot be split evenly over 2 devices, by data"),
        (P(None, ("data", "model")), (4, 6),
         "6 elements cannot be split evenly over 4 devices, by data, model"),
    ],
)  # fmt: skip
def test_a_spec_that_does_not_fit_is_refused(spec, shape, problem) -> None:
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    with pytest.raises(errors.WrongArgument) as caught:
        on_mesh((X, {"w": x}), {}, FOUR, MESH, (P(), spec))
    assert str(caught.value) == (
        f"{spec!r} for args[1]['w'] of shape {shape} on a mesh of {{data: 2, model: 2}}\n"
        f"  problem: {problem}\n"
        "  remedy:  give in_specs that name each axis of the mesh at most once, with sizes that "
        "divide the shape"
    )


def test_specs_that_are_no_prefix_are_refused() -> None:
    with pytest.raises(errors.WrongArgument) as caught:
        on_mesh((X, X), {}, FOUR, MESH, (P(), P(), P()))
    lines = str(caught.value).splitlines()
    assert lines[0] == f"in_specs={(P(), P(), P())!r}"
    assert lines[1].startswith("  problem: it is not a prefix of the tree of the arguments: ")
    assert lines[2] == (
        "  remedy:  give one PartitionSpec for all arguments, or a tuple with an entry for each "
        "argument: a PartitionSpec or a tree of them"
    )


class TestLower:
    @pytest.fixture(autouse=True)
    def _serializes(self) -> None:
        pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")

    def test_lowered_function_has_names_and_donation_of_its_read_arguments(self) -> None:
        f = jitted(lambda p, x, k: (p["w"] * 2, p["b"] + k), donate_argnums=0)
        args = {"w": W, "b": X, "unread": W}, X
        lowered, jaxpr = lower(f, on_mesh(args, {"k": 1.0}, CPU, None, None), CPU)
        assert lowered.name == "<lambda>"
        assert lowered.devices == 1
        assert lowered.arguments == ("p['b']", "p['w']", "k")
        assert lowered.donated == [0, 1, 2]
        assert len(jaxpr.jaxpr.invars) == 5

    def test_lowering_is_deterministic(self) -> None:
        given = on_mesh(({"w": W}, X), {}, FOUR, MESH, P("data"))
        made = [lower(jitted(product), given, parse_target("tpu:v5e:2x2"))[0] for _ in range(2)]
        assert made[0] == made[1]
        assert made[0].devices == 4

    def test_the_mesh_is_current(self) -> None:
        f = lambda x: jax.lax.with_sharding_constraint(jnp.sin(x), P("data"))
        assert lower(jitted(f), on_mesh((X,), {}, FOUR, MESH, None), FOUR)[0].devices == 4

    def test_a_function_with_a_callback_is_refused(self) -> None:
        def shows(x):
            jax.debug.print("{}", x)
            return x

        with pytest.raises(errors.XformError) as caught:
            lower(jitted(shows), on_mesh((X,), {}, CPU, None, None), CPU)
        assert str(caught.value) == (
            "shows for target='cpu:1'\n"
            "  problem: it cannot be lowered without the device: serialization of host_callbacks "
            "is not yet implemented\n"
            f"  where:   {caught.value.where}\n"
            "  remedy:  remove callbacks, prints and foreign calls, or compile on a machine with "
            "the device, with target=None"
        )

    @pytest.mark.parametrize("name", ["cpu:1", "tpu:v5e:1x1", "gpu:h100"])
    @pytest.mark.parametrize("calls", [
        lambda x: jax.debug.print("{}", x),
        lambda x: jax.debug.callback(print, x),
        lambda x: jax.pure_callback(np.sin, x, x),
        lambda x: jax.experimental.io_callback(np.sin, x, x),
    ])  # fmt: skip
    def test_callbacks_are_refused_for_all_targets_by_their_line(self, name: str, calls) -> None:
        def looped(x):
            def step(c, _):
                made = calls(c)
                return jnp.sin(c if made is None else made), None

            return jax.lax.scan(step, x, None, length=2)[0]

        target = parse_target(name)
        with pytest.raises(errors.XformError, match="without the device") as caught:
            lower(jitted(looped), on_mesh((X,), {}, target, None, None), target)
        assert "test_lowering.py" in caught.value.where
        assert caught.value.__suppress_context__  # one error, not two

    def test_a_function_with_a_foreign_call_is_refused(self) -> None:
        foreign = lambda x: jax.ffi.ffi_call("their_sum", x)(x)
        with pytest.raises(errors.XformError) as caught:
            lower(jitted(foreign), on_mesh((X,), {}, CPU, None, None), CPU)
        assert "it cannot be lowered without the device: Cannot serialize" in str(caught.value)
        assert "(their_sum)" in str(caught.value)

    def test_another_error_of_the_export_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(*args, **kwargs):
            raise ValueError("another")

        monkeypatch.setattr(jax.export, "export", fails)
        with pytest.raises(ValueError, match="another"):
            lower(jitted(lambda x: x), on_mesh((X,), {}, CPU, None, None), CPU)

    def test_devices_without_a_mesh_are_refused(self) -> None:
        if jax.device_count() < 4:
            pytest.skip("needs four devices")
        mesh = jax.sharding.Mesh(jax.devices()[:4], ("i",))
        f = jax.jit(lambda x: x + 1, in_shardings=at(mesh, "i"))
        with pytest.raises(errors.WrongArgument) as caught:
            lower(f, on_mesh((X,), {}, FOUR, None, None), FOUR)
        assert str(caught.value) == (
            "<lambda> for target='cpu:4'\n"
            "  problem: it runs on 4 devices, and its arguments have no mesh\n"
            "  remedy:  give mesh={axis: size}, or arguments with a NamedSharding"
        )
