"""Statistics of batch norms: as in a plain loop, on any mesh, in checkpoints, in skipped steps."""

import contextlib
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from models.errors import InputError
from models.nets.presets import build
from models.run.trained import load_run
from models.train.log import read_records
from models.train.mesh import make_mesh, on_devices
from models.train.optim import optimizer
from models.train.start import Resume
from models.train.state import TrainState, abstract_state, init_state
from models.train.step import compile_step, make_evaluate, make_step
from models.train.store import Store
from tests.models.examples import CLASSES, MODELS, OPTIM, RESNET, batches, quiet, run


def plain_step(model: Any, batch: Any) -> tuple[Any, Any, list[Any]]:
    """Run a step as the guides of Flax and Optax write it, for slices one after another.

    Returns the parameters after it, the statistics, and the losses of the slices.
    """
    transform = optimizer(OPTIM)
    graphdef, params, statistics = nnx.split(model, nnx.Param, nnx.BatchStat)

    def loss(params: Any, statistics: Any, image: Any, label: Any) -> Any:
        merged = nnx.merge(graphdef, params, statistics, copy=True)
        scores = jax.nn.log_softmax(merged(image / np.float32(127.5) - 1))
        chosen = jax.nn.one_hot(label, CLASSES)
        return -jnp.sum(scores * chosen) / label.size, nnx.state(merged, nnx.BatchStat)

    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    losses, sums = [], jax.tree.map(jnp.zeros_like, params)
    for image, label in zip(batch["image"], batch["label"], strict=True):
        (value, statistics), grads = gradient(params, statistics, image.astype("float32"), label)
        losses.append(value)
        sums = jax.tree.map(jnp.add, sums, grads)
    mean = jax.tree.map(lambda x: x / len(losses), sums)
    updates, _ = transform.update(mean, transform.init(params), params)
    return optax.apply_updates(params, updates), statistics, losses


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_is_that_of_a_plain_trainer(tmp_path: Path, accumulate: int) -> None:
    config = run(tmp_path, accumulate=accumulate)
    (batch,) = batches(config, 1)
    params, statistics, losses = plain_step(build(RESNET, 0), batch)
    after, metrics = jax.jit(make_step(RESNET, OPTIM))(init_state(RESNET, OPTIM, 0), batch)
    np.testing.assert_allclose(metrics["loss"], np.mean(losses), rtol=1e-6)
    chex.assert_trees_all_close(after.statistics, statistics, rtol=1e-5, atol=1e-6)
    # Adam divides by the gradient's size, so the smallest gradients decide the tolerance.
    chex.assert_trees_all_close(after.params, params, rtol=1e-3, atol=2e-5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainState]:
    """Return the folder of an undisturbed run, and its last state."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, quiet(run(folder, accumulate=2, **MORE)).state


MORE: dict[str, Any] = {"augment": True, "optim": dataclasses.replace(OPTIM, ema_decay=0.5)}


def test_resuming_repeats_every_bit(whole: tuple[Path, TrainState], tmp_path: Path) -> None:
    folder, state = whole
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    # Like after a kill in the second epoch: a step takes 16 of 32 images.
    for step in ("4", "6"):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / step)
    again = quiet(run(tmp_path, accumulate=2, **MORE), Resume()).state
    chex.assert_trees_all_equal(again, state)
    numbers = lambda out: [
        {k: v for k, v in r.items() if "second" not in k} for r in read_records(out / "log.jsonl")
    ]
    assert numbers(tmp_path / "run") == numbers(folder / "run")


def test_a_model_is_judged_and_comes_out_with_its_statistics(
    whole: tuple[Path, TrainState],
) -> None:
    folder, state = whole
    config, model = load_run(folder / "run")
    chex.assert_trees_all_equal(nnx.state(model), state.average)
    first = init_state(RESNET, config.optim, 0)
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), first.statistics, state.statistics)
    assert all(jax.tree.leaves(moved))
    (batch,) = config.validation(config.load())
    found = make_evaluate(RESNET)(state.result, batch)
    model.eval()
    scores = jax.nn.log_softmax(model(batch["image"] / np.float32(127.5) - 1))
    losses = -np.take_along_axis(np.asarray(scores), batch["label"][:, None], 1)
    np.testing.assert_allclose(found["loss"], losses.mean(), rtol=1e-5)
    right = (np.argmax(scores, 1) == batch["label"]).mean()
    assert float(found["accuracy"]) == pytest.approx(right)
    last = read_records(folder / "run" / "log.jsonl")[-1]
    assert last["validation_loss"] == pytest.approx(float(found["loss"]))
    assert last["validation_accuracy"] == pytest.approx(right)


def stepped(config: Any, text: str) -> tuple[list[float], Any]:
    """Return losses of three steps on a mesh, and the state after them."""
    mesh = make_mesh(text)
    inputs = [on_devices(batch, mesh, axis=1) for batch in batches(config, 3)]
    types = config.batch_type() if mesh is None else inputs[0]
    step = compile_step(config.model, OPTIM, types, mesh=mesh)
    state, found = init_state(config.model, OPTIM, 0, mesh), []
    for batch in inputs:
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return found, state


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("resnet", "data=2,fsdp=2,tensor=2"),
        ("lstm", "data=2,fsdp=2,tensor=2"),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("resnet", "data=8"),
                ("unet", "data=2,fsdp=2,tensor=2"),
                ("vit", "data=2,fsdp=2,tensor=2"),
                ("ode", "data=2,fsdp=2,tensor=2"),
            )
        ],
    ],
)
def test_on_a_mesh_they_are_of_the_whole_batch(tmp_path: Path, name: str, mesh: str) -> None:
    """Losses, parameters and statistics equal those on one device."""
    config = run(tmp_path, MODELS[name], accumulate=2 if name == "resnet" else 1)
    (found, there), (expected, here) = (stepped(config, text) for text in (mesh, ""))
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
    pair = jax.device_get((there.statistics, here.statistics))
    chex.assert_trees_all_close(*pair, rtol=1e-4, atol=1e-5)
    pair = jax.device_get((there.params, here.params))
    chex.assert_trees_all_close(*pair, rtol=1e-3, atol=1e-4)


def test_a_step_that_is_skipped_leaves_them(tmp_path: Path) -> None:
    (batch,) = batches(run(tmp_path), 1)
    step = jax.jit(make_step(RESNET, OPTIM))
    state, _ = step(init_state(RESNET, OPTIM, 0), batch)
    spike = dataclasses.replace(state, usual_norm=jnp.float32(1e-6))
    kept, metrics = step(spike, batch)
    assert metrics["skipped"] == 1
    chex.assert_trees_all_equal(kept.statistics, state.statistics)
    moved, metrics = step(state, batch)
    assert metrics["skipped"] == 0
    assert not np.array_equal(*(jax.tree.leaves(s.statistics)[0] for s in (moved, state)))


def test_those_that_are_not_finite_skip_a_step_and_are_not_saved(tmp_path: Path) -> None:
    """A variance can overflow: the normalized value is then zero, and the loss stays finite."""
    (batch,) = batches(run(tmp_path), 1)
    state = init_state(RESNET, OPTIM, 0)
    kernel = lambda path, x: 1e25 * x if "stem" in str(path) and "kernel" in str(path) else x
    wide = jax.tree_util.tree_map_with_path(kernel, state.params)
    kept, metrics = jax.jit(make_step(RESNET, OPTIM))(
        dataclasses.replace(state, params=wide), batch
    )
    assert metrics["skipped"] == 1
    chex.assert_trees_all_equal(kept.statistics, state.statistics)
    broken = jax.tree.map(lambda x: x * jnp.inf, state.statistics)
    with (
        contextlib.closing(Store(tmp_path / "checkpoints")) as store,
        pytest.raises(InputError, match="after step 1 are not finite"),
    ):
        store.save(1, dataclasses.replace(state, statistics=broken), {})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_they_stay_float32_beside_a_computation_of_16_bits(tmp_path: Path, dtype: str) -> None:
    model = dataclasses.replace(RESNET, dtype=dtype)
    optim = dataclasses.replace(OPTIM, weight_dtype=dtype)
    types = abstract_state(model, optim), run(tmp_path, model).batch_type()
    after, metrics = jax.eval_shape(make_step(model, optim), *types)
    chex.assert_trees_all_equal_shapes_and_dtypes(after.statistics, types[0].statistics)
    assert metrics["loss"].dtype == metrics["accuracy"].dtype == jnp.float32
