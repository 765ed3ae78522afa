"""Every parameter names its axes, and rules say how they are sharded."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import xform
from models.nets.axes import RULES, constrained, shardings, spec
from models.nets.presets import PRESETS, abstract, build, parameter_count
from tests.models.micro import MODEL

MESH = AbstractMesh(
    (2, 4, 8, 2), ("data", "fsdp", "tensor", "expert"), axis_types=(AxisType.Auto,) * 4
)
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "tinyllama-1.1b": 1_100_048_384,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "qwen3-8b": 8_190_735_360,
    "mixtral-8x7b": 46_702_792_704,
    "resnet20": 269_722,
    "resnet50": 25_557_032,
    "vit-s": 22_050_664,
}


@pytest.mark.parametrize("name", PRESETS)
def test_every_parameter_has_its_axes_and_presets_their_published_sizes(name: str) -> None:
    model = abstract(PRESETS[name])
    if name in PUBLISHED:
        assert parameter_count(model) == PUBLISHED[name]
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        names = variable.get_metadata().get("out_sharding")
        assert names, path
        assert len(names) == variable.get_value().ndim, path
        assert RULES.keys() >= set(names), path


def test_rules_place_axes_where_there_is_room() -> None:
    assert spec(("vocab", "embed"), (1024, 64), MESH) == PartitionSpec("tensor", "fsdp")
    assert spec(("vocab", "embed"), (50_257, 64), MESH) == PartitionSpec(None, "fsdp")
    assert spec(("mlp", "vocab"), (64, 64), MESH) == PartitionSpec("tensor", None)  # taken
    data = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    assert spec(("embed", "mlp"), (64, 64), data) == PartitionSpec(None, None)
    assert spec(("embed",), (64,), data, {"embed": "data"}) == PartitionSpec("data")
    both = AbstractMesh((2, 4), ("fsdp", "context"), axis_types=(AxisType.Auto,) * 2)
    assert spec(("embed",), (64,), both) == PartitionSpec(("fsdp", "context"))
    assert spec(("embed", "channels_in"), (6, 64), both) == PartitionSpec("fsdp", "context")


def test_a_models_shardings_have_its_structure() -> None:
    state = nnx.state(abstract(PRESETS["mixtral-8x7b"]))
    placed = shardings(state, MESH)
    assert jax.tree.structure(jax.tree.map(lambda _: 0, state)) == jax.tree.structure(
        jax.tree.map(lambda _: 0, placed)
    )
    layer = placed["layers"]["each"]
    assert layer["mixture"]["up"].get_value().spec == PartitionSpec(
        None, "expert", "fsdp", "tensor"
    )
    assert layer["attention"]["out"]["kernel"].get_value().spec == PartitionSpec(
        None, "tensor", None, "fsdp"
    )


def test_activations_are_sharded_by_the_rules_only_under_a_mesh() -> None:
    x = jnp.ones((4, 3, 8))
    assert constrained(x, "batch", None, "heads") is x
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        parted = jax.jit(lambda x: constrained(x, "batch", None, "heads"))(x)
        assert parted.sharding.shard_shape(x.shape) == (1, 3, 4)
        odd = jax.jit(lambda x: constrained(x, "heads", "batch", None))(x)
        assert odd.sharding.shard_shape(x.shape) == (2, 3, 8)


def _step() -> tuple[Any, nnx.State, np.ndarray, Any]:
    """Return a small GPT-2's loss, parameters and tokens, and JAX's results on one device."""
    graphdef, params = nnx.split(build(MODEL))
    loss = lambda params, tokens: nnx.merge(graphdef, params).loss(tokens)
    tokens = np.arange(4 * 9, dtype=np.int32).reshape(4, 9) % 50
    return loss, params, tokens, jax.jit(jax.value_and_grad(loss))(params, tokens)


def _close(got: Any, wanted: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), got, wanted)


def test_a_model_within_shard_map_is_that_of_one_device() -> None:
    loss, params, tokens, one = _step()

    def step(params: nnx.State, tokens: jax.Array) -> Any:
        mean = lambda params: jax.lax.pmean(loss(params, tokens), "data")
        return xform.value_and_grad(mean)(params)

    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))):
        each = jax.shard_map(
            step, in_specs=(PartitionSpec(), PartitionSpec("data")), out_specs=PartitionSpec()
        )
        got = jax.jit(each)(params, tokens)
    _close(got, one)


def test_models_are_called_with_auto_axes_on_an_explicit_mesh() -> None:
    loss, params, tokens, one = _step()
    names = ("data", "fsdp", "tensor")
    mesh = jax.make_mesh((2, 2, 2), names, axis_types=(AxisType.Explicit,) * 3)
    with jax.set_mesh(mesh):
        params = jax.device_put(params, shardings(params, mesh))
        tokens = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
        with pytest.raises(ValueError, match=r"call them within jax\.sharding\.auto_axes"):
            xform.grad(loss)(params, tokens)
        placed = jax.sharding.auto_axes(loss, out_sharding=PartitionSpec())
        got = jax.jit(xform.value_and_grad(placed))(params, tokens)
    _close(got, one)
    places = [[x.sharding for x in jax.tree.leaves(tree)] for tree in (got[1], params)]
    assert places[0] == places[1]
