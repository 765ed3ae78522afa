"""On any mesh a run is the run of one device: the same losses, in a part of the bytes."""

import dataclasses
import functools
import io
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from rich.console import Console

from models.errors import InputError
from models.nets.presets import TRAINED
from models.train.loop import train
from models.train.mesh import check_batch, make_mesh, on_devices, sizes
from models.train.optim import OPTIMIZERS, OptimConfig
from models.train.planned import plan_step, policy_of
from models.train.start import Resume
from models.train.state import abstract_state, device_bytes, init_state
from models.train.step import compile_step
from models.zigzag import zigzag_blocks
from tests.models.micro import MODEL, OPTIM, SIZES, losses, run

SMALL = {**SIZES, "experts": 4, "mlp_width": 48}
MIXTRAL = dataclasses.replace(TRAINED["tiny-mixtral"], **SMALL)
MESHES = ["data=8", "fsdp=8", "tensor=4", "data=2,fsdp=2,tensor=2", "context=8",
          "context=2,tensor=2,data=2"]  # fmt: skip


def stepped(model: Any, text: str, steps: int = 3, accumulate: int = 1,
            optim: OptimConfig = OPTIM) -> tuple[list[float], Any]:  # fmt: skip
    """Losses of some steps, and the state after them."""
    mesh = make_mesh(text)
    rng = np.random.default_rng(0)
    batches = rng.integers(0, 256, (steps, accumulate, 8, model.context + 1), dtype=np.uint8)
    blocks = functools.partial(zigzag_blocks, devices=sizes(text)["context"])
    inputs = [on_devices(np.apply_along_axis(blocks, -1, x), mesh, axis=1) for x in batches]
    step = compile_step(
        model, optim, jax.typeof(inputs[0]) if mesh is None else inputs[0], mesh=mesh
    )
    state, found = init_state(model, optim, 0, mesh), []
    for batch in inputs:
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return found, state


@pytest.fixture(scope="module")
def one() -> tuple[list[float], Any]:
    return stepped(MODEL, "")


@pytest.mark.parametrize("text", MESHES)
def test_losses_and_parameters_are_those_of_one_device(text: str, one: Any) -> None:
    found, state = stepped(MODEL, text)
    np.testing.assert_allclose(found, one[0], atol=1e-5, rtol=0)
    # Adam divides by the gradient's size, so that the smallest ones decide the tolerance.
    params = jax.device_get((state.params, one[1].params))
    chex.assert_trees_all_close(*params, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_on_a_mesh(name: str) -> None:
    optim = dataclasses.replace(OPTIM, optimizer=name)
    found, expected = (stepped(MODEL, text, optim=optim)[0] for text in ("fsdp=4,tensor=2", ""))
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["expert=4,data=2", "fsdp=2,expert=2,tensor=2"])
def test_losses_of_experts_are_those_of_one_device(text: str) -> None:
    np.testing.assert_allclose(
        stepped(MIXTRAL, text)[0], stepped(MIXTRAL, "")[0], atol=1e-5, rtol=0
    )


def test_batches_are_summed_as_on_one_device() -> None:
    found, expected = (stepped(MODEL, text, 2, 3)[0] for text in ("data=2,fsdp=2,tensor=2", ""))
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


def test_parameters_and_the_optimizers_state_are_parted() -> None:
    whole = device_bytes(abstract_state(MODEL, OPTIM))
    for text, parts in (("data=8", 1), ("fsdp=8", 8), ("fsdp=4,tensor=2", 8)):
        mesh = make_mesh(text)
        types = abstract_state(MODEL, OPTIM, mesh)
        # Norms and a few offsets are on each device.
        assert whole / parts <= device_bytes(types) < 1.2 * whole / parts
        state = init_state(MODEL, OPTIM, 0, mesh)
        chex.assert_trees_all_equal(
            jax.device_get(state), jax.device_get(init_state(MODEL, OPTIM, 0))
        )
        lies = lambda x, type_: x.sharding.is_equivalent_to(type_.sharding, x.ndim)
        assert all(jax.tree.leaves(jax.tree.map(lies, state, types)))
    moment = types.opt_state[1][0].mu["layers"]["each"]["mlp"]["up"]["kernel"]
    assert moment.get_value().sharding.spec == P(None, "fsdp", "tensor")


def test_each_device_holds_its_sequences() -> None:
    batch = np.arange(64).reshape(1, 8, 8)
    spread = on_devices(batch, make_mesh("data=2,fsdp=2,tensor=2"), axis=1)
    np.testing.assert_array_equal(spread, batch)
    assert {shard.data.shape for shard in spread.addressable_shards} == {(1, 2, 8)}
    odd = on_devices(batch[0, :3], make_mesh("data=2"), axis=0)
    assert {shard.data.shape for shard in odd.addressable_shards} == {(3, 8)}


def test_run_resumes_on_other_meshes_with_the_same_losses(tmp_path: Path) -> None:
    """8 devices, then 4, then 1: the losses are those of one device that was left alone."""
    quiet = lambda config, wish=None: train(config, Console(file=io.StringIO()), wish)
    alone = tmp_path / "alone"
    alone.mkdir()
    quiet(run(alone, batch=8))
    base = run(tmp_path, batch=8)
    quiet(dataclasses.replace(base, mesh="fsdp=4,tensor=2", max_seconds=0))
    quiet(dataclasses.replace(base, mesh="context=2,fsdp=2", max_seconds=0), Resume())
    assert quiet(base, Resume()).step == OPTIM.steps
    found, expected = ([loss for _, loss, _ in losses(out) if loss] for out in
                       (base.out, alone / "run"))  # fmt: skip
    assert len(found) == len(expected) == 12
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("dta=2", "'dta' is not one of .*did you mean data?"),
        ("data=2,data=2", "'data' is given twice"),
        ("data=x", "data is 'x', but must be a number"),
        ("data=0", "data is '0'"),
        ("data=9", "needs 9 devices, but there are 8: choose a --mesh of 8, or split the CPU"),
    ],
)
def test_meshes_that_cannot_be_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        make_mesh(text)


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    assert sizes("tensor=2,data=4") == {
        "data": 4, "fsdp": 1, "expert": 1, "context": 1, "tensor": 2
    }  # fmt: skip
    check_batch("tensor=2,data=4", 8, None)
    with pytest.raises(InputError, match="--batch 6 cannot be divided among 4 groups"):
        check_batch("tensor=2,data=4", 6, None)


def test_a_sequence_that_cannot_be_shared_is_refused() -> None:
    check_batch("context=4", 1, 16)
    with pytest.raises(InputError, match="--context 12 cannot be divided among 4 devices"):
        check_batch("context=4", 1, 12)
    with pytest.raises(InputError, match="only models of text can share sequences"):
        check_batch("context=4", 1, None)


def test_a_budget_is_of_each_device(tmp_path: Path) -> None:
    config, mesh = run(tmp_path, batch=64), make_mesh("fsdp=4,tensor=2")
    usual = plan_step(config, policy_of("min_cut"), mesh)
    bound = int(0.9 * usual.total_bytes)
    tight = plan_step(config, policy_of(f"budget:{bound}"), mesh)
    assert tight.total_bytes <= bound
    assert tight.plan.compiled_bytes == tight.total_bytes
